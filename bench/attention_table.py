"""Reproduce ATTNChecker's table: what becomes of errors in each section of attention, by their extent, on both paths.

    python bench/attention_table.py --faults 10
    python bench/attention_table.py --recovery

It runs one layer's attention with its projections, checked at rate 1 with `mode = "correct"`. An element (0D), a row
(1D) or a tile of 16 x 16 (2D) of a product's result becomes INF, NaN, near-INF, or 300 times its value. An error is
corrected from checksums, recomputed in place, or refused, so that the slot is computed again. It counts as wrong if
the slot is not refused and an output or a gradient is off by more than 1 % of its norm.

`--recovery` prints the processor time that a finding takes on the Llama 3 debug model, and that of a checkpoint.
"""

import argparse
import math
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F

from attention_extremes import OneShot
from attention_flash import flash
from everstep.attention import explicit, fused, linear
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault
from everstep.attention.masks import Visible
from everstep.attention.section import AttentionCheck

LENGTH, DIM, HEADS, KV_HEADS, HEAD = 128, 64, 4, 2, 16
FORWARD = {"Q, K, V": "wqkv.y", "AS": "scores", "CL": "context", "O": "wo.y"}
BACKWARD = {
    "AS again": "scores.backward",
    "dP": "dp",
    "dQ": "dq",
    "dK": "dk",
    "dV": "dv",
    "dX": "wqkv.dx",
    "dCL": "wo.dx",
    "dW": "wqkv.dw",
    "dWo": "wo.dw",
}
SPREAD = {"0D": ("inf", "nan", "near-inf", "scale"), "1D": ("row",), "2D": ("tile",)}
MAGNITUDES = (math.inf, math.nan, 1e37, 300.0)


class Layer:
    """One layer's attention and its checks."""

    def __init__(self, path: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.path, self.checks = path, Checks(AttentionCheck(enable=True, frequency=1.0))
        self.shot = self.checks.injector = OneShot()
        self.guards = [self.checks.guard(0, name, ()) for name in ("wqkv", "inner", "wo")]
        self.guards[1].narrow = True
        self.x = torch.randn(1, LENGTH, DIM).to(dtype).requires_grad_()
        self.wqkv = (torch.randn((HEADS + 2 * KV_HEADS) * HEAD, DIM) / 8).to(dtype).requires_grad_()
        self.wo = (torch.randn(DIM, HEADS * HEAD) / 8).to(dtype).requires_grad_()
        self.dy = torch.randn(1, LENGTH, DIM).to(dtype)

    def run(self, section: str = "", fault: Fault | None = None) -> tuple[list[torch.Tensor], str]:
        """Run forward and backward. Returns the output, all gradients, and what was done about the fault."""
        self.checks.begin(1, 0)
        self.shot.aim = None if fault is None else (0, section, fault)
        of_qkv, of_inner, of_out = self.guards
        parts = linear.linear(self.x, self.wqkv, None, of_qkv).unflatten(-1, (-1, HEAD))
        q, k, v = parts.split((HEADS, KV_HEADS, KV_HEADS), 2)
        if self.path == "explicit":
            out, _ = explicit.attention(q, k, v, Visible(), guard=of_inner)
        else:
            out, _ = fused.attention(flash(), q, k, v, scale=None, guard=of_inner, wide_sums=True)
        y = linear.linear(out.flatten(2), self.wo, None, of_out)
        gradients = torch.autograd.grad(y, (self.x, self.wqkv, self.wo), self.dy)
        refused = bool(self.checks.refused())
        actions = {finding["action"] for finding in self.checks.findings.drain()}
        done = "refused" if refused else "recomputed" if "recomputed" in actions else ""
        return [y.detach(), *gradients], done or ("corrected" if actions else "")


def harm(got: list[torch.Tensor], clean: list[torch.Tensor]) -> float:
    """Return the largest change of a result, relative to its norm."""
    apart = (float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, clean, strict=True))
    return max(math.inf if math.isnan(x) else x for x in apart)


