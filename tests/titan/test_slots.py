"""What a group says of its slots beside the gradients, and what the commit makes of all groups' words."""

from types import SimpleNamespace

import pytest
import torch

from everstep.titan.slots import Slots
from everstep.titan.steps import Steps

HERE = SimpleNamespace(dp_enabled=False, dp_cp_enabled=False, pp_enabled=False)


@pytest.fixture
def group():
    """Makes a step of one expert layer and three parameters, with gradients for some of them."""

    def make(loads, gradients, held=(0,), *, eager=False):
        slots = Slots.__new__(Slots)
        slots._trainer = SimpleNamespace(device=torch.device("cpu"), parallel_dims=HERE)
        slots.number = 2
        slots._tokens, slots._rows, slots.computes_eagerly = dict.fromkeys(held, 10), {}, eager
        slots._losses = {slot: torch.tensor(2.5) for slot in held}
        slots.expert_loads = [torch.tensor(loads)]
        slots.trainable = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
        slots._reached = {at for at, has in enumerate(gradients) if held and has}
        for param, has in zip(slots.trainable, gradients, strict=True):
            param.grad = torch.ones(2) if has else None
        return Steps(slots, None, None, is_exact=True)

    return make


def test_a_parameter_that_no_slot_of_any_group_reached_has_no_gradient(group):
    computed, idle = group([3.0, 4.0], [True, True, False]), group([0.0, 0.0], [False, False, False], held=())
    sums = [step.results() for step in (computed, idle)]
    extra = sums[0].extra + sums[1].extra
    for step in (computed, idle):
        for param in step._slots.trainable:
            param.grad = torch.zeros(2)  # as the reducer leaves it on every group
        step._assign(step._sums.unpack(extra))
        assert [param.grad is None for param in step._slots.trainable] == [False, False, True]
        assert step._slots.expert_loads[0].tolist() == [3.0, 4.0]


def test_old_gradients_of_a_group_without_slots_say_nothing(group):
    idle = group([0.0], [True, True, True], held=())
    assert idle.results().extra.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_only_the_slots_that_were_computed_are_told(group):
    sums = group([0.0], [True], held=(1,)).results()
    assert sums.tokens.tolist() == [0.0, 10.0]
    assert sums.loss.tolist() == [0.0, 2.5]
    assert sums.slots == {1}


@pytest.fixture(params=["eager", "in a graph"])
def auditor(request, group, monkeypatch):
    """Holds a slot that reached the first of two parameters. Its second slot reaches both, and one more expert."""
    monkeypatch.setattr("everstep.titan.group.dist.get_world_size", lambda: 1)
    step = group([3.0], [True, False], eager=request.param == "eager")
    slots, processor = step._slots, SimpleNamespace(ntokens_since_last_log=7)
    slots.trainable[0].grad = None if slots.computes_eagerly else torch.zeros(2)  # as exact sums leave it
    slots._trainer.metrics_processor = processor

    def compute(number, slot, *, whole):
        for param, value in zip(slots.trainable, (-0.0, 2.0), strict=True):
            (param * value).sum().backward()
        slots._tokens[slot], slots._losses[slot] = 5, torch.tensor(1.0)
        slots._reached |= {0, 1}
        slots.expert_loads[0] += 1
        processor.ntokens_since_last_log += 5

    slots.compute = compute
    return step


def test_an_audited_slot_is_added_to_nothing(auditor):
    before = auditor.results()
    auditor._slots.audit(1, 1)
    after = auditor.results()
    assert after.slots == before.slots == {0}
    assert torch.equal(after.tokens, before.tokens)
    assert auditor._sums.unpack(after.extra).loads.tolist() == [3.0]
    assert auditor._sums.unpack(after.extra).reached.tolist() == [1.0, 0.0], "the held slot reached the first alone"
    assert all(param.grad is None or not param.grad.any() for param in auditor._slots.trainable)
    assert auditor._slots._trainer.metrics_processor.ntokens_since_last_log == 7


def test_bits_are_those_of_the_slot_alone_whatever_was_held_before(auditor):
    """Minus zero added to what an earlier slot left is zero, and in the first slot it is minus zero."""
    found = {auditor._slots.audit(1, 1)}
    for param in auditor._slots.trainable:
        param.grad = None
    found.add(auditor._slots.audit(1, 1))
    assert len(found) == 1
    auditor.compute(1, 1, whole=False)
    auditor._slots.trainable[1].grad = torch.full((2,), 2.0).nextafter(torch.zeros(2))
    auditor._slots.keep_bits(1)
    assert auditor._slots.bits(1) not in found
    for param in auditor._slots.trainable:
        param.grad = None
    auditor.compute(1, 1, whole=False)
    auditor._slots.keep_bits(1)
    assert auditor._slots.bits(1) in found
    auditor._slots._losses[1] = torch.tensor(1.0).nextafter(torch.tensor(2.0))
    auditor._slots.keep_bits(1)
    assert auditor._slots.bits(1) not in found, "the loss is of the slot too"
