"""What drives a group: attempts that fail at once, again and again, are not made in a busy loop."""

from datetime import timedelta
from types import SimpleNamespace

from everstep.step.attempt import Host, Turn
from everstep.step.driver import FREE_RETRIES, LONGEST_PAUSE_S, Driver, pause_s


def test_a_pause_comes_after_a_few_retries_and_grows_to_a_bound():
    pauses = [pause_s(retries) for retries in range(40)]
    assert not any(pauses[: FREE_RETRIES + 1])
    assert pauses == sorted(pauses)
    assert 0 < pauses[FREE_RETRIES + 1] < 0.1
    assert pauses[-1] == LONGEST_PAUSE_S


def test_attempts_that_fail_at_once_are_not_repeated_in_a_busy_loop():
    slept, turns = [], [Turn.RETRY] * 30 + [Turn.CAUGHT_UP] + [Turn.RETRY] * FREE_RETRIES + [Turn.LEFT]
    clock = SimpleNamespace(now=lambda: sum(slept), sleep=slept.append)
    protocol = SimpleNamespace(attempt=lambda: turns.pop(0), leaving=False, decisions=None)
    Driver(protocol, SimpleNamespace(goes_on=lambda: True), Host(clock, None, None), timedelta(seconds=1)).run()
    assert len(slept) == 30 - FREE_RETRIES, "no pause after the few retries that any loss of a group may take"
    assert 10 < sum(slept) < 30
