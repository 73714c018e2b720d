"""Decisions of a group: every rank learns what each said, and ranks at different decisions do not pair."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from everstep.quorum.errors import GroupBroken
from everstep.step.attempt import Host, Turn
from everstep.step.decisions import Decisions
from everstep.step.driver import FREE_RETRIES, Driver


def test_a_rank_at_another_decision_ends_the_group():
    class Behind:
        rank, size = 0, 3

        def gather(self, words):
            return [list(words), list(words), [words[0] - 1, *words[1:]]]

    decisions = Decisions(Behind())
    with pytest.raises(GroupBroken, match="rank 2 of this group is not at decision 1, 'point'"):
        decisions.gather("point", [])


def test_attempts_that_fail_at_once_are_not_repeated_in_a_busy_loop():
    slept, turns = [], [Turn.RETRY] * 30 + [Turn.CAUGHT_UP] + [Turn.RETRY] * FREE_RETRIES + [Turn.LEFT]
    clock = SimpleNamespace(now=lambda: sum(slept), sleep=slept.append)
    protocol = SimpleNamespace(attempt=lambda: turns.pop(0), leaving=False, decisions=None)
    Driver(protocol, SimpleNamespace(goes_on=lambda: True), Host(clock, None, None), timedelta(seconds=1)).run()
    assert len(slept) == 30 - FREE_RETRIES, "no pause after the few retries that any loss of a group may take"
    assert 10 < sum(slept) < 30
