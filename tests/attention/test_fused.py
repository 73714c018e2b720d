"""Tests of a watched stock kernel."""

import pytest
import torch

from attention_clean import sdpa as sdpa_under
from everstep.attention import explicit, fused
from everstep.attention.identities import backward_deviation
from everstep.attention.masks import Visible

from .conftest import attended, attention_operands

sdpa = sdpa_under(Visible())


def with_lse(q, k, v):
    """A kernel that returns its lse, as flex and varlen do."""
    return explicit.attention(q, k, v, Visible())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", [sdpa, with_lse])
def test_watching_changes_no_bit_and_raises_no_alarm(bench, dtype, groups, kernel):
    args = attention_operands(dtype, groups, 64)

    def compute(guard):
        checked = kernel if guard is None else lambda *qkv: fused.attention(kernel, *qkv, scale=None, guard=guard)
        return attended(checked, *args)

    bench.changes_nothing(compute)


@pytest.mark.parametrize("hit", ["dq", "dk", "dv"])
def test_each_gradient_is_seen_wherever_it_moves(hit):
    """The error is at right angles to query and key, so the inner products <dQ, Q> and <dK, K> do not change."""
    q, k, v, do = attention_operands(torch.float32, 2, 128)
    out, _ = sdpa(q, k, v)
    gradients = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), do), strict=True))
    given = q, k, v, out.detach(), do
    assert not backward_deviation(*given, *gradients.values(), None, None, 0.25).bad().any()
    moved = 1e-3 * torch.randn(16)
    for other in (q, k):
        row = other.detach()[1, 20, 0]
        moved = moved - row * (moved @ row) / row.square().sum()
    gradients[hit][1, 20, 0] += moved
    bad = backward_deviation(*given, *gradients.values(), None, None, 0.25).bad()
    assert bad[1, 0].any()
    bad[1, 0] = False
    assert not bad.any()
