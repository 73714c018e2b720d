"""What drives a group: attempts that fail at once, again and again, are not made in a busy loop."""

from datetime import timedelta
from types import SimpleNamespace

from everstep.step.attempt import Host, Turn
from everstep.step.driver import LONGEST_PAUSE_S, Driver


def test_attempts_that_fail_at_once_are_not_repeated_in_a_busy_loop():
    slept, turns = [], [Turn.RETRY] * 30 + [Turn.CAUGHT_UP] + [Turn.RETRY] * 4 + [Turn.LEFT]
    clock = SimpleNamespace(now=lambda: sum(slept), sleep=slept.append)
    protocol = SimpleNamespace(attempt=lambda: turns.pop(0), leaving=False, decisions=None)
    Driver(protocol, SimpleNamespace(goes_on=lambda: True), Host(clock, None, None), timedelta(seconds=1)).run()
    assert slept[:30] == sorted(slept[:30])
    assert slept[29] == LONGEST_PAUSE_S
    assert sum(slept[:5]) < 0.1, "the few that any loss of a group may take cost little"
    assert slept[30:] == slept[:4]
