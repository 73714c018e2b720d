"""Tests of checked projections."""

import pytest
import torch
import torch.nn.functional as F

from everstep.attention import linear
from everstep.attention.injection import Fault
from everstep.attention.product import bias_sums, row_deviation, tile_sums

from .conftest import Bench

RESULTS = ("wqkv.y", "wqkv.dx", "wqkv.dw")


def operands(dtype, bias=True, shape=(2, 40)):
    x = torch.randn(*shape, 96).to(dtype).requires_grad_()
    w = (torch.randn(192, 96) / 10).to(dtype).requires_grad_()
    b = torch.randn(192).to(dtype).requires_grad_() if bias else None
    return x, w, b, torch.randn(*shape, 192).to(dtype)


def computed(x, w, b, dy, guard=None):
    y = F.linear(x, w, b) if guard is None else linear.linear(x, w, b, guard)
    inputs = [t for t in (x, w, b) if t is not None]
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_results_are_those_of_the_plain_projection_to_the_last_bit(bench, dtype, bias):
    args = operands(dtype, bias)
    bench.changes_nothing(lambda guard: computed(*args, guard))


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
def test_detecting_only_refuses_and_leaves_the_result(result):
    args = operands(torch.float32)
    bench = Bench(mode="detect")
    got, refused, findings = bench.run(lambda guard: computed(*args, guard), result, Fault("nan", 0.4))
    assert refused
    assert findings[0]["action"] == "refused"
    assert any(x.isnan().any() for x in got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0])
def test_a_bias_raises_no_alarm_if_its_sum_is_zero_or_it_cancels_the_product(dtype, size):
    for _ in range(50):
        x, w = size * torch.randn(16, 96).to(dtype), torch.randn(192, 96).to(dtype)
        bias = torch.randn(192).to(dtype)
        bias[1::2] = -bias[::2]
        against = -(x @ w.t())[0] + bias * 1e-2  # the first row nearly cancels
        for b in (bias, against):
            y = F.linear(x, w, b)
            assert not row_deviation(y, x, tile_sums(w.t()), bias_sums(b)).bad().any()


def test_sums_of_weights_are_those_of_the_weights_after_forget(bench):
    x, w, b, dy = operands(torch.float32)
    for _ in range(2):
        assert bench.run(lambda guard: computed(x, w, b, dy, guard))[1:] == (False, [])
        w.data *= 1.01
        bench.checks.forget()
