"""Gradient sums over groups, in buckets, over a real Gloo process group."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from everstep.quorum.errors import SumsBroken
from everstep.quorum.process_group import Place, RankColumn, reach
from everstep.step.reduction import GradientReducer

WAIT = timedelta(seconds=60)
SIZES = [3, 500, 7, 1000, 20]


@pytest.mark.parametrize(("hooks", "begun"), [(True, 2), (False, 0)])
def test_without_hooks_no_sum_begins_before_the_last_backward_is_over(hooks, begun):
    """A replayed CUDA graph adds gradients and runs no hook; while it is recorded they run, and nothing may start."""
    sums = OneGroup()
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 5)]
    reducer = GradientReducer(params, bucket_bytes=12, hooks=hooks)

    def replay():
        for param in params:
            param.grad += 1.0

    reducer.begin(sums, WAIT)
    for slot in range(3):
        reducer.begin_slot(last=slot == 2)
        backward(params, 1.0)  # recorded: hooks run
        if slot == 2:
            assert len(sums.given) == begun
        reducer.end_slot()
    if not hooks:
        reducer.begin_slot(last=True)
        replay()
        reducer.end_slot()
    reducer.finish()
    assert [float(flat.mean()) for flat in sums.given] == [3.0, 3.0] if hooks else [4.0, 4.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38, -2e19, 1e6])
@pytest.mark.parametrize("place", [(0, 0), (1, 499), (3, 617), (5, 3)])
def test_one_number_that_is_not_finite_is_seen(bad, place):
    """In this group's own part and in the sum; also one whose square has no place in float32, and beside parameters
    that have no elements on this rank."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in (*SIZES, 9, 0)]
    reducer, sums = GradientReducer(params, bucket_bytes=0), OneGroup()
    backward(params, 1.0)
    reducer.begin(sums, WAIT)
    reducer.finish()
    assert reducer.finite()
    assert reducer.own_finite()
    params[place[0]].grad[place[1]] = bad
    assert reducer.own_finite() is (bad == 1e6)
    reducer.begin(sums, WAIT)
    reducer.finish()
    assert reducer.finite() is (bad == 1e6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_lies_in_memory_as_its_parameter_does(fused):
    """Fused optimizers go through both side by side, whatever their strides say."""
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


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_a_gradient_keeps_its_layout_over_ranks(mesh):
    """Which need not be its parameter's: what each rank has may be a part of it."""
    params = [torch.nn.Parameter(DTensor.from_local(torch.zeros(n), mesh, [Replicate()])) for n in SIZES]
    reducer = GradientReducer(params, bucket_bytes=2048)
    reducer.begin(OneGroup(), WAIT)
    for param in params:
        param.to_local(grad_placements=[Partial()]).sum().backward()
    reducer.finish()
    reducer.assign(1.0)
    assert {param.grad.placements for param in params} == {(Partial(),)}


class OneGroup:
    """Sums over one group, and what others have. `given`: what this one had. `ended`: whether nothing writes any more
    into a sum that failed."""

    def __init__(self, others: float = 0.0, fails: bool = False, ended: bool = True):
        self.others, self.fails, self.ended, self.given = others, fails, ended, []

    def start(self, tensor, timeout):
        self.given.append(tensor.clone())
        tensor += self.others
        return SimpleNamespace(ended=self.ended)

    def finish(self, work):
        if self.fails:
            raise SumsBroken("as ordered")


def run_rank(rank: int, size: int, port: int, scenario: str):
    sums = RankColumn("gloo", column=0, host="127.0.0.1", connect_timeout=WAIT, reduce_timeout=WAIT, token=b"t" * 32)
    board = reach(f"127.0.0.1:{port}", WAIT)
    board.set(f"address-{rank}", sums.address)
    peers = tuple(board.get(f"address-{peer}").decode() for peer in range(size))
    sums.connect(Place(scenario, f"127.0.0.1:{port}", 0, rank, peers))
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    reducer = GradientReducer(params, bucket_bytes=2048)
    try:
        return SCENARIOS[scenario](rank, sums, params, reducer)
    except SumsBroken as error:
        return str(error)


def grads(params: list[torch.nn.Parameter]) -> list[float]:
    return [float(p.grad.sum()) for p in params]


def backward(params: list[torch.nn.Parameter], scale: float) -> None:
    sum((p * scale).sum() for p in params).backward()


def overlapped(rank, sums, params, reducer):
    """Rank 1 computes two slots, rank 0 one, rank 2 none; only the last backward of each is overlapped."""
    reducer.begin(sums, WAIT)
    slots = {0: 1, 1: 2, 2: 0}[rank]
    for slot in range(slots):
        reducer.begin_slot(last=slot == slots - 1)
        backward(params, 1.0)
        reducer.end_slot()
    reducer.finish()
    reducer.assign(0.5)
    return grads(params)


def in_chunks(rank, sums, params, reducer):
    """A slot adds to the last parameter three times: its sum must not start after the first."""
    for _ in range(2):
        for p in params:
            p.grad = None
        reducer.begin(sums, WAIT)
        for slot in range(2):
            reducer.begin_slot(last=slot == 1)
            for _ in range(3):
                params[-1].sum().backward()
            backward(params[:-1], 1.0)
            reducer.end_slot()
        reducer.finish()
        reducer.assign(1.0)
    return grads(params)


def more_often(rank, sums, params, reducer):
    """A gradient that is added to again after its sum began fails the attempt, not the gradients."""
    reducer.begin(sums, WAIT)
    for slot in range(2):
        reducer.begin_slot(last=slot == 1)
        for _ in range(slot + 1):
            backward(params, 1.0)
        reducer.end_slot()
    try:
        reducer.finish()
    except SumsBroken as error:
        return [str(error), grads(params)]
    return "nobody noticed"


def kept(rank, sums, params, reducer):
    """The sum is over copies: a second attempt sums the same gradients again."""
    backward(params, rank + 1.0)
    reducer.begin(sums, WAIT)
    reducer.finish()
    own = grads(params)
    reducer.begin(sums, WAIT)
    reducer.finish()
    reducer.assign(1.0)
    return [own, grads(params)]


SCENARIOS = {f.__name__: f for f in (overlapped, in_chunks, more_often, kept)}


def run_all(scenario: str, size: int = 3) -> dict:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(size) as pool:
        found = pool.map(lambda rank: run_rank(rank, size, store.port, scenario), range(size))
        return dict(enumerate(found))


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_sums_begun_in_the_last_backward_are_whole_for_any_number_of_slots():
    assert run_all("overlapped") == {rank: [1.5 * n for n in SIZES] for rank in range(3)}


def test_a_gradient_that_comes_in_chunks_is_summed_whole():
    assert run_all("in_chunks") == {rank: [6.0 * n for n in SIZES[:-1]] + [18.0 * SIZES[-1]] for rank in range(3)}


def test_a_gradient_that_grows_after_its_sum_began_is_noticed():
    for error, own in run_all("more_often").values():
        assert "more often" in error
        assert own == [3.0 * n for n in SIZES]


def test_a_groups_own_gradients_stay_for_a_retry():
    for rank, (own, total) in run_all("kept").items():
        assert own == [(rank + 1.0) * n for n in SIZES]
        assert total == [6.0 * n for n in SIZES]


def test_gradients_of_several_dtypes_are_summed_in_buckets_of_their_own():
    dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    params = [torch.nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in dtypes]
    reducer, sums = GradientReducer(params, bucket_bytes=2048), OneGroup(others=1.0)
    for param in params:
        param.sum().backward()
    reducer.begin(sums, WAIT)
    reducer.finish()
    reducer.assign(1.0)
    assert [given.dtype for given in sums.given] == [torch.float32, torch.bfloat16, torch.float32]
    assert [set(param.grad.tolist()) for param in params] == [{2.0}] * 4


def test_sums_that_are_kept_are_those_of_their_step():
    """A joiner keeps them while its state is on the way, and applies them later."""
    params = [torch.nn.Parameter(torch.zeros(n)) for n in SIZES]
    reducer, sums = GradientReducer(params, bucket_bytes=2048), OneGroup(others=2.0)
    reducer.begin(sums, WAIT)
    reducer.finish()
    stashed = reducer.stash()
    backward(params, 5.0)
    reducer.begin(sums, WAIT)
    reducer.finish()
    reducer.unstash(stashed)
    reducer.assign(0.5)
    assert grads(params) == [1.0 * n for n in SIZES]
