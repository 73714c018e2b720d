"""A stock kernel, watched."""

import pytest
import torch
import torch.nn.functional as F

from everstep.attention import explicit, fused
from everstep.attention.identities import backward_deviation, forward_deviation, lse_deviation, output_side
from everstep.attention.injection import Fault
from everstep.attention.masks import Visible


def sdpa(q, k, v):
    gqa = q.shape[2] != k.shape[2]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=gqa
    )
    return out.transpose(1, 2), None


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


@pytest.mark.parametrize("kind", ["nan", "inf", "near-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_extreme_output_is_repaired_at_once(bench, kind, dtype):
    args = operands(dtype)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), "context", Fault(kind, 0.4))
    for a, b in zip(got, computed(*args), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert [(f["section"], f["action"]) for f in findings] == [("attention.forward", "recomputed")]


def test_a_nan_score_is_repaired_with_what_the_kernel_keeps_of_it(bench):
    args = operands()
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), "scores", Fault("nan", 0.4))
    for a, b in zip(got, computed(*args), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert findings[0]["action"] == "recomputed"


@pytest.mark.parametrize(("section", "magnitude"), [("scores", 40.0), ("dq", 300.0), ("dk", 300.0), ("dv", 300.0)])
def test_what_only_forward_and_backward_together_show_refuses_the_slot(bench, section, magnitude):
    _, refused, findings = bench.run(
        lambda guard: computed(*operands(), guard), section, Fault("scale", 0.4, magnitude=magnitude)
    )
    assert refused
    assert [(f["section"], f["action"]) for f in findings] == [("attention.backward", "refused")]


@pytest.mark.parametrize("section", ["dq", "dk", "dv"])
@pytest.mark.parametrize("kind", ["nan", "inf", "near-inf"])
def test_extreme_gradients_refuse_the_slot(bench, section, kind):
    _, refused, _ = bench.run(lambda guard: computed(*operands(torch.bfloat16), guard), section, Fault(kind, 0.4))
    assert refused


def test_an_out_transform_that_uses_lse_is_part_of_the_identities(bench):
    """Attention sinks rescale the output by lse: rows of dS then sum to its gradient, not to 0."""
    args = operands()
    sink = lambda out, lse: out * torch.sigmoid(lse - 0.3).unsqueeze(-1).to(out.dtype)  # noqa: E731
    got, refused, findings = bench.run(lambda guard: computed(*args, guard, with_lse, sink))
    for a, b in zip(got, computed(*args, kernel=with_lse, through=sink), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert not findings


def test_an_impossible_lse_is_seen_in_the_forward(bench):
    q, k, v, _ = operands()
    _, lse = with_lse(q, k, v)
    assert not lse_deviation(lse, q, k, 0.25).bad().any()
    lse = lse.detach().clone()
    lse[1, 5, 2] = 3e38
    assert lse_deviation(lse, q, k, 0.25).bad()[1, 2]


def test_a_kernel_without_a_row_repaired_for_one_head_is_repaired_in_place(bench):
    """What an accelerator does: the first damaged head again, in the storage that the kernel keeps."""
    q, k, v, _ = operands()
    clean, _ = sdpa(q, k, v)
    out, _ = sdpa(q, k, v)
    with torch.no_grad():
        out.data[1, 9, 2, 3] = float("nan")
        bad = forward_deviation(out, v).bad()
        left = fused._repair_head(sdpa, q, k, v, out, bad)
    torch.testing.assert_close(out, clean)
    assert left == 0


def test_two_damaged_heads_are_more_than_that_repairs():
    q, k, v, _ = operands()
    out, _ = sdpa(q, k, v)
    with torch.no_grad():
        out.data[0, 9, 1, 3] = out.data[1, 9, 2, 3] = float("nan")
        left = fused._repair_head(sdpa, q, k, v, out, forward_deviation(out, v).bad())
    assert left == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", ["constant", "offset", "large", "small", "badly scaled"])
def test_identities_hold_within_their_bounds_on_unfriendly_data(dtype, style):
    q, k, v, do = (x.detach() for x in operands(torch.float32, length=200))
    if style == "constant":
        q, k, v, do = (torch.full_like(x, c) for x, c in ((q, 0.3), (k, 0.7), (v, 1.1), (do, 0.37)))
    scale = {"offset": lambda x: x + 5, "large": lambda x: x * 1e6, "small": lambda x: x * 1e-9}
    v, do = (scale.get(style, lambda x: x)(x) for x in (v, do))
    if style == "badly scaled":
        q, k = q * torch.logspace(-4, 1, 16), k * torch.logspace(1, -3, 200).view(1, -1, 1, 1)
    q, k, v, do = (x.to(dtype) for x in (q, k, v, do))
    for x in (q, k, v):
        x.requires_grad_()
    out, _ = sdpa(q, k, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    side = output_side(do, out, None, None, k.shape[2])
    assert not backward_deviation(q, k, v, dq, dk, dv, side, 0.25).bad().any()
    assert not forward_deviation(out, v).bad().any()
