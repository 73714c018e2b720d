"""How much memory checks take."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from everstep.attention import explicit, fused, linear
from everstep.attention.masks import Visible


def peak_bytes(call):
    """The most memory that tensors made in `call` hold at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    assert events, "the profiler saw no memory"
    return most


def attended(length, attend):
    q, k, v, do = (torch.randn(1, length, 4, 16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), do)


def test_memory_of_the_explicit_path_grows_with_the_length(bench):
    """Twice the length: about twice the memory, a small part of what the whole square would take."""

    def checked(q, k, v):
        return explicit.attention(q, k, v, Visible(), guard=bench.guard)[0]

    bench.checks.begin(1, 0)
    peak_bytes(attended(64, checked))
    short, long = (peak_bytes(attended(length, checked)) for length in (1024, 2048))
    assert not bench.checks.refused()
    assert long < 2.5 * short
    assert long < 0.4 * 4 * 2048**2 * 4


def test_a_rate_of_zero_takes_no_memory(make_bench):
    """The products alone: what a check would keep or make is not there."""
    x, w, dy = (
        torch.randn(512, 256, requires_grad=True),
        torch.randn(256, 256, requires_grad=True),
        torch.randn(512, 256),
    )

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

    def projected(guard):
        y = F.linear(x, w) if guard is None else linear.linear(x, w, None, guard, linear.WeightSums())
        torch.autograd.grad(y, (x, w), dy)

    def watched(guard):
        if guard is None:
            return attended(256, sdpa)()
        kernel = lambda q, k, v: (sdpa(q, k, v), None)  # noqa: E731
        return attended(256, lambda q, k, v: fused.attention(kernel, q, k, v, scale=None, guard=guard)[0])()

    off, on = make_bench(frequency=0.0), make_bench(frequency=1.0)
    on.checks.begin(1, 0)
    for run in (projected, watched):
        run(None)
        stock = peak_bytes(lambda run=run: run(None))
        assert peak_bytes(lambda run=run: run(off.guard)) == pytest.approx(stock, rel=0.01)
        assert peak_bytes(lambda run=run: run(on.guard)) > 1.002 * stock
