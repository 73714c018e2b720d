"""What a group says of its slots beside the gradients, and what the commit makes of all groups' words."""

from types import SimpleNamespace

import pytest
import torch

from everstep.titan.tally import Layout, StepSums
from everstep.titan.work import SlotTrainer

HERE = SimpleNamespace(dp_enabled=False, dp_cp_enabled=False, pp_enabled=False)


@pytest.fixture
def group():
    """Makes a trainer of one expert layer and three parameters, with gradients for some of them."""

    def make(loads, gradients, slots=(0,)):
        trainer = SlotTrainer.__new__(SlotTrainer)
        trainer.device, trainer.parallel_dims, trainer.snapshots = torch.device("cpu"), HERE, None
        trainer.slots = 2
        trainer._slot_tokens, trainer._slot_rows = dict.fromkeys(slots, 10), {}
        trainer._slot_losses = {slot: torch.tensor(2.5) for slot in slots}
        trainer.expert_loads = [torch.tensor(loads)]
        trainer.trainable = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
        for param, has in zip(trainer.trainable, gradients, strict=True):
            param.grad = torch.ones(2) if has else None
        trainer.sums = Layout(StepSums, len(loads), len(gradients), 0)
        return trainer

    return make


def test_a_parameter_that_no_slot_of_any_group_reached_has_no_gradient(group):
    computed, idle = group([3.0, 4.0], [True, True, False]), group([0.0, 0.0], [False, False, False], slots=())
    sums = [trainer.results() for trainer in (computed, idle)]
    extra = sums[0].extra + sums[1].extra
    for trainer in (computed, idle):
        for param in trainer.trainable:
            param.grad = torch.zeros(2)  # as the reducer leaves it on every group
        trainer.assign_sums(trainer.sums.unpack(extra))
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


@pytest.fixture
def auditor(group, monkeypatch):
    """Holds a slot that reached the first of two parameters. Its second slot reaches both, and one more expert."""
    monkeypatch.setattr("everstep.titan.group.dist.get_world_size", lambda: 1)
    trainer = group([3.0], [True, False])
    trainer.trainable[0].grad.zero_()  # as exact sums leave it
    trainer.metrics_processor = SimpleNamespace(ntokens_since_last_log=7)

    def compute_slot(step, slot, *, whole):
        for param, value in zip(trainer.trainable, (-0.0, 2.0), strict=True):
            (param * value).sum().backward()
        trainer._slot_tokens[slot], trainer._slot_losses[slot] = 5, torch.tensor(1.0)
        trainer.expert_loads[0] += 1
        trainer.metrics_processor.ntokens_since_last_log += 5

    trainer.compute_slot = compute_slot
    return trainer


def test_an_audited_slot_is_added_to_nothing(auditor):
    before = auditor.results()
    auditor.audit(1, 1)
    after = auditor.results()
    assert after.slots == before.slots == {0}
    assert torch.equal(after.tokens, before.tokens)
    assert auditor.sums.unpack(after.extra).loads.tolist() == [3.0]
    assert auditor.sums.unpack(after.extra).reached.tolist()[0] == 1.0, "the held slot reached it"
    assert all(param.grad is None or not param.grad.any() for param in auditor.trainable)
    assert auditor.metrics_processor.ntokens_since_last_log == 7


def test_bits_are_the_gradients_alone_whatever_was_held_before(auditor):
    """Minus zero added to what an earlier slot left is zero, and in the first slot it is minus zero."""
    found = {auditor.audit(1, 1)}
    for param in auditor.trainable:
        param.grad = None
    found.add(auditor.audit(1, 1))
    assert len(found) == 1
    auditor.compute_slot(1, 1, whole=False)
    auditor.trainable[1].grad = torch.full((2,), 2.0).nextafter(torch.zeros(2))
    auditor._slot_rows[1] = auditor._row_sums()
    assert auditor.bits(1) not in found
