"""Checked projections."""

import pytest
import torch
import torch.nn.functional as F

from everstep.attention import linear, product
from everstep.attention.injection import Fault
from everstep.attention.product import apply_sums, bias_sums, row_deviation, tile_sums

RESULTS = ("wqkv.y", "wqkv.dx", "wqkv.dw")


def operands(dtype, bias=True, shape=(2, 40)):
    x = torch.randn(*shape, 96).to(dtype).requires_grad_()
    w = (torch.randn(192, 96) / 10).to(dtype).requires_grad_()
    b = torch.randn(192).to(dtype).requires_grad_() if bias else None
    return x, w, b, torch.randn(*shape, 192).to(dtype)


def computed(x, w, b, dy, guard=None, sums=None):
    y = F.linear(x, w, b) if guard is None else linear.linear(x, w, b, guard, sums or linear.WeightSums())
    inputs = [t for t in (x, w, b) if t is not None]
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_those_of_the_plain_projection_to_the_last_bit(bench, dtype, bias):
    args = operands(dtype, bias)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard))
    for a, b in zip(got, computed(*args), strict=True):
        assert torch.equal(a, b)
    assert not refused
    assert not findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("kind", ["nan", "inf", "near-inf", "scale", "row", "tile"])
def test_a_wrong_row_is_computed_again(bench, dtype, result, kind):
    args = operands(dtype)
    clean = computed(*args)
    fault = Fault(kind, place=0.4, magnitude=-1e3)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), result, fault)
    for a, b in zip(got, clean, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    assert not refused
    assert [(f["section"], f["action"], f["layer"]) for f in findings] == [(result, "recomputed", 3)]
    if kind in ("nan", "inf"):
        assert findings[0]["kind"] == kind


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("magnitude", [0.4, 0.9, 1.1, 1.5])
def test_damage_that_the_sums_see_in_part_is_repaired_whole(bench, result, magnitude):
    """A tile that moves by little: some of its rows stay within their bounds, and are wrong all the same."""
    args = operands(torch.bfloat16)
    clean = computed(*args)
    fault = Fault("tile", place=0.4, magnitude=magnitude)
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), result, fault)
    assert findings
    assert not refused
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("result", RESULTS)
def test_detecting_only_refuses_and_leaves_the_result(make_bench, result):
    args = operands(torch.float32)
    bench = make_bench(mode="detect")
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), result, Fault("nan", 0.4))
    assert refused
    assert findings[0]["action"] == "refused"
    assert any(x.isnan().any() for x in got)


def test_sums_of_weights_are_kept_until_the_weights_change(bench):
    x, w, b, _ = operands(torch.float32)
    sums = linear.WeightSums()
    with torch.no_grad():
        _, _, findings = bench.run(lambda guard: linear.linear(x, w, b, guard, sums))
        assert not findings
        w.mul_(2)
        _, refused, _ = bench.run(lambda guard: linear.linear(x, w, b, guard, sums))
        assert refused, "old sums went unnoticed"
        bench.checks.weights_changed()
        _, refused, findings = bench.run(lambda guard: linear.linear(x, w, b, guard, sums))
    assert not refused
    assert not findings


def test_a_broken_sum_of_weights_refuses_one_slot_and_is_made_anew(bench):
    x, w, b, _ = operands(torch.float32)
    sums = linear.WeightSums()

    def compute(guard):
        with torch.no_grad():
            return linear.linear(x, w, b, guard, sums)

    compute(bench.guard)
    bench.run(compute)
    sums._kept["rows"][1].plain[3, 0] += 100.0
    _, refused, findings = bench.run(compute)
    assert refused
    assert [f["action"] for f in findings] == ["refused"]
    assert bench.run(compute)[1:] == (False, [])


@pytest.mark.parametrize("inner", [256, 4096])
@pytest.mark.parametrize("style", ["normal", "constant", "alternating", "ramp", "outliers", "few", "signs"])
def test_norms_that_an_accelerator_estimates_are_above_the_true_ones_and_not_far(monkeypatch, inner, style):
    monkeypatch.setattr(product, "narrow_product", lambda a, b, dtype: a.to(dtype) @ b.to(dtype))
    a = torch.randn(300, inner)
    if style == "outliers":
        a[:, :3] *= 1000
    a = {
        "constant": a[:, :1].expand_as(a),
        "alternating": a[:, :1] * torch.tensor([1.0, -1.0]).repeat(inner // 2),
        "ramp": torch.arange(inner) + a,
        "few": a * (torch.rand_like(a) < 2 / inner),
        "signs": a.sign(),
    }.get(style, a)
    a = a[a.abs().amax(-1) > 0].bfloat16()
    expected, size = product.sums_and_norms(a, torch.ones(inner, 2))
    ratio = size / a.double().norm(dim=-1)
    assert 1.0 < ratio.min() <= ratio.max() < 10.0
    assert (expected[:, 0] - a.double().sum(-1)).abs().max() < 1e-4 * a.double().norm(dim=-1).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0])
def test_a_bias_raises_no_alarm_though_its_sum_is_nothing_or_takes_the_product_back(dtype, size):
    torch.manual_seed(0)
    for _ in range(50):
        x, w = size * torch.randn(16, 96).to(dtype), torch.randn(192, 96).to(dtype)
        bias = torch.randn(192).to(dtype)
        bias[1::2] = -bias[::2]
        against = -(x @ w.t())[0] + bias * 1e-2  # the first row nearly cancels
        for b in (bias, against):
            y = F.linear(x, w, b)
            assert not row_deviation(y, x, tile_sums(w.t()), bias_sums(b)).bad().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_that_is_not_finite_does_not_excuse_itself(monkeypatch, dtype):
    a, b = torch.randn(8, 64).to(dtype), torch.randn(64, 64).to(dtype)

    def broken(a, plain):
        sums = apply_sums(a, plain)
        sums[3, 0] = torch.inf
        return sums

    monkeypatch.setattr(product, "apply_sums", broken)
    assert row_deviation(a @ b, a, tile_sums(b)).bad().flatten().tolist() == [row == 3 for row in range(8)]
