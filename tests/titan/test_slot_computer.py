"""What a group sends about its slots besides gradients, and what a commit does with the sums over all groups."""

from types import SimpleNamespace
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from everstep.attention.guard import Checks
from everstep.attention.section import AttentionCheck
from everstep.run.exits import TrainerEnds
from everstep.titan import slot_computer, work
from everstep.titan.data.slot_source import SlotSource
from everstep.titan.slot_computer import SlotComputer
from everstep.titan.steps import Steps

ON = AttentionCheck(enable=True)
HERE = SimpleNamespace(dp_enabled=False, dp_cp_enabled=False, pp_enabled=False)


def step_of(loads, gradients, held, group):
    """A `Steps` with one expert layer, and with gradients for some of its parameters. One group of three is a spare."""
    slots = SlotComputer.__new__(SlotComputer)
    slots._trainer = SimpleNamespace(device=torch.device("cpu"), parallel_dims=HERE)
    slots.number, slots.steps_per_commit, slots.source = 2, 1, None
    slots._tokens, slots._rows, slots.computes_eagerly = dict.fromkeys(held, 10), {}, False
    slots._losses = {slot: torch.tensor(2.5) for slot in held}
    slots.expert_loads = [torch.tensor(loads)]
    slots.trainable = [torch.nn.Parameter(torch.ones(2)) for _ in gradients]
    slots._reached = {param for param, has in zip(slots.trainable, gradients, strict=True) if held and has}
    for param, has in zip(slots.trainable, gradients, strict=True):
        param.grad = torch.ones(2) if has else None
    trainer = MagicMock(slots=slots, model_parts=[])
    trainer.config.fault_tolerance = SimpleNamespace(exact=False, on_poison="stop", spares=1)
    trainer.context.snapshots = SimpleNamespace(group=group, status=lambda: 7, copier=MagicMock())
    step = Steps(trainer)
    step.reducer, slots.optimizer_step, slots.nominal_tokens = MagicMock(), lambda step: 0.0, 2
    return step


def test_a_parameter_that_no_slot_of_any_group_reached_has_no_gradient(monkeypatch):
    monkeypatch.setattr(work, "MetricsLogger", MagicMock())
    computed, idle = step_of([3.0, 4.0], [True, True, False], [0], 0), step_of([0.0, 0.0], [False] * 3, [], 2)
    extra = computed.results().extra + idle.results().extra
    assert idle.statuses(SimpleNamespace(extra=extra)) == {0: 7, 1: 0, 2: 7}, "of the spare, too"
    for step in (computed, idle):
        for param in step._slots.trainable:
            param.grad = torch.zeros(2)  # as the reducer leaves it on every group
        step.update(SimpleNamespace(step=1, tokens=torch.ones(2), extra=extra))
        assert [param.grad is None for param in step._slots.trainable] == [False, False, True]
        assert step._slots.expert_loads[0].tolist() == [3.0, 4.0]


def test_a_host_with_another_file_under_the_same_name_computes_no_slot(tmp_path, monkeypatch):
    """A run that does not load the data's position from a checkpoint may switch to other data."""
    monkeypatch.setattr(slot_computer, "decoder_vocab_size", lambda spec: 1)

    def start(content, *excluded):
        group = MagicMock()
        group._trainer.dataloader = create_autospec(SlotSource, instance=True)
        group._trainer.dataloader.fingerprint.return_value, group._trainer.dataloader.largest_id = content, 0
        group._trainer.config.checkpoint.exclude_from_loading = excluded
        group._trainer.context.run_dir = tmp_path
        return SlotComputer._opened_source(group)

    start("one file")
    start("one file")
    start("another file", "dataloader")
    with pytest.raises(TrainerEnds, match="it is another file here and one file there"):
        start("another file")


@pytest.mark.parametrize(("workers", "labelled", "looks"), [(1, 1.0, False), (2, 1.0, True), (1, 0.5, True)])
def test_an_optimizer_step_with_few_labels_has_its_lost_rows_looked_for(monkeypatch, workers, labelled, looks):
    """A step of 65,536 tokens, in 8 slots; in semi-synchronous runs workers share it. The loss ignores some labels."""
    labels = torch.full((1, 8192), IGNORE_INDEX)
    labels[:, : int(8192 * labelled)] = 1
    slots = MagicMock(_slot_tokens=8192, nominal_tokens=65_536 / workers, _tokens={}, _losses={}, _checks=Checks(ON))
    slots._fetch.return_value, slots._on_device = [({}, labels)], lambda batch: batch
    slots._trainer.forward_backward_step.return_value = torch.tensor(0.0)
    SlotComputer.compute(slots, 1, 0, check_all=False)
    assert slots._checks.looks_at_rows == looks


def test_a_gradient_that_is_zero_and_one_that_is_missing_have_one_checksum(monkeypatch):
    monkeypatch.setattr(work, "MetricsLogger", MagicMock())
    slots = step_of([0.0], [True, True], [0, 1], 0)._slots
    slots._rows = {0: {}, 1: {}}
    for slots._slot, grads in enumerate([[torch.ones(2)], [torch.ones(2), torch.zeros(2)]]):
        list(map(slots.note_gradient, slots.trainable, grads))
    assert slots.own_bits()[0] == slots.own_bits()[1]


def test_each_step_begins_without_gradients_as_after_a_start_where_torchtitan_records_no_graph():
    slots = MagicMock()
    slots._trainer.fwd_bwd_fn = slots._trainer._forward_backward_body  # on a CPU, whatever the config says of graphs
    SlotComputer.discard(slots)
    slots._trainer.optimizers.zero_grad.assert_called_once_with(set_to_none=True)


def test_a_validation_without_data_says_so():
    mine = MagicMock()
    mine._trainer.validator.validate.side_effect = AssertionError
    with pytest.raises(RuntimeError, match=r"\[validator\] failed: its data has no batch"):
        Steps._validate(mine, 4, tells=True)
