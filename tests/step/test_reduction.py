"""Sums of gradients over groups, in buckets."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from everstep.quorum.errors import SumsBroken
from everstep.step.reduction import GradientReducer

WAIT = timedelta(seconds=60)
SIZES = [3, 500, 7, 1000, 20]


class OneGroup:
    """Sums over one group, to which `others` is added as if it came from other groups. `parts`: the summed tensors."""

    def __init__(self, others: float = 0.0):
        self.others, self.parts = others, []

    def start(self, tensor, timeout):
        tensor += self.others
        self.parts.append(tensor)
        return SimpleNamespace(ended=True)

    def finish(self, work): ...

    def sum_up(self, reducer):
        reducer.begin(self, WAIT)
        reducer.finish()


def grads(params: list[torch.nn.Parameter]) -> list[float]:
    return [float(p.grad.sum()) for p in params]


def backward(params: list[torch.nn.Parameter], scale: float) -> None:
    sum((p * scale).sum() for p in params).backward()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, -2e19, 1e6])
@pytest.mark.parametrize("place", [(0, 0), (1, 499), (3, 617), (5, 3)])
def test_one_number_that_is_not_finite_is_seen(bad, place):
    """In this group's part and in the sum; if its square overflows float32; beside parameters without elements."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (*SIZES, 9, 0)]
    reducer, sums = GradientReducer(params, bucket_bytes=0), OneGroup()
    backward(params, 1.0)
    sums.sum_up(reducer)
    assert reducer.finite()
    assert reducer.own_finite()
    params[place[0]].grad[place[1]] = bad
    assert reducer.own_finite() is (bad == 1e6)
    sums.sum_up(reducer)
    assert reducer.finite() is (bad == 1e6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_lies_in_memory_as_its_parameter_does(fused):
    """Fused optimizers walk through the memory of both side by side and ignore their strides."""
    param = torch.nn.Parameter(torch.arange(24.0).view(4, 6).t())
    reducer, optimizer = GradientReducer([param], bucket_bytes=2048), torch.optim.AdamW([param], fused=fused)
    reducer.begin(OneGroup(), WAIT)
    (param * torch.arange(24.0).view(6, 4)).sin().sum().backward()
    own = param.grad.clone()
    reducer.finish()
    reducer.assign(1.0)
    assert param.grad.stride() == param.stride()
    assert torch.equal(param.grad, own)
    optimizer.step()


def test_gradients_of_several_dtypes_are_summed_in_buckets_of_their_own():
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    reducer, sums = GradientReducer(params, bucket_bytes=2048), OneGroup(others=1.0)
    for param in params:
        param.sum().backward()
    sums.sum_up(reducer)
    reducer.assign(1.0)
    assert [part.dtype for part in sums.parts] == [torch.float32, torch.bfloat16, torch.float32]
    assert [set(param.grad.tolist()) for param in params] == [{2.0}] * 4


def test_sums_that_are_kept_are_those_of_their_step():
    """A joiner keeps sums while its state is being fetched, and applies them later."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    reducer, sums = GradientReducer(params, bucket_bytes=2048), OneGroup(others=2.0)
    sums.sum_up(reducer)
    stashed = reducer.stash()
    backward(params, 5.0)
    sums.sum_up(reducer)
    reducer.unstash(stashed)
    reducer.assign(0.5)
    assert grads(params) == [1.0 * n for n in SIZES]


def test_a_gradient_that_is_added_to_after_its_sum_began_fails_the_attempt_and_stays_for_the_next():
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    reducer, sums = GradientReducer(params, bucket_bytes=2048), OneGroup(others=1.0)
    reducer.begin(sums, WAIT)
    for slot in range(2):
        reducer.begin_slot(last=slot == 1)
        for _ in range(slot + 1):
            backward(params, 1.0)
        reducer.end_slot()
    with pytest.raises(SumsBroken, match="more often"):
        reducer.finish()
    assert grads(params) == [3.0 * n for n in SIZES]
    sums.sum_up(reducer)
    reducer.assign(1.0)
    assert grads(params) == [4.0 * n for n in SIZES]
