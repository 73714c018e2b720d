"""Put INF, NaN and near-INF anywhere into attention, with no sampled checks: what reaches a commit, and how it harms.

    python bench/attention_extremes.py --faults 5000

The model is a Llama 3 of two layers whose attention is the emulated kernel of attention_flash.py. A fault hits any
intermediate of any tile, in the forward, the backward or between them, or any result of a projection. Half of the
faults are in fp32, half in bf16. Half of each are in an eager model, half in one that `torch.compile` compiled block by
block, with the kernel as an operator in its graphs. The slot is then judged as a group judges it: whether the checks
refuse it, whether its loss is finite, and whether all elements of its gradient are within `step.reduction.LARGEST`.
No sampled check is drawn, only what is checked in every slot counts; the default also samples, and finds more.

The harm of a fault that passes is the largest change of a parameter's gradient, relative to its norm in a step of
--tokens. Without --tokens a step is one slot, and the checks look at rows of P as well. In steps of 65,536 tokens, one
sequence of 8192 on eight devices, they do not: a row that the kernel loses in one head is one token's share of a
gradient, so its harm falls with the square root of the tokens. Several faults share a model and its data.
"""

import argparse
import functools
import itertools
import math
import random
from collections import Counter
from typing import Any

import torch
from torch import nn

from attention_flash import BACKWARD, FORWARD, Strike, flash, flash_operator, hooks, untouched
from everstep.attention import fused, linear, operators
from everstep.attention.guard import LARGE_STEP, Checks, Guard
from everstep.attention.injection import Fault, Injector, inject
from everstep.attention.section import AttentionCheck, Inject
from everstep.step.reduction import LARGEST, all_within

LENGTH, DIM, HEADS, KV_HEADS, HEAD, WORDS, LAYERS = 128, 64, 4, 2, 16, 64, 2
HARMFUL = 0.01
FAULTS_OF_DATA = 8
"""Faults on the same tokens, which share one computation of the clean gradients."""
PROJECTED = tuple(name for module in ("wqkv", "wo") for name in linear.result_names(module))
KINDS = ("inf", "nan", "near-inf")


class OneShot(Injector):
    """Hits one result of one layer, once. active: whether layers know that they may be hit, and so do not take the
    path of a slot without checks."""

    active = True

    def __init__(self) -> None:
        super().__init__(Inject())
        self.aim: tuple[int, str, Fault] | None = None

    def begin(self, step: int) -> None:
        """Schedule nothing: `aim` is set from outside."""

    def fault_for(self, layer: int, section: str, part: int = 0, parts: int = 1) -> Fault | None:
        if self.aim is None or self.aim[:2] != (layer, section):
            return None
        fault, self.aim = self.aim[2], None
        return fault


