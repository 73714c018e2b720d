"""Decisions and the driver: ranks take each decision together, and attempts that fail at once make no busy loop."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from everstep.quorum.errors import GroupBroken
from everstep.step.attempt import Host, Outcome
from everstep.step.decisions import Decisions
from everstep.step.driver import LONGEST_PAUSE_S, Driver


def test_a_rank_at_another_decision_ends_the_group():
    class Behind:
        rank, size = 0, 3

        def gather(self, mine):
            return [mine, mine, mine.replace(b"1", b"0")]

    decisions = Decisions(Behind())
    with pytest.raises(GroupBroken, match="rank 2 of this group is not at decision 1, 'point'"):
        decisions.gather("point", None)


def test_attempts_that_fail_at_once_are_not_repeated_in_a_busy_loop():
    slept, outcomes = [], [Outcome.RETRY] * 30 + [Outcome.CAUGHT_UP] + [Outcome.RETRY] * 4 + [Outcome.LEFT]
    clock = SimpleNamespace(now=lambda: sum(slept), sleep=slept.append)
    protocol = SimpleNamespace(attempt=lambda: outcomes.pop(0), leaving=False, decisions=None)
    Driver(protocol, SimpleNamespace(goes_on=lambda: True), Host(clock, None, None), timedelta(seconds=1)).run()
    assert (slept[:30], slept[29]) == (sorted(slept[:30]), LONGEST_PAUSE_S)
    assert sum(slept[:5]) < 0.1, "the few retries after the loss of a group cost little"
    assert slept[30:] == slept[:4]
