"""Measure which faults inside a fused kernel the attention check finds. The faults hit every intermediate of every tile
of a FlashAttention, forward and backward, and what the forward saves for the backward.

    python bench/attention_inside.py --faults 3000 --json RESULT.json
    python bench/attention_inside.py --faults 1000 --dtypes bf16 --compile
    python bench/attention_inside.py --faults 1000 --dtypes bf16 --as sdpa

`--as sdpa`: check the kernel as PyTorch's own kernel is checked, which may round partial sums, returns no lse, and gets
as many columns of sums as values have.

A fault is harmful if it changes the output, or dQ, dK or dV, of some head by more than 1 % of its norm (`norm`). The
second column uses a stricter limit, 2^-7 of the largest element of the tensor (`element`), two units of bf16's last
place. Prints the number of faults found and of harmful faults, by intermediate.
"""

import argparse
import json
import math
import random
from collections import defaultdict
from pathlib import Path

import torch

from attention_flash import BACKWARD, FORWARD, Strike, exponent_or_sign, flash, flash_operator, hooks, untouched
from everstep.attention import compiled, fused, operators
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault
from everstep.attention.section import AttentionCheck

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ("flip", "extreme", "two bits", "tile")
STYLES = ("normal", "trained", "sharp", "flat")
NARROW = ("out", "saved out", "dq", "dk", "dv")
"""Intermediates in the operands' dtype; all others are in fp32."""


