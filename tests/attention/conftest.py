"""Helpers and fixtures of the attention check's tests."""

import pytest
import torch

from attention_extremes import OneShot
from everstep.attention.guard import Checks
from everstep.attention.injection import Fault
from everstep.attention.section import AttentionCheck


class Bench:
    """One guard and its checks. It runs computations with an injected fault."""

    def __init__(self, **section) -> None:
        self.checks = Checks(AttentionCheck(enable=True, **{"frequency": 1.0, **section}))
        self.guard = self.checks.guard(3, "wqkv", ())
        self.checks.injector = self.shot = OneShot()

    def run(self, compute, section: str = "", fault: Fault | None = None):
        """Return the value of `compute(guard)`, whether the slot is refused, and the findings."""
        self.checks.begin(1, 0)
        self.shot.aim = (3, section, fault) if section else None
        value = compute(self.guard)
        assert self.shot.aim is None, f"nothing called {section} was computed"
        refused = bool(self.checks.refused())
        return value, refused, self.checks.findings.drain()

    def changes_nothing(self, compute) -> None:
        """Assert that compute's tensors have the same bits with and without a guard, and that there is no finding."""
        got, refused, findings = self.run(compute)
        for a, b in zip(got, compute(None), strict=True):
            assert torch.equal(a, b)
        assert (refused, findings) == (False, [])


def attention_operands(dtype, groups, length, head=16):
    """Return q, k, v of two sequences and four query heads, and a gradient of the output."""
    q, do = (torch.randn(2, length, 4, head).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, length, 4 // groups, head).to(dtype) for _ in range(2))
    return *(x.requires_grad_() for x in (q, k, v)), do


def attended(kernel, q, k, v, do):
    """Return a kernel's output, and the gradients of q, k and v."""
    out, _ = kernel(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
