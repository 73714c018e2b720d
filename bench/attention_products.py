"""Faults in the arithmetic itself: CPU kernels of matrix products are replaced in PyTorch's dispatcher, so that any
product can come out wrong, the checks' own included, and not only what our injector knows.

    python bench/attention_products.py --faults 4000

A checked projection, forward and backward, with inner lengths of up to 8192 in y and dX or in dW; fp32, bf16 and fp16.
One element (or tile, or two bits) of one product is hit. Harm: y, dX or dW, as training would go on with it, is
off by more than its root mean square somewhere, or not finite. Missed: harm, and neither a finding nor a refused slot.
Wrongly repaired: harm, though a repair was reported and no slot refused.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from everstep.attention.guard import Checks
from everstep.attention.injection import Fault, inject
from everstep.attention.linear import WeightSums, linear, result_names
from everstep.attention.section import AttentionCheck

EXTREME = ("nan", "inf", "near-inf")
KINDS = (*EXTREME, "exponent or sign", "two bits", "tile")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HIGH_BITS = {torch.float32: range(23, 32), torch.bfloat16: range(7, 16), torch.float16: range(10, 16)}
"""Exponent and sign."""


class Products:
    """Stands before CPU products: counts them, and hits the result of one."""

    def __init__(self) -> None:
        self.made = 0
        self._due: int | None = None
        self._fault: Fault | None = None
        self._inside = False

    def kernel(self, name: str):
        original = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(keys, *args, **kwargs):
            if self._inside:  # a kernel that calls another one
                return original.call_boxed(keys, *args, **kwargs)
            self._inside = True
            try:
                out = original.call_boxed(keys, *args, **kwargs)
            finally:
                self._inside = False
            if self.made == self._due and self._fault is not None:
                out.copy_(inject(out, self._fault))
            self.made += 1
            return out

        return product

    def arm(self, number: int | None, fault: Fault | None = None) -> None:
        """Hit the product of this number, counted from now on."""
        self.made, self._due, self._fault = 0, number, fault


@contextmanager
def faulty_products() -> Iterator[Products]:
    """Within, every product of a CPU is `Products`'."""
    products, library = Products(), torch.library.Library("aten", "IMPL")
    try:
        for name in ("mm", "addmm", "bmm", "mv"):
            library.impl(name, products.kernel(name), "CPU", with_keyset=True)
        yield products
    finally:
        library._destroy()


def drawn(kind: str, dtype: torch.dtype, draw: random.Random) -> Fault:
    """A fault of this kind in a result of this dtype; one that is in another one hits its bits as far as they go."""
    bits = HIGH_BITS[dtype]
    if kind == "exponent or sign":
        return Fault("bitflip", draw.random(), draw.choice(bits))
    if kind == "two bits":
        return Fault("bits", draw.random(), 1 << draw.choice(bits) | 1 << draw.randrange(bits[0]))
    return Fault(kind, draw.random(), magnitude=1e3, sign=draw.choice((-1, 1)))


def campaign(faults: int, seed: int, inner: tuple[int, ...], dtypes: tuple[str, ...]) -> dict[str, Counter]:
    """By dtype, inner length and kind: what became of the faults."""
    draw, told = random.Random(seed), {}
    with faulty_products() as products:
        for number in range(faults):
            name, length, kind = draw.choice(dtypes), draw.choice(inner), draw.choice(KINDS)
            dtype, of_dw = DTYPES[name], draw.random() < 0.4
            torch.manual_seed(seed * 1_000_003 + number)
            tokens, width = (length, 64) if of_dw else (64, length)
            x, w = torch.randn(tokens, width).to(dtype), (torch.randn(128, width) * width**-0.5).to(dtype)
            dy = torch.randn(tokens, 128).to(dtype)
            checks = Checks(AttentionCheck(enable=True, frequency=1.0))
            guard, sums = checks.guard(0, "wo", result_names("wo")), WeightSums()

            def run(step, x=x, w=w, dy=dy, guard=guard, sums=sums, checks=checks):
                checks.begin(step, 0)
                a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
                y = linear(a, b, None, guard, sums)
                return (y.detach(), *torch.autograd.grad(y, (a, b), dy)), checks.refused(), checks.drain()

            products.arm(None)
            clean, refused, findings = run(1)
            assert not refused, "an alarm on clean data"
            assert not findings, "an alarm on clean data"
            products.arm(draw.randrange(products.made), drawn(kind, dtype, draw))
            got, refused, findings = run(2)
            products.arm(None)
            harm = any(
                not bool(((a.double() - b.double()).abs() <= b.double().square().mean().sqrt()).all())
                for a, b in zip(got, clean, strict=True)
            )
            count = told.setdefault(f"{name}, {kind}", Counter())
            count["faults"] += 1
            count[
                "refused" if refused else "harmless" if not harm else "repaired wrongly" if findings else "missed"
            ] += 1
            count["found"] += bool(findings)
            if harm and not refused:
                print("HARM", name, kind, length, "dW" if of_dw else "y", findings[:1], flush=True)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    told = campaign(args.faults, args.seed, (256, 1024, 4096, 8192), tuple(DTYPES))
    for name in sorted(told):
        print(f"{name:28s} {dict(told[name])}")
    whole = sum(told.values(), Counter())
    extreme = sum((count for name, count in told.items() if name.split(", ")[1] in EXTREME), Counter())
    print(json.dumps({"all": whole, "extreme": extreme}))


if __name__ == "__main__":
    main()
