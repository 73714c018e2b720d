"""INF, NaN and near-INF anywhere in attention, at no rate of checks: what reaches a committed step, and its harm.

    python bench/attention_extremes.py --faults 5000

A Llama 3 of two layers, one slot a step, whose attention is the emulated kernel of attention_flash.py: any intermediate
of any of its tiles is hit, forward, backward and between them, and any result of a projection. The slot's gradient is
then asked what a group asks: whether the checks refuse the slot (none is drawn here: only what is looked at in every
slot counts, and the default's sampled checks find more), whether its loss is finite, and whether the elements of its
sum are within `step.reduction.LARGEST`. Harm: the largest change of a parameter's gradient, by its norm.
"""

import argparse
import random
from collections import Counter
from typing import Any

import torch
from torch import nn

from attention_flash import BACKWARD, FORWARD, Strike, flash
from everstep.attention import fused, linear
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault, Injector
from everstep.attention.section import AttentionCheck, Inject
from everstep.step.reduction import LARGEST, all_within

LENGTH, DIM, HEADS, KV_HEADS, HEAD, WORDS, LAYERS = 128, 64, 4, 2, 16, 64, 2
HARMFUL = 0.01
PROJECTED = tuple(name for module in ("wqkv", "wo") for name in linear.result_names(module))
KINDS = ("inf", "nan", "near-inf")


class OneShot(Injector):
    """Hits one result of one layer, once."""

    def __init__(self) -> None:
        super().__init__(Inject())
        self.aim: tuple[int, str, Fault] | None = None

    @property
    def active(self) -> bool:
        return True

    def begin(self, step: int) -> None:
        """Nothing is due by itself."""

    def strike(self, layer: int, section: str, part: int = 0, parts: int = 1) -> Fault | None:
        if self.aim is None or self.aim[:2] != (layer, section):
            return None
        fault, self.aim = self.aim[2], None
        return fault


class Block(nn.Module):
    """One layer, its attention watched; `hook` sees the kernel's intermediates."""

    def __init__(self, checks: Checks, layer: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.guards = [checks.guard(layer, name, ()) for name in ("wqkv", "inner", "wo")]
        self.sums = [linear.WeightSums(), linear.WeightSums()]
        self.hook = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to the same."""
        of_qkv, of_inner, of_out = self.guards
        qkv = linear.linear(self.first(x), self.wqkv.weight, None, of_qkv, self.sums[0]).unflatten(-1, (-1, HEAD))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        kernel = flash(block=64) if self.hook is None else flash(block=64, hook=self.hook)
        out, _ = fused.attention(kernel, q, k, v, scale=None, guard=of_inner, wide_sums=True)
        h = x + linear.linear(out.flatten(2), self.wo.weight, None, of_out, self.sums[1])
        return h + self.down(nn.functional.silu(self.up(self.second(h))))


class Model(nn.Module):
    """Llama 3, small, without positions."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Block(checks, layer) for layer in range(LAYERS))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the tokens' losses."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Campaign:
    """Faults in one dtype, and what became of them."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.draw = random.Random(seed)
        self.checks = Checks(AttentionCheck(enable=True, frequency=0.0))
        self.shot = self.checks.injector = OneShot()
        self.model = Model(self.checks).to(dtype)
        self.counts: Counter[tuple[str, str]] = Counter()

    def slot(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
        """The gradients of a slot, and whether its group would let go of them."""
        self.model.zero_grad()
        self.checks.begin(1, 0)
        loss = self.model(tokens, labels)
        (loss / LENGTH).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        dropped = bool(self.checks.refused()) or not loss.isfinite() or not all_within(LARGEST, gradients)
        self.checks.drain()
        return [g.detach().double().clone() for g in gradients], bool(dropped)

    def fault(self) -> tuple[str, str, bool, float]:
        """One fault on new data: where, its kind, whether it was seen, and how much it harms."""
        draw = self.draw
        tokens = torch.randint(0, WORDS, (1, LENGTH))
        labels = tokens.roll(-1, 1)
        kind, number = draw.choice(KINDS), draw.randrange(LAYERS)
        layer: Any = self.model.layers[number]
        fault = Fault(kind, draw.random(), sign=draw.choice((-1, 1)))
        name = draw.choice((*FORWARD, *BACKWARD, *PROJECTED))
        count = Strike()
        layer.hook = count
        clean, dropped = self.slot(tokens, labels)
        assert not dropped, "an alarm without a fault"
        if name in PROJECTED:
            layer.hook, self.shot.aim = None, (number, name, fault)
        else:
            layer.hook = Strike(name, draw.randrange(count.counts[name]), fault)
        got, dropped = self.slot(tokens, labels)
        layer.hook = None
        harm = max(
            float((a - b).norm() / b.norm().clamp_min(1e-30)) if a.isfinite().all() else float("inf")
            for a, b in zip(got, clean, strict=True)
        )
        return name, kind, dropped, harm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for dtype in (torch.float32, torch.bfloat16):
        campaign, seen, passed = Campaign(dtype, args.seed), Counter(), Counter()
        worst = 0.0
        for _ in range(args.faults // 2):
            name, kind, dropped, harm = campaign.fault()
            seen[kind, "seen" if dropped else "harmless" if harm <= HARMFUL else "committed"] += 1
            if not dropped and harm > HARMFUL:
                passed[name, kind], worst = passed[name, kind] + 1, max(worst, harm)
        print(f"{dtype}: {dict(seen)}; committed, by where: {dict(passed)}; the largest harm {worst:.3g}", flush=True)


if __name__ == "__main__":
    main()
