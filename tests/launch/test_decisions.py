"""The launcher's decisions: who has stalled, who is started again, who is killed, what the flags say."""

import pytest

from everstep.launch.machine import devices_of_groups
from everstep.launch.watchdog import (
    Death,
    Stall,
    failures,
    find_stall,
    in_a_row,
    pause_s,
    reason_to_give_up,
)
from everstep.run.beats import Beat


def patience(phase):
    return 60.0 if phase == "startup" else 5.0


@pytest.mark.parametrize(
    ("first", "second", "quiet", "late", "stall"),
    [
        # beats of ranks 0 and 1 (pid, seconds, phase); a time at which nobody has stalled; one at which one has
        ((10, 1100.0, "compute"), (11, 1101.0, "reduce"), 1104.9, 1106.5, Stall(0, "compute", 6.5)),
        ((10, 1100.0, "compute"), (11, 1098.0, "reduce"), 1102.9, 1107.0, Stall(1, "reduce", 9.0)),
        ((10, 1000.0, "startup"), (11, 1000.0, "startup"), 1059.0, 1061.0, Stall(0, "startup", 61.0)),
        # left by an earlier worker, which is no sign of life
        ((9, 1059.0, "compute"), None, 1059.0, 1061.0, Stall(0, "startup", 61.0)),
        # one that has finished waits for the others
        ((10, 1000.0, "done"), (11, 1100.0, "save"), 1104.9, 1106.0, Stall(1, "save", 6.0)),
    ],
)
def test_the_rank_that_is_silent_for_longest_has_stalled(first, second, quiet, late, stall):
    told = {rank: beat and Beat(beat[0], beat[1], 3, beat[2]) for rank, beat in enumerate((first, second))}
    assert find_stall({0: 10, 1: 11}, told, 1000.0, patience, quiet) is None
    assert find_stall({0: 10, 1: 11}, told, 1000.0, patience, late) == stall


def deaths(*exits, committed=False, **more):
    return [Death(float(i), exitcode, committed, **more) for i, exitcode in enumerate(exits)]


@pytest.mark.parametrize(
    ("exitcode", "committed", "why"),
    [
        (-9, False, ""),
        (1, False, ""),
        (2, False, "configuration"),
        (2, True, ""),
        (64, True, "no use"),
        (65, True, "unfit"),
    ],
)
def test_a_trainers_own_decision_ends_its_group_and_nothing_else(exitcode, committed, why):
    (death,) = deaths(exitcode, committed=committed)
    assert bool(reason_to_give_up(death)) == bool(why)
    assert why in reason_to_give_up(death)


FAILED = [Death(30.0 * i, 1, committed=False, run_step=i) for i in range(50)]


@pytest.mark.parametrize(
    ("ended", "count"),
    [
        (deaths(1, 1), 2),
        (deaths(1, 1, 1, committed=True), 0),
        ([*deaths(1, 1), *deaths(1, committed=True, run_step=3), *deaths(1, 1, run_step=3)], 2),
        (deaths(-9, -9, -9, -9, -9), 0),
        (deaths(1, 1, -9, 1), 1),
        (deaths(-11, -6, -7), 3),
        (deaths(-9, -9, out_of_memory=True), 2),
        (deaths(-9, -9, stalled=True), 2),
        (deaths(1, 1, 1, excused=True), 0),
        (deaths(-11, -11, excused=True), 0),
        ([*deaths(1, excused=True), *deaths(1, 1)], 2),
        (FAILED, 1),
        ([*FAILED[:3], Death(90.0, 1, False, run_step=2), Death(120.0, 1, False, run_step=2)], 3),
    ],
)
def test_failures_count_if_they_are_the_workers_own_and_nobody_commits(ended, count):
    assert failures(ended) == count


def test_failures_in_a_row_put_off_the_next_start():
    failed = deaths(*[1] * 11, committed=True)
    assert [len(in_a_row(failed[:n])) for n in range(1, 4)] == [1, 2, 3]
    assert in_a_row([*failed, Death(9.0, -9, True)]) == [], "a kill is nobody's failure"
    assert len(in_a_row([*failed, Death(9999.0, 1, True)])) == 1, "those before were long ago"
    waits = [pause_s(failed[:count]) for count in range(1, 12)]
    assert waits[0] == 0.0, "one failure costs nothing"
    assert waits == sorted(waits)
    assert waits[3] == 4 * waits[1]
    assert waits[-1] == 30.0
    assert pause_s(deaths(-9, -9, -9, -9)) == 0.0


def test_each_group_gets_devices_of_its_own_while_they_last():
    assert devices_of_groups(list("01234567"), 3, 2) == ["0,1", "2,3", "4,5"]
    assert devices_of_groups(["0"], 3, 1) == ["0", "0", "0"]
    assert devices_of_groups([], 2, 1) == [None, None]
