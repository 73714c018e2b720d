"""A worker's state that a check refuses is never used: not in a round, and not in a checkpoint."""

import math
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from everstep.config.sections import FaultTolerance
from everstep.run.exits import TrainerEnds
from everstep.semi.section import SemiSync
from everstep.semi.worker_store import StateKey
from everstep.titan import rounds

NOW = 5
"""The last committed round. The worker's only state is one round older."""


class Group(rounds.Rounds):
    """One group of one rank. While `sick`, its device computes a wrong state, which the check finds."""

    committed = NOW

    def __init__(self):
        self.sick, self.checked, self._wrong = True, [], False
        self.kept = {NOW - 1: b"good4"}
        self._refused, self._not_finite, self._steps, self._checks, self._round_s = set(), set(), 1, object(), 0.0
        self._told_short = False
        self._settings, self._trainer = MagicMock(overlap_steps=0), MagicMock(step=NOW)
        self._events, self._files = MagicMock(), MagicMock()
        self._disk = MagicMock(**{"is_due.return_value": False})
        self._from_checkpoint = lambda key: None
        self.state = MagicMock(
            marks={NOW - 1: None, NOW: None}, key=lambda worker, round_: StateKey(worker, round_, ""),
            own_state=lambda: b"wrong5" if self._wrong else b"good5",
        )  # fmt: skip
        self.store = MagicMock(
            held={}, read=lambda key: self.kept.get(key.round), hold=lambda key, own: self.kept.update({key.round: own})
        )
        self._slots = MagicMock(
            number=1, workers=1, nominal_tokens=8.0, trainable=[MagicMock(grad=torch.zeros(1))], compute=self._compute,
            refused=lambda: frozenset({0}) if self._wrong else frozenset(),
            tokens_and_losses=lambda: (torch.zeros(1), torch.zeros(1)),  # every label of the step is masked
        )  # fmt: skip

    def _compute(self, step, slot, *, check_all):
        self.checked.append(check_all)
        self._wrong = self.sick


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setattr(rounds, "PATIENCE_S", 0.0)
    monkeypatch.setattr(rounds, "all_in_group", lambda flag: flag)
    monkeypatch.setattr(rounds, "least_in_group", lambda *values: values)
    return Group()


def test_a_round_that_is_made_again_is_kept_only_if_no_check_refused_it(group):
    group._take_up(NOW + 1, 0, check_all=False)
    assert group.refused() == {0}
    assert NOW not in group.kept
    group._refused.clear()  # the round is discarded, and the device is repaired
    group.sick, group.checked = False, []
    own = group._take_up(NOW + 1, 0, check_all=True)
    assert group.checked == [True], "with every check, as the round itself"
    assert (own, group.kept[NOW]) == (b"good5", b"good5")


def test_a_state_that_only_one_rank_holds_is_added_to_the_checkpoint_by_all_ranks(group, monkeypatch):
    group.kept[NOW], group._add_missing = b"good5", MagicMock()
    group._disk.is_due.return_value = True
    monkeypatch.setattr(rounds, "all_in_group", MagicMock(side_effect=[False]))
    group._take_up(NOW + 1, 0, check_all=False)
    group._add_missing.assert_called_once_with([0])


def test_a_checkpoint_gets_no_state_that_a_check_refused(group):
    with pytest.raises(CheckpointException, match="refuses the state of worker 0"):
        group._caught_up(0)
    assert group.refused() == set(), "the next round is judged by itself"
    group.sick = False
    assert group._caught_up(0) == b"good5"


@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 0.0), (0.0, math.nan), (0.0, 1e12)])
def test_no_step_is_made_with_a_loss_or_gradient_that_is_not_finite(group, loss, gradient):
    bad, fine = (loss, gradient), (0.0, 0.0)
    found = iter([bad, fine, bad, bad])

    def computed():
        its_loss, its_gradient = map(torch.tensor, zip(next(found), strict=True))
        group._slots.trainable[0].grad = its_gradient
        return torch.ones(1), its_loss

    group.sick, group._slots.tokens_and_losses = False, computed
    assert group._inner_step(NOW + 1, NOW + 1, 0, check_all=False) == (1.0, 0.0), "at the second try"
    assert group._slots.optimizer_step.call_count == 1
    assert group._events.emit.call_args.kwargs["reason"] == rounds.NOT_FINITE
    _, told = group._inner_step(NOW + 1, NOW + 1, 0, check_all=False)
    assert math.isnan(told), "the group will refuse the round"
    assert (group._slots.optimizer_step.call_count, group.refused()) == (1, {0})


def test_a_checkpoint_of_workers_with_other_settings_is_refused(group):
    group.shares, group._files.why_run_ended.return_value = 4, ""
    group._settings = SemiSync(method="diloco", sync_steps=6, fragments=2)
    group._disk.rounds_to_load.return_value = SemiSync(method="diloco", sync_steps=9).needs
    group._disk.workers_to_load.side_effect = [3, 4]  # a part of the newest checkpoint is damaged
    with pytest.raises(TrainerEnds, match=r"need .*fragments = 1, .*, and the run has .*fragments = 2, sync_steps = 6"):
        group.restore(MagicMock())


def test_timeouts_that_are_too_short_for_a_round_are_told_once(group, monkeypatch):
    monkeypatch.setattr(rounds.dist, "get_rank", lambda: 0)
    group._ft, group._round_s = FaultTolerance(join_timeout_s=3.0, stall_timeout_s=20.0), 9.0
    for _ in range(2):
        group._tell_short_timeouts()
    (((kind,), told),) = group._events.emit.call_args_list
    assert (kind, told["text"].rpartition("Set ")[2]) == ("warning", "join_timeout_s = 18")