def operands(style: str, length: int, heads: int, groups: int, dim: int, dtype: torch.dtype, seed: int):
    """Draw q, k, v and dO of one sequence.

    Styles: `trained` has gradients whose size varies between tokens by factors of about e and that share a direction,
    and a first key that all queries attend to, with a small value. `sharp` and `flat` have scores times 4 and 1/30.
    """
    g = torch.Generator().manual_seed(seed)
    q, do = (torch.randn(1, length, heads, dim, generator=g) for _ in range(2))
    k, v = (torch.randn(1, length, heads // groups, dim, generator=g) for _ in range(2))
    if style == "trained":
        do = do * torch.exp(torch.randn(1, length, 1, 1, generator=g)) * 1e-3
        do = do + 0.3 * do.mean(1, keepdim=True)
        toward = q.unflatten(2, (-1, groups)).mean((1, 3))
        k[:, 0] = 0.2 * k[:, 0] + 6 * toward / toward.norm(dim=-1, keepdim=True) * math.sqrt(dim) / 4
        v[:, 0] *= 0.02
    q = q * {"sharp": 4.0, "flat": 1 / 30}.get(style, 1.0)
    return tuple(x.to(dtype) for x in (q, k, v, do))


def computed(inputs, hook, guard=None, graph=None) -> list[torch.Tensor]:
    """Return output, dQ, dK and dV. `graph`: a compiled call of the kernel with its checks."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    kernel = flash(hook)
    if guard is None:
        out, _ = kernel(q, k, v)
    elif graph is not None:
        hooks[:] = [hook]
        out = graph(q, k, v)
    elif guard.narrow:
        out, _ = fused.attention(kernel, q, k, v, scale=None, guard=guard, wide_sums=True)
    else:
        out, _ = fused.attention(lambda *x: (kernel(*x)[0], None), q, k, v, scale=None, guard=guard)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def harm(got: list[torch.Tensor], clean: list[torch.Tensor]) -> tuple[float, float]:
    """Return the largest change of a head by its norm, and of an element by the largest; inf if one is not finite."""
    norm = element = 0.0
    for a, b in zip(got, clean, strict=True):
        apart, b = a.double() - b.double(), b.double()
        by_head = (apart.square().sum((1, 3)) / b.square().sum((1, 3))).sqrt().max()
        norm = max(norm, by_head.nan_to_num(math.inf, math.inf).item())
        element = max(element, (apart.abs().max() / b.abs().max()).nan_to_num(math.inf, math.inf).item())
    return norm, element


def draw_fault(kind: str, name: str, dtype: torch.dtype, draw: random.Random) -> Fault:
    """Draw a fault of this kind for an intermediate."""
    of = dtype if name in NARROW else torch.float32
    if kind == "extreme":
        return Fault(draw.choice(("nan", "inf", "near-inf")), draw.random(), sign=draw.choice((-1, 1)))
    if kind == "tile":
        return Fault("tile", draw.random(), magnitude=draw.choice((-1.0, 0.0, 0.5, 2.0, 4.0)))
    fault = exponent_or_sign(of, draw)
    if kind == "flip":
        return fault
    bits = torch.finfo(of).bits
    return Fault("bits", fault.place, bit=(1 << fault.bit) | (1 << draw.randrange(bits - 12, bits)))


class Campaign:
    """Faults of one dtype, and whether they were found. flex: whether the kernel is checked as FlexAttention is, or as
    PyTorch's own kernel is."""

    def __init__(self, dtype: torch.dtype, *, seed: int = 0, in_graph: bool = False, flex: bool = True) -> None:
        self.dtype, self.draw = dtype, random.Random(seed)
        self.checks = Checks(AttentionCheck(enable=True, frequency=1.0, mode="detect"))
        self.guard = self.checks.guard(0, "inner", fused.RESULTS)
        self.guard.narrow = flex
        self.guard.kernel = lambda mask, scale, with_lse: flash() if flex else lambda *x: (flash()(*x)[0], None)
        self.graph = torch.compile(self._watched, backend="aot_eager", fullgraph=True) if in_graph else None
        self.rows: list[dict] = []
        self.alarms = self.clean = 0

    def _watched(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        known: dict = {"scale": None, "guard": self.guard}
        if self.guard.narrow:
            return operators.attention(flash_operator, q, k, v, wide_sums=True, hands_out_lse=True, **known)[0]
        return operators.attention(lambda *x: (flash_operator(*x)[0], None), q, k, v, **known)[0]

    def _run(self, inputs, hook) -> tuple[list[torch.Tensor], bool]:
        self.checks.begin(1, 0)
        got = computed(inputs, hook, self.guard, self.graph)
        refused = bool(self.checks.refused())
        self.checks.findings.drain()
        return got, refused

    def case(self, length: int, style: str, faults: int, names=(*FORWARD, *BACKWARD), kinds=KINDS) -> None:
        """Inject `faults` faults, one at a time, into one attention."""
        draw = self.draw
        groups = draw.choice((1, 2, 4))
        inputs = operands(
            style, length, max(2, groups), groups, draw.choice((32, 64)), self.dtype, draw.randrange(2**31)
        )
        count = Strike()
        clean = computed(inputs, count)
        alarm = self._run(inputs, untouched)[1]
        self.clean, self.alarms = self.clean + 1, self.alarms + alarm
        for _ in range(faults):
            name, kind = draw.choice(names), draw.choice(kinds)
            strike = Strike(name, draw.randrange(count.counts[name]), draw_fault(kind, name, self.dtype, draw))
            got, found = self._run(inputs, strike)
            norm, element = harm(got, clean)
            self.rows.append(
                {"name": name, "kind": kind, "length": length, "style": style}
                | {"norm": norm > 0.01, "element": element > 2**-7, "found": found}
            )

    def found(self, by: str, **only) -> tuple[int, int]:
        """Return how many harmful faults were found, and how many there were, by this measure of harm."""
        rows = [row for row in self.rows if row[by] and all(row[key] == value for key, value in only.items())]
        return sum(row["found"] for row in rows), len(rows)


def show(campaign: Campaign, title: str) -> dict:
    """Print found and harmful faults by intermediate; return them."""
    print(f"\n{title}: {campaign.clean} clean runs, {campaign.alarms} alarms")
    print(
        f"{'':12s}" + "".join(f"{kind:>26s}" for kind in KINDS) + "\n" + " " * 12 + f"{'norm':>13s}{'element':>13s}" * 4
    )
    table: dict = defaultdict(dict)
    for name in (*FORWARD, *BACKWARD):
        line = f"{name:12s}"
        for kind in KINDS:
            for by in ("norm", "element"):
                found, harmful = campaign.found(by, name=name, kind=kind)
                table[name][f"{kind}, {by}"] = [found, harmful]
                line += f"{found:6d}/{harmful:<6d}"
        print(line)
    for part, names in (("forward", FORWARD), ("backward", BACKWARD)):
        line = f"{part:12s}"
        for kind in KINDS:
            for by in ("norm", "element"):
                pairs = [table[name][f"{kind}, {by}"] for name in names]
                found, harmful = (sum(column) for column in zip(*pairs, strict=True))
                table[part][f"{kind}, {by}"] = [found, harmful]
                line += f"{found:6d}/{harmful:<6d}"
        print(line, flush=True)
    return dict(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=3000, help="faults for each dtype")
    parser.add_argument("--lengths", default="128,256,512")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32")
    parser.add_argument("--each", type=int, default=50, help="faults injected into one attention")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the kernel and its checks")
    parser.add_argument("--as", dest="kind", choices=("flex", "sdpa"), default="flex", help="how it is checked")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.compile:
        torch._dynamo.config.recompile_limit = 1000
        # Not compiled: the arithmetic is the same, and compiling would take a minute for each shape.
        setattr(compiled, "_compiled", lambda function: function)  # noqa: B010
    results = {}
    for name in args.dtypes.split(","):
        campaign = Campaign(DTYPES[name], seed=args.seed, in_graph=args.compile, flex=args.kind == "flex")
        for turn in range(args.faults // args.each):
            length = int(campaign.draw.choice(args.lengths.split(",")))
            campaign.case(length, STYLES[turn % len(STYLES)], args.each)
        results[name] = {"clean": campaign.clean, "alarms": campaign.alarms} | show(campaign, name)
        results[name]["rows"] = campaign.rows
    if args.json:
        args.json.write_text(json.dumps({"args": {k: str(v) for k, v in vars(args).items()}, **results}))


if __name__ == "__main__":
    main()