class Block(nn.Module):
    """One layer with checked attention; `hook` sees the kernel's intermediates."""

    def __init__(self, checks: Checks, layer: int) -> None:
        super().__init__()
        self.wqkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.guards = [checks.guard(layer, name, ()) for name in ("wqkv", "inner", "wo")]
        self.guards[1].narrow = True
        self.hook: Any = untouched

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, L, D) to (B, L, D)."""
        of_qkv, of_inner, of_out = self.guards
        qkv = self.projected(self.first(x), self.wqkv, of_qkv).unflatten(-1, (-1, HEAD))
        q, k, v = (part.contiguous() for part in qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2))
        known = {"scale": None, "guard": of_inner, "wide_sums": True}
        if torch.compiler.is_compiling():
            out, _ = operators.attention(flash_operator, q, k, v, hands_out_lse=True, **known)
        else:
            out, _ = fused.attention(flash(self.hook), q, k, v, **known)
        h = x + self.projected(out.flatten(2), self.wo, of_out)
        return h + self.down(nn.functional.silu(self.up(self.second(h))))

    def projected(self, x: torch.Tensor, module: nn.Linear, guard: Guard) -> torch.Tensor:
        """Project as titan.attention.CheckedLinear does. Faults come from here if the layer runs as without faults."""
        if torch.compiler.is_compiling():
            return operators.linear(x, module.weight, None, guard)
        x, weight = x.view_as(x), module.weight.view_as(module.weight)
        for part, tensor in (("dx", x), ("dw", weight)):
            fault = guard.checks.injector.fault_for(guard.layer, f"{guard.name}.{part}")
            if fault is not None:
                tensor.register_hook(functools.partial(inject, fault=fault))
        y = linear.linear(x, weight, None, guard)
        fault = guard.checks.injector.fault_for(guard.layer, f"{guard.name}.y")
        if fault is not None:
            y.data.copy_(inject(y.detach(), fault))
        return y


class Model(nn.Module):
    """A small Llama 3 without positional embedding."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, DIM), nn.RMSNorm(DIM)
        self.layers = nn.ModuleList(Block(checks, layer) for layer in range(LAYERS))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tokens' losses."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Campaign:
    """Faults in a model of one dtype, eager or compiled."""

    def __init__(
        self, dtype: torch.dtype, seed: int, *, compiled: bool = False, length: int = LENGTH, tokens: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.length, tokens = length, tokens or length
        self.draw = random.Random(seed)
        self.checks = Checks(AttentionCheck(enable=True, frequency=0.0))
        self.checks.looks_at_rows = tokens < LARGE_STEP
        self.shot = self.checks.injector = OneShot()
        self.model = Model(self.checks).to(dtype)
        self.compiled = self.shot.active = compiled
        if compiled:
            for layer in self.model.layers:
                layer.compile(fullgraph=True)
        self.rest = [torch.zeros_like(p, dtype=torch.float64) for p in self.model.parameters()]
        """Sum of the gradients of the step's other slots, by parameter."""
        for _ in range(tokens // length - 1):
            for total, part in zip(self.rest, self.slot(*self.data())[0], strict=True):
                total += part
        self.renew()

    def renew(self) -> None:
        """Draw other tokens, compute their clean gradients and count the tiles, which are the same in all layers."""
        self.tokens, self.count = self.data(), Strike()
        self.watch(0, self.count)
        self.clean, dropped = self.slot(*self.tokens)
        assert not dropped, "a false alarm: no fault was injected"
        self.watch(0, untouched)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw tokens and labels of a slot."""
        tokens = torch.randint(0, WORDS, (1, self.length))
        return tokens, tokens.roll(-1, 1)

    def slot(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
        """Return the gradients of a slot, and whether its group would drop them."""
        self.model.zero_grad()
        self.checks.begin(1, 0)
        loss = self.model(tokens, labels)
        (loss / self.length).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        dropped = bool(self.checks.refused()) or not loss.isfinite() or not all_within(LARGEST, gradients)
        self.checks.findings.drain()
        return [g.detach().double().clone() for g in gradients], bool(dropped)

    def watch(self, number: int, hook: Any) -> None:
        """Have `hook` see the intermediates of a layer's kernel."""
        if self.compiled:  # all layers share one operator, so its calls are counted to tell the layers apart
            hooks[:] = [OfLayer(number, hook)]
        else:
            self.model.layers[number].hook = hook

    def fault(self) -> tuple[str, str, bool, float]:
        """Inject a fault. Returns where it was, its kind, whether it was seen, and how much it harms its step."""
        draw = self.draw
        kind, number = draw.choice(KINDS), draw.randrange(LAYERS)
        fault = Fault(kind, draw.random(), sign=draw.choice((-1, 1)))
        name = draw.choice((*FORWARD, *BACKWARD, *PROJECTED))
        strike = untouched
        if name in PROJECTED:
            self.shot.aim = (number, name, fault)
        else:
            strike = Strike(name, draw.randrange(self.count.counts[name]), fault)
        self.watch(number, strike)
        got, dropped = self.slot(*self.tokens)
        self.watch(number, untouched)
        assert self.shot.aim is None, f"{name} was not hit"
        assert getattr(strike, "hit", True), f"{name} was not hit"
        harm = max(
            float((a - b).norm().nan_to_num(math.inf)) / max(float((b + rest).norm()), 1e-30)
            for a, b, rest in zip(got, self.clean, self.rest, strict=True)
        )
        return name, kind, dropped, harm


class OfLayer:
    """A hook for one layer that all layers' kernels call: forwards in the order of layers, backwards in reverse."""

    def __init__(self, number: int, hook: Any) -> None:
        self.hook, self.calls = hook, 0
        self.mine = number, 2 * LAYERS - 1 - number

    def __call__(self, name: str, tile: torch.Tensor) -> torch.Tensor:
        at = self.calls % (2 * LAYERS)
        if name in ("lse", "dv"):  # the last intermediate of a forward, of a backward
            self.calls += 1
        return self.hook(name, tile) if at in self.mine else tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=LENGTH, help="length of a sequence; a slot is one sequence")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a step; 0: a step is one slot")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    for turn, (dtype, compiled) in enumerate(itertools.product((torch.float32, torch.bfloat16), (False, True))):
        sizes = {"length": args.length, "tokens": args.tokens}
        campaign = Campaign(dtype, args.seed + turn, compiled=compiled, **sizes)
        became: Counter[tuple[str, str]] = Counter()
        where: Counter[tuple[str, str]] = Counter()
        worst = 0.0
        for number in range(args.faults // 4):
            if number and number % FAULTS_OF_DATA == 0:
                campaign.renew()
            name, kind, dropped, harm = campaign.fault()
            fate = "seen" if dropped else "harms the step" if harm > HARMFUL else "harmless"
            became[kind, fate] += 1
            total[fate] += 1
            if not dropped:
                worst = max(worst, harm)
                where[name, kind] += harm > HARMFUL
            if fate == "harms the step":
                print(f"    seed {args.seed + turn}, fault {number}: {name} {kind}: {harm:.2%}", flush=True)
        print(f"{dtype}, {'compiled' if compiled else 'eager'}: {dict(became)}; harmful and not seen: {dict(+where)}")
        print(f"    the largest harm of a fault that passed is {worst:.2%} of its step", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
