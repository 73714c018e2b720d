"""ATTNChecker's table: what becomes of errors in each section of attention, by how far they spread.

    python bench/attention_table.py --faults 10

A layer's attention with its projections, checked at rate 1 with `mode = "correct"`. An element (0D), a row (1D) or a
tile of 16 x 16 (2D) of a product's result becomes INF, NaN, near-INF, or 300 times what it was. Found:
recomputed in place, or refused, so that the slot is computed again. Wrong: some output or gradient is off by
more than 1 % of its norm, and the slot is not refused.
"""

import argparse
import math
import random
from collections import Counter

import torch

from attention_extremes import OneShot
from attention_flash import flash
from everstep.attention import fused, linear
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault
from everstep.attention.section import AttentionCheck

LENGTH, DIM, HEADS, KV_HEADS, HEAD = 128, 64, 4, 2, 16
FORWARD = {"Q, K, V": "wqkv.y", "CL": "context", "O": "wo.y"}
BACKWARD = {
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

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.checks = Checks(AttentionCheck(enable=True, frequency=1.0))
        self.shot = self.checks.injector = OneShot()
        self.guards = [self.checks.guard(0, name, ()) for name in ("wqkv", "inner", "wo")]
        self.x = torch.randn(1, LENGTH, DIM).to(dtype).requires_grad_()
        self.wqkv = (torch.randn((HEADS + 2 * KV_HEADS) * HEAD, DIM) / 8).to(dtype).requires_grad_()
        self.wo = (torch.randn(DIM, HEADS * HEAD) / 8).to(dtype).requires_grad_()
        self.dy = torch.randn(1, LENGTH, DIM).to(dtype)

    def run(self, section: str = "", fault: Fault | None = None) -> tuple[list[torch.Tensor], str]:
        """The output and all gradients, and what was done about the fault."""
        self.checks.begin(1, 0)
        self.shot.aim = None if fault is None else (0, section, fault)
        of_qkv, of_inner, of_out = self.guards
        parts = linear.linear(self.x, self.wqkv, None, of_qkv, linear.WeightSums()).unflatten(-1, (-1, HEAD))
        q, k, v = parts.split((HEADS, KV_HEADS, KV_HEADS), 2)
        out, _ = fused.attention(flash(), q, k, v, scale=None, guard=of_inner, wide_sums=True)
        y = linear.linear(out.flatten(2), self.wo, None, of_out, linear.WeightSums())
        gradients = torch.autograd.grad(y, (self.x, self.wqkv, self.wo), self.dy)
        refused = bool(self.checks.refused())
        actions = {finding["action"] for finding in self.checks.drain()}
        done = "refused" if refused else "recomputed" if "recomputed" in actions else ""
        return [y.detach(), *gradients], done


def harm(got: list[torch.Tensor], clean: list[torch.Tensor]) -> float:
    """The largest change of a result by its norm."""
    apart = (float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(got, clean, strict=True))
    return max(math.inf if math.isnan(x) else x for x in apart)


def table(faults: int) -> None:
    """Print the rows."""
    draw = random.Random(0)
    whole: Counter[str] = Counter()
    print(" " * 12 + "".join(f"{spread:>34s}" for spread in SPREAD))
    for title, section in (FORWARD | BACKWARD).items():
        line = f"{title:12s}"
        for kinds in SPREAD.values():
            became: Counter[str] = Counter()
            for dtype in (torch.float32, torch.bfloat16):
                layer = Layer(dtype, draw.randrange(2**31))
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
    print(dict(whole), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10, help="in each cell and dtype")
    args = parser.parse_args()
    table(args.faults)


if __name__ == "__main__":
    main()
