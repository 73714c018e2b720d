"""What a group says of its slots beside the gradients, and what the commit makes of all groups' words."""

from types import SimpleNamespace

import pytest
import torch

from everstep.titan import work
from everstep.titan.trainer import advice_on_waits
from everstep.titan.work import SlotTrainer

HERE = SimpleNamespace(dp_enabled=False, dp_cp_enabled=False, pp_enabled=False)


@pytest.fixture
def group():
    """Makes a trainer of one expert layer and three parameters, with gradients for some of them."""

    def make(loads, gradients, slots=(0,)):
        trainer = SlotTrainer.__new__(SlotTrainer)
        trainer.device, trainer.parallel_dims, trainer.snapshots = torch.device("cpu"), HERE, None
        trainer.slots = 2
        trainer._slot_tokens = dict.fromkeys(slots, 10)
        trainer._slot_losses = {slot: torch.tensor(2.5) for slot in slots}
        trainer.expert_loads = [torch.tensor(loads)]
        trainer.trainable = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
        for param, has in zip(trainer.trainable, gradients, strict=True):
            param.grad = torch.ones(2) if has else None
        return trainer

    return make


def test_a_parameter_that_no_slot_of_any_group_reached_has_no_gradient(group):
    computed, idle = group([3.0, 4.0], [True, True, False]), group([0.0, 0.0], [False, False, False], slots=())
    sums = [trainer.results() for trainer in (computed, idle)]
    extra = sums[0].extra + sums[1].extra
    for trainer in (computed, idle):
        for param in trainer.trainable:
            param.grad = torch.zeros(2)  # as the reducer leaves it on every group
        trainer.assign_extra(extra)
        assert [param.grad is None for param in trainer.trainable] == [False, False, True]
        assert trainer.expert_loads[0].tolist() == [3.0, 4.0]


def test_old_gradients_of_a_group_without_slots_say_nothing(group):
    idle = group([0.0], [True, True, True], slots=())
    assert idle.results().extra.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_only_the_slots_that_were_computed_are_told(group):
    sums = group([0.0], [True], slots=(1,)).results()
    assert sums.tokens.tolist() == [0.0, 10.0]
    assert sums.loss.tolist() == [0.0, 2.5]
    assert sums.slots == {1}


@pytest.mark.parametrize("doubted", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_ranks_of_a_group_look_at_the_same_slots(group, monkeypatch, doubted, drawn, other):
    """They replay the same graph: the one with checks where one of them wants it. And only slots that are looked at are
    computed apart."""
    asked = []
    monkeypatch.setattr(work, "all_in_group", lambda flag: (asked.append(flag), flag and not other)[1])
    trainer = group([0.0], [True])
    trainer.witnesses = SimpleNamespace(doubted=lambda step, slot: doubted)
    trainer.checks = SimpleNamespace(schedule=SimpleNamespace(looks=lambda step, slot: drawn))
    assert trainer.may_refuse(3, 1) == (doubted or drawn or other)
    assert len(asked) == 1
    trainer.checks = None
    assert not trainer.may_refuse(3, 1)
    assert len(asked) == 1


@pytest.mark.parametrize(("join_timeout_s", "told"), [(4.0, True), (6.0, False)])
def test_who_takes_longer_for_a_slot_than_a_quorum_waits_is_told_so(join_timeout_s, told):
    settings = SimpleNamespace(group_id=1, join_timeout_s=join_timeout_s)
    commit = SimpleNamespace(owners=(0, 1, 1), compute_s=10.0)
    advice = advice_on_waits(commit, settings)
    assert ("A slot took 5 s, and fault_tolerance.join_timeout_s is 4" in advice) == told
    assert advice_on_waits(SimpleNamespace(owners=(0, 0), compute_s=0.0), settings) == ""
