"""A worker's state on parameters that FSDP2 has sharded."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.semi.section import SemiSync
from everstep.titan.round_state import RoundState
from everstep.titan.state import LiveTensors


class Counters:
    step = 0

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """As torchtitan's container: a list of schedulers, of which there is one."""

    def __iter__(self):
        yield self

    @property
    def scheduler(self):
        return self

    def load_state_dict(self, state):
        self.last_epoch = state["last_epoch"]


@pytest.fixture(params=[0, 1])
def one_of_two_ranks(request):
    """Nothing here needs the other one."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield
    dist.destroy_process_group()


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(5, 3), torch.nn.Linear(3, 5)])


def sharded():
    torch.manual_seed(0)
    model = Layers()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    return model


@pytest.fixture
def state(one_of_two_ranks):
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    settings = SemiSync(method="diloco", workers=2, sync_steps=4, fragments=2, mixing=0.25)
    live = LiveTensors([model], [optimizer])
    return RoundState(live, Schedule(optimizer, lambda _: 1.0), Counters(), settings)


def test_a_worker_takes_over_its_part_of_what_was_synchronised(state):
    assert all(isinstance(param, DTensor) for param in state._tensors.parameters.values())
    assert all(
        param.shape != whole.shape for param, whole in zip(state.live, state._tensors.parameters.values(), strict=True)
    )
    first, second = state.fragments
    assert (first, second) == ([0, 1], [2, 3])
    with torch.no_grad():
        for param in state.live:
            param.copy_(torch.arange(10.0, 10.0 + param.numel()).view_as(param))
        for param in state.trained:
            param.copy_(torch.arange(-2.0, -2.0 - param.numel(), -1.0).view_as(param))
    own = state.leave()
    state.mark(1, history=5)
    with torch.no_grad():
        for param in state.live:
            param.zero_()
    state.enter(own, 1)
    for at, param in enumerate(state.live):
        index = torch.arange(param.numel(), dtype=torch.float32).view_as(param)
        expected = 0.25 * (10.0 + index) + 0.75 * (-2.0 - index) if at in first else 10.0 + index
        torch.testing.assert_close(param, expected)
    state.rest()
    assert all(bool((param == trained).all()) for param, trained in zip(state.live, state.trained, strict=True))


def test_a_workers_state_comes_back_from_a_checkpoint_sharded_as_it_was(state):
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in state._own().values():
            tensor.copy_(torch.rand_like(tensor))
        for momentum in state.momentum:
            momentum.fill_(3.0)
    own = state.leave()
    saved = {name: tensor.clone() for name, tensor in state.on_disk({0: own, 1: own[::-1]}).items()}
    assert all(isinstance(tensor, DTensor) for name, tensor in saved.items() if name.endswith(("exp_avg", "weight")))
    with torch.no_grad():
        for momentum in state.momentum:
            momentum.zero_()
    assert state.from_disk(saved) == {0: own, 1: own[::-1]}
    assert all(bool((momentum == 3.0).all()) for momentum in state.momentum)
