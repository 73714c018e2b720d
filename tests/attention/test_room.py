"""How much memory checks take."""

import torch
from torch.profiler import ProfilerActivity, profile

from everstep.attention import explicit
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
