"""Healthy runs: no alarm, no refusal and no eviction, whatever their numbers look like."""

import pytest
import torch
import torch.nn.functional as F

from attention_clean import case, sdpa
from everstep.attention import explicit, fused
from everstep.attention.identities import backward_deviation
from everstep.attention.linear import WeightSums, linear
from everstep.attention.masks import Visible
from everstep.attention.product import row_deviation, tile_sums


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_healthy_attention_raises_no_alarm(first):
    """Drawn from all that the clean campaign knows: repeated tokens, padding, sinks, windows, outliers, any scale."""
    for seed in range(first, first + 50):
        what, findings = case(seed)
        assert not findings, (seed, what)


@pytest.mark.parametrize("smallness", [1e-18, 1e-22, 1e-24, 1e-38, 1e-42])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_too_small_to_be_squared_raise_no_alarm(bench, smallness, dtype):
    x = torch.randn(64, 64).to(dtype).requires_grad_()
    w = torch.randn(64, 64).to(dtype).requires_grad_()
    dy = torch.randn(64, 64)
    dy[7] *= smallness
    dy[:, 9] *= smallness

    def compute(guard):
        return torch.autograd.grad(linear(x, w, None, guard, WeightSums()), (x, w), dy.to(dtype))

    _, refused, findings = bench.run(compute)
    assert not refused
    assert not findings


@pytest.mark.parametrize("path", ["explicit", "fused"])
@pytest.mark.parametrize("sharpness", [8.0, 100.0])
@pytest.mark.parametrize("smallness", [1.0, 1e-23, 1e-30])
def test_a_saturated_softmax_and_vanishing_gradients_raise_no_alarm(bench, path, sharpness, smallness):
    """Scores in the hundreds: P is 0 and 1, dS is a denormal, and so are dQ, dK and what the projections are given."""
    x = torch.randn(1, 96, 64, requires_grad=True)
    w = (torch.randn(3 * 64, 64) / 8).requires_grad_()
    with torch.no_grad():
        w[:128] *= sharpness
    sums = WeightSums()
    dy = torch.randn(1, 96, 64) * smallness

    def compute(guard):
        qkv = linear(x, w, None, guard, sums).unflatten(-1, (12, 16))
        q, k, v = qkv.split(4, dim=2)
        if path == "explicit":
            out, _ = explicit.attention(q, k, v, Visible(), guard=guard)
        else:
            out, _ = fused.attention(sdpa(Visible()), q, k, v, scale=None, guard=guard)
        return torch.autograd.grad(out.flatten(2), (x, w), dy)

    _, refused, findings = bench.run(compute)
    assert not refused
    assert not findings


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_adds_up_gradients_in_bf16_stays_within_its_bounds(seed):
    """PyTorch's on a CPU, block of queries by block of queries; dO has a few large rows."""
    draw = torch.Generator().manual_seed(seed)
    q, k, v, d_out = (torch.randn(1, 512, 8, 16, generator=draw) for _ in range(4))
    d_out *= torch.exp(2 * torch.randn(1, 512, 1, 1, generator=draw))
    q, k, v, d_out = (x.bfloat16() for x in (0.3 * q, k, v, d_out))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), is_causal=True).transpose(1, 2)
    grads = torch.autograd.grad(out, inputs, d_out)
    given = q, k, v, out.detach(), d_out, *grads, None, None, 0.25
    found = backward_deviation(*given)
    assert (found.residual.abs() / found.bound).max() < 0.8
    once = backward_deviation(*given, wide_sums=True)
    assert (once.bound < 0.8 * found.bound).any(), "what a kernel is held to that rounds its sums once"


STYLES = ("normal", "offset", "constant", "sorted", "ramp", "blocks", "outliers", "massive", "documents", "heavy")


def factor(style, rows, inner, generator):
    """A (rows, inner) operand whose partial sums along `inner` wander as `style` says."""
    x = torch.randn(rows, inner, generator=generator)
    along = torch.linspace(-1, 1, inner)
    if style == "offset":
        return x + 3
    if style == "constant":
        return torch.full_like(x, 0.7)
    if style == "sorted":
        return x.sort(dim=1).values
    if style == "ramp":
        return x * 0.1 + along
    if style == "blocks":
        return x.abs() * torch.where(along > 0, 1.0, -1.0)
    if style == "outliers":
        return torch.where(torch.rand(x.shape, generator=generator) < 2e-3, x * 1000, x)
    if style == "massive":
        x[:, torch.randperm(inner, generator=generator)[:3]] *= torch.tensor([1000.0, 200.0, 50.0])
        x[0] *= 15
        return x
    if style == "documents":
        return x + torch.randn(rows, 16, generator=generator).repeat_interleave(inner // 16, 1)
    if style == "heavy":
        return x * torch.exp(2 * torch.randn(inner, generator=generator))
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("style", STYLES)
def test_long_sums_keep_within_their_bounds(dtype, style):
    for seed, (inner, other) in enumerate([(256, "normal"), (8192, "normal"), (8192, style)]):
        generator = torch.Generator().manual_seed(seed)
        a = factor(style, 24, inner, generator).to(dtype)
        b = factor(other, 128, inner, generator).to(dtype).t()
        if dtype == torch.float16:
            a, b = a / 256, b / 256
        seen = row_deviation(a @ b, a, tile_sums(b))
        assert not seen.bad().any(), (style, inner, other)


@pytest.mark.parametrize(("dtype", "visible"), [(torch.float32, 0.01), (torch.bfloat16, 0.6)])
@pytest.mark.parametrize("inner", [256, 2048, 8192, 32768])
def test_what_can_be_seen_does_not_shrink_with_the_length_of_the_sums(dtype, visible, inner):
    """One element of a product, wrong by `visible` of the products' root mean square."""
    a, b = torch.randn(16, inner).to(dtype), torch.randn(inner, 64).to(dtype)
    y = a @ b
    sums = tile_sums(b)
    assert not row_deviation(y, a, sums).bad().any()
    y[5, 40] += visible * y.float().square().mean().sqrt()
    assert row_deviation(y, a, sums).bad().nonzero().tolist() == [[5, 0]]


def test_a_heavy_block_of_weights_hides_no_error_beside_it():
    a, b = torch.randn(32, 1024), torch.randn(1024, 256)
    b[:64, :64] *= 3000
    y = a @ b
    y[3, 200] += 0.01 * y[:, 64:].square().mean().sqrt()
    assert row_deviation(y, a, tile_sums(b)).bad().nonzero().tolist() == [[3, 3]]
