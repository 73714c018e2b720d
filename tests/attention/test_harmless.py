"""Tests that healthy data raise no alarm and refuse no slot, whatever the numbers look like."""

import pytest
import torch

from attention_clean import LENGTHS, case, sdpa
from attention_inside import operands
from everstep.attention import fused
from everstep.attention.linear import linear
from everstep.attention.masks import Visible
from everstep.attention.product import row_deviation, tile_sums


@pytest.mark.parametrize(("seeds", "lengths"), [
    (range(50), LENGTHS), (range(50, 100), LENGTHS), (range(100, 150), LENGTHS),
    ([21890], LENGTHS), ([21890], (64, 100, 200, 500, 800)),
])  # fmt: skip
def test_healthy_attention_raises_no_alarm(seeds, lengths):
    """Drawn from all that the clean campaign has. In the last two PyTorch's kernel rounds alike partial sums of dV."""
    for seed in seeds:
        what, findings = case(seed, lengths)
        assert not findings, (seed, what)


@pytest.mark.parametrize("values", [1.0, 1e-22])
def test_long_rows_of_pytorchs_kernel_raise_no_alarm(bench, values):
    """On a CPU the kernel rounds dK after each block of queries of each head. Values may be too small to be squared."""
    q, k, v, do = operands("normal", 2048, 4, 4, 128, torch.bfloat16, 0)

    def compute(guard):
        given = [x.requires_grad_() for x in (q, k, values * v)]
        out, _ = fused.attention(sdpa(Visible()), *given, scale=None, guard=guard)
        return torch.autograd.grad(out, given, do)

    assert not bench.run(compute)[1]


@pytest.mark.parametrize("smallness", [1e-18, 1e-22, 1e-24, 1e-38, 1e-42])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_too_small_to_be_squared_raise_no_alarm(bench, smallness, dtype):
    x = torch.randn(64, 64).to(dtype).requires_grad_()
    w = torch.randn(64, 64).to(dtype).requires_grad_()
    dy = torch.randn(64, 64)
    dy[7] *= smallness
    dy[:, 9] *= smallness

    def compute(guard):
        return torch.autograd.grad(linear(x, w, None, guard), (x, w), dy.to(dtype))

    assert bench.run(compute)[1:] == (False, [])


STYLES = {
    "offset": lambda x: x + 3,
    "sorted": lambda x: x.sort(dim=1).values,
    "blocks": lambda x: x.abs() * torch.linspace(-1, 1, x.shape[1]).sign(),
    "outliers": lambda x: torch.where(x > 3, x * 1000, x),
    "heavy": lambda x: x * torch.exp(2 * x[:1]),
}
"""Kinds of operands, by how their partial sums move."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
def test_long_sums_keep_within_their_bounds(dtype, style):
    for inner in (256, 8192):
        a = STYLES[style](torch.randn(24, inner)).to(dtype)
        b = STYLES[style](torch.randn(128, inner)).to(dtype).t()
        if dtype == torch.float16:
            a, b = a / 256, b / 256
        seen = row_deviation(a @ b, a, tile_sums(b))
        assert not seen.bad().any(), inner


@pytest.mark.parametrize(("dtype", "visible"), [(torch.float32, 0.01), (torch.bfloat16, 0.6)])
@pytest.mark.parametrize("inner", [256, 2048, 8192, 32768])
def test_the_smallest_error_that_is_seen_does_not_grow_with_the_length_of_the_sums(dtype, visible, inner):
    """One element of a product is wrong by `visible` times the product's root mean square."""
    a, b = torch.randn(16, inner).to(dtype), torch.randn(inner, 64).to(dtype)
    y = a @ b
    sums = tile_sums(b)
    assert not row_deviation(y, a, sums).bad().any()
    y[5, 40] += visible * y.float().square().mean().sqrt()
    assert row_deviation(y, a, sums).bad().nonzero().tolist() == [[5, 0]]
