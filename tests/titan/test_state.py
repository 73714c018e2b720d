"""What healing carries, on real modules and optimizers."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from everstep.quorum.heal import HealState
from everstep.step.interfaces import Commit
from everstep.titan import snapshots
from everstep.titan.state import LiveTensors, TrainingState, slot_seed


class Counters:
    """Stands where the trainer's own counters are."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict:
        return {"step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.step = state["step"]


class Scheduler(torch.optim.lr_scheduler.LambdaLR):
    """A schedule that, like torchtitan's, restores its counter but not the rate in use."""

    def state_dict(self) -> dict:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: dict) -> None:
        self.last_epoch = state["last_epoch"]


def trained(
    steps: int, seed: int, wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda module: module
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Scheduler, TrainingState]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), wrap(torch.nn.BatchNorm1d(8)), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = Scheduler(optimizer, lambda step: 1 / (step + 1))
    state = TrainingState(LiveTensors([model], [optimizer]), scheduler, Counters(steps))
    for _ in range(steps):
        train_once(model, optimizer)
        scheduler.step()
    return model, optimizer, scheduler, state


def train_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).view(3, 4)).pow(2).sum().backward()
    optimizer.step()


def compiled(module: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [lambda module: module, checkpoint_wrapper, compiled])
def test_a_healed_rank_trains_on_exactly_as_its_source(wrap):
    model, optimizer, _, source = trained(5, 1, wrap)
    joiner_model, joiner_optimizer, _, joiner = trained(0, 2, wrap)
    assert {name for name in source.tensors() if name.startswith("buffer/")} == {
        f"buffer/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    joiner.load(copy.deepcopy(source.snapshot()))
    assert joiner_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 0.1
    for _ in range(3):
        train_once(model, optimizer)
        train_once(joiner_model, joiner_optimizer)
    for mine, theirs in zip(joiner_model.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_served_is_the_state_itself_not_a_copy():
    model, _, _, source = trained(steps=1, seed=1)
    served = source.snapshot()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    assert torch.equal(served.tensors["param/0.weight"], model[0].weight)


def test_another_models_state_is_refused_and_changes_nothing():
    model, _, _, state = trained(steps=1, seed=1)
    before = copy.deepcopy(model.state_dict())
    foreign = copy.deepcopy(state.snapshot())
    foreign.tensors["param/9.weight"] = foreign.tensors.pop("param/0.weight")
    with pytest.raises(ValueError, match="another model"):
        state.load(HealState(tensors=foreign.tensors, meta=foreign.meta, blobs={}))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@given(st.integers(0, 3), st.integers(0, 31), st.integers(0, 7))
def test_any_flipped_bit_changes_the_checksum(index, bit, place):
    model, _, _, state = trained(steps=0, seed=3)
    before = state.checksum()
    param = [model[0].weight, model[0].bias, model[2].weight, model[1].weight][index]
    with torch.no_grad():
        words = param.view(torch.int32).flatten()
        words[place % len(words)] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert state.checksum() != before
    assert 0 <= before < 2**63


def test_every_slot_of_every_step_has_random_numbers_of_its_own():
    seeds = {slot_seed(0, step, slot, rank) for step in range(20) for slot in range(-1, 12) for rank in range(3)}
    assert len(seeds) == 20 * 13 * 3
    assert slot_seed(0, 7, 3, 1) == slot_seed(0, 7, 3, 1) != slot_seed(1, 7, 3, 1)


def test_a_snapshot_is_shared_among_the_groups_that_have_the_state():
    """One that heals has no part of it to give: without that the snapshot could not be restored."""
    shared = []

    class Copier:
        def committed(self, step, history, groups, *_):
            shared.append(groups)

    one = snapshots.Snapshots.__new__(snapshots.Snapshots)
    one._copier = Copier()
    fields = dict.fromkeys(Commit.__dataclass_fields__, 0)
    one.committed(Commit(**fields | {"groups": (0, 1, 2), "able": (0, 2)}), {}, dict)
    assert shared == [(0, 2)]
