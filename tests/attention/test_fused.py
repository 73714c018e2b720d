"""A stock kernel, watched."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from attention_coverage import STYLES, attention_case
from attention_coverage import sdpa as sdpa_under
from attention_flash import flash
from everstep.attention import explicit, fused
from everstep.attention.identities import (
    agreement_deviation,
    backward_deviation,
    forward_deviation,
    lse_deviation,
)
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
def test_what_only_forward_and_backward_together_show_refuses_the_slot(make_bench, section, magnitude):
    _, refused, findings = make_bench(rerun="never").run(
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


@pytest.mark.parametrize("kernel", [sdpa, with_lse])
def test_gradients_pass_gradcheck(bench, kernel):
    q, k, v, _ = operands(torch.float64, length=7)
    attend = lambda q, k, v: fused.attention(kernel, q, k, v, scale=None, guard=bench.guard)[0]  # noqa: E731
    assert torch.autograd.gradcheck(attend, (q, k, v), fast_mode=True)
    assert not bench.checks.refused()


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
        seen = fused._Seen(forward_deviation(out, v), None, None)
        left = fused._repair_on_device(sdpa, q, k, v, out, seen, None)
    torch.testing.assert_close(out, clean)
    assert left == 0


def test_two_damaged_heads_are_more_than_that_repairs():
    q, k, v, _ = operands()
    out, _ = sdpa(q, k, v)
    with torch.no_grad():
        out.data[0, 9, 1, 3] = out.data[1, 9, 2, 3] = float("nan")
        left = fused._repair_on_device(sdpa, q, k, v, out, fused._Seen(forward_deviation(out, v), None, None), None)
    assert left == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
def test_no_alarm_on_unfriendly_data(bench, dtype, style):
    """Rows of P, and of dS, whose terms are alike are rounded alike; query heads of a group are stored one by one."""
    for seed, (length, groups, mask) in enumerate(
        [
            (256, 1, "causal"),
            (256, 8, "causal"),
            (256, 8, "full"),
            (128, 4, "full"),
            (100, 2, "document"),
            (16, 8, "full"),
        ]
    ):
        case = attention_case("fused", length, groups, mask, 32, dtype, style, seed)
        outputs, refused, findings = bench.run(case.run)
        if all(output.isfinite().all() for output in outputs):
            assert not refused, case.name
            assert not findings, case.name


def faulty_on(call, wrong=4.0):
    """A kernel whose output is wrong, within the range of V, in one of its calls."""
    calls = []

    def kernel(q, k, v):
        calls.append(q.shape)
        out, lse = sdpa(q, k, v)
        if len(calls) == call:
            out.data[1, 40, 2] *= 1 / wrong
        return out, lse

    return kernel


@pytest.mark.parametrize("place", [0.13, 0.31, 0.52, 0.77, 0.94])
def test_a_hidden_key_is_found_in_bf16_and_the_result_is_the_clean_one(bench, place):
    """O stays an average of V, and the backward's sums are too coarse in bf16: two runs are not."""
    args = operands(torch.bfloat16, length=32)
    fault = Fault("inf", place, sign=-1)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), "scores", fault)
    for a, b in zip(got, computed(*args), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert [(f["section"], f["action"]) for f in findings] == [("attention.forward", "recomputed")]


def test_without_a_second_run_the_identities_are_all_there_is(make_bench):
    args = operands(torch.bfloat16, length=32)
    bench = make_bench(rerun="never")
    seen = []
    for place in (0.13, 0.31, 0.52, 0.77, 0.94):
        got, _, findings = bench.run(lambda guard: computed(*args, guard), "scores", Fault("inf", place, sign=-1))
        assert not torch.equal(got[0], computed(*args)[0])
        seen.append(bool(findings))
    assert not all(seen)


@pytest.mark.parametrize(
    ("section", "runs"),
    [({}, 2), ({"rerun": "never"}, 1), ({"frequency": 0.0}, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_often_a_clean_forward_runs(make_bench, section, dtype, runs):
    calls = []

    def counted(q, k, v):
        calls.append(1)
        return sdpa(q, k, v)

    make_bench(**section).run(lambda guard: computed(*operands(dtype), guard, counted))
    assert len(calls) == runs


@pytest.mark.parametrize("call", [1, 2])
def test_a_third_run_tells_which_of_two_was_right(bench, call):
    args = operands(torch.bfloat16)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard, faulty_on(call)))
    for a, b in zip(got, computed(*args), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert [f["action"] for f in findings] == ["recomputed"]


def test_three_runs_that_all_differ_refuse_the_slot(bench):
    calls = []

    def kernel(q, k, v):
        calls.append(1)
        out, lse = sdpa(q, k, v)
        out.data[1, 40, 2] /= 1 + len(calls)
        return out, lse

    _, refused, _ = bench.run(lambda guard: computed(*operands(torch.bfloat16), guard, kernel))
    assert refused


def test_two_runs_that_differ_are_refused_where_only_detection_is_asked_for(make_bench):
    bench = make_bench(mode="detect")
    _, refused, findings = bench.run(lambda guard: computed(*operands(torch.bfloat16), guard, faulty_on(1)))
    assert refused
    assert findings[0]["action"] == "refused"


def test_selective_checkpointing_keeps_an_lse_that_no_repair_reaches_and_refuses(bench):
    q, k, v, do = operands(torch.bfloat16)
    save = lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE  # noqa: E731

    def compute(guard):
        out = checkpoint(
            lambda q, k, v: fused.attention(sdpa, q, k, v, scale=None, guard=guard)[0],
            *(q, k, v),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(save),
        )
        return torch.autograd.grad(out, (q, k, v), do)

    _, refused, findings = bench.run(compute, "context", Fault("scale", 0.7, magnitude=0.5))
    assert refused
    assert next((f["section"], f["action"]) for f in findings) == ("attention.forward", "refused")


def test_on_a_device_the_second_run_repairs_what_is_out_of_range_and_refuses_what_is_not(bench):
    q, k, v, _ = (x.detach() for x in operands(torch.bfloat16))
    clean, _ = sdpa(q, k, v)
    out = clean.clone()
    out[0, 9, 1, 3] = out[1, 9, 2, 3] = float("nan")
    watch = fused._Watch(bench.guard, 0.25, True, False, True)

    def repaired(out):
        seen = fused._look(q, k, v, out, None, (clean, None), watch)
        return fused._repair_on_device(None, q, k, v, out, seen, (clean, None))

    assert repaired(out) == 0
    assert torch.equal(out, clean)
    out[1, 30, 3] /= 2
    assert repaired(out) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_another_order_agree_and_a_wrong_score_does_not(dtype):
    """The same attention by another kernel, in another order of sums, is what a nondeterministic one may return."""
    q, k, v, _ = (x.detach() for x in operands(torch.float32, length=200))
    exact, lse = with_lse(q, k, v)
    out, again = exact.to(dtype), sdpa(q, k, v)[0].to(dtype)
    assert not agreement_deviation(out, lse, again, lse.clone(), v).bad().any()
    other_tiles = (
        flash(block=64)(q.to(dtype), k.to(dtype), v.to(dtype))[0],
        flash(block=128)(q.to(dtype), k.to(dtype), v.to(dtype))[0],
    )
    assert not agreement_deviation(other_tiles[0], None, other_tiles[1], None, v).bad().any()
    hit = lse.clone()
    hit[1, 77, 2] += 1e-3
    assert agreement_deviation(out, lse, again, hit, v).bad().any(-1).nonzero().tolist() == [[1, 2]]
    again[0, 150, 1] *= 1.05 if dtype == torch.float32 else 1.5
    assert agreement_deviation(out, lse, again, lse, v).bad().any(-1).nonzero().tolist() == [[0, 1]]


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