def table(path: str, faults: int) -> None:
    """Print the rows of one path."""
    draw = random.Random(path)
    whole: Counter[str] = Counter()
    print(f"{path:12s}" + "".join(f"{spread:>34s}" for spread in SPREAD))
    for title, section in (FORWARD | BACKWARD).items():
        if path == "fused" and section in ("scores", "scores.backward", "dp"):
            continue  # these are inside the kernel
        line = f"{title:12s}"
        for kinds in SPREAD.values():
            became: Counter[str] = Counter()
            for dtype in (torch.float32, torch.bfloat16):
                layer = Layer(path, dtype, draw.randrange(2**31))
                clean, _ = layer.run()
                for _ in range(faults):
                    kind, magnitude = draw.choice(kinds), draw.choice(MAGNITUDES)
                    if kind == "scale":
                        magnitude = 300.0
                    got, done = layer.run(section, Fault(kind, draw.random(), magnitude=magnitude))
                    assert layer.shot.aim is None, section
                    off = harm(got, clean) > 0.01
                    became["wrong" if off and done != "refused" else done or "harmless"] += 1
            whole += became
            said = " ".join(f"{count} {what}" for what, count in became.most_common())
            line += f"{said:>34s}"
        print(line, flush=True)
    print(f"{path}: {dict(whole)}", flush=True)


def recovery() -> None:
    """Print the median processor time of a finding, and of writing and reading a checkpoint."""
    from everstep.titan import cpu, cpu_attention

    if not cpu.has_accelerator():
        cpu.stand_in()
    from torchtitan.config import TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.trainer import Trainer

    from everstep.titan import attention

    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    config = Trainer.Config(model_spec=spec, training=TrainingConfig(seq_len=256, local_batch_size=1))
    config.training.disable_cuda_graphs = True
    cpu_attention.prepare(config)
    section = AttentionCheck(enable=True, frequency=1.0, path="explicit")
    attention.apply(config, section)
    spec.model.update_from_config(config=config)
    model = spec.model.build()
    attention.make_checkable(model)
    model.init_weights(buffer_device=torch.device("cpu"))
    checks = attention.attach([model], section)
    shot = checks.injector = OneShot()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(0, spec.model.vocab_size, (1, 256))
    positions = torch.arange(256).view(1, -1)
    masks = model.get_attention_masks(positions=positions)

    def slot(aim=None) -> None:
        shot.aim = aim
        checks.begin(1, 0)
        logits = model(tokens, positions=positions, attention_masks=masks)
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        checks.refused()
        checks.findings.drain()

    def restored() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.pt"
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
            state = torch.load(path, weights_only=True)  # noqa: TID251 weights_only
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

    def seconds(call, times: int = 9) -> float:
        took = []
        for _ in range(times):
            begin = time.process_time()
            call()
            took.append(time.process_time() - begin)
        return sorted(took)[times // 2]

    slot()
    optimizer.step()
    clean = seconds(slot)
    print(f"a slot takes {1e3 * clean:.1f} ms; a refused slot takes this time again")
    for name in ("scores", "context", "dq", "dk", "wqkv.y"):
        extra = seconds(lambda name=name: slot((2, name, Fault("inf", 0.3)))) - clean
        print(f"INF in {name}: repaired in {1e3 * extra:.1f} ms, {extra / clean:.1%} of a slot")
    back = seconds(restored, 5)
    print(f"a checkpoint takes {1e3 * back:.1f} ms to write and read, and then the step's slots are computed again")
    print(f"checkpoint and restore / slot computed again: {(back + clean) / clean:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10, help="faults in each cell and dtype")
    parser.add_argument("--recovery", action="store_true", help="print the time of recoveries instead")
    args = parser.parse_args()
    if args.recovery:
        recovery()
        return
    for path in ("explicit", "fused"):
        table(path, args.faults)


if __name__ == "__main__":
    main()
