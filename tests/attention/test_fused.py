"""A stock kernel, watched."""

import pytest
import torch

from attention_clean import sdpa as sdpa_under
from everstep.attention import explicit, fused
from everstep.attention.identities import backward_deviation
from everstep.attention.injection import Fault
from everstep.attention.masks import Visible

sdpa = sdpa_under(Visible())


def with_lse(q, k, v):
    """A kernel that hands out its lse, as flex and varlen do."""
    return explicit.attention(q, k, v, Visible())


def operands(dtype=torch.float32, groups=2, length=64):
    q = torch.randn(2, length, 4, 16).to(dtype)
    k, v = (torch.randn(2, length, 4 // groups, 16).to(dtype) for _ in range(2))
    return *(x.requires_grad_() for x in (q, k, v)), torch.randn(2, length, 4, 16).to(dtype)


def computed(q, k, v, do, guard=None, kernel=sdpa, through=lambda out, lse: out):
    if guard is None:
        out, lse = kernel(q, k, v)
    else:
        out, lse = fused.attention(kernel, q, k, v, scale=None, guard=guard)
    out = through(out, lse)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", [sdpa, with_lse])
def test_watching_changes_no_bit_and_raises_no_alarm(bench, dtype, groups, kernel):
    args = operands(dtype, groups)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard, kernel))
    for a, b in zip(got, computed(*args, kernel=kernel), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert not findings


@pytest.mark.parametrize("section", fused.RESULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [Fault(kind, 0.4, magnitude=300.0) for kind in ("nan", "inf", "near-inf", "scale")])
def test_a_wrong_result_refuses_the_slot(bench, section, dtype, fault):
    if fault.kind == "scale" and dtype == torch.bfloat16 and section == "context":
        fault = Fault("scale", 0.4, magnitude=4.0)  # within the range of V
    _, refused, findings = bench.run(lambda guard: computed(*operands(dtype), guard), section, fault)
    assert refused
    if section != "context":
        assert {f["section"] for f in findings} == {"attention.backward"}


@pytest.mark.parametrize("hit", ["dq", "dk", "dv"])
def test_each_gradient_is_seen_wherever_it_moves(hit):
    """dK at right angles to its key, dQ to its query: the inner products <dQ, Q> and <dK, K> stay what they were."""
    q, k, v, do = operands(length=128)
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
