"""The launcher's decisions: who has stalled, who is started again, who is killed, what the flags say."""

import time
from pathlib import Path

import pytest

from everstep.launch.machine import devices_of_groups
from everstep.launch.settings import GroupSettings
from everstep.launch.watchdog import (
    Cause,
    Death,
    Patience,
    Stall,
    alike,
    describe_exit,
    failures,
    find_stall,
    pause_s,
    reason_to_give_up,
)
from everstep.run.beats import Beat, Heartbeat, beat_path, read_beat
from everstep.run.exits import HOPELESS_EXIT

LIMITS = (5, 100.0)


PATIENCE, COMPILING = Patience(5.0, 60.0), Patience(5.0, 60.0, first_step_s=60.0)


@pytest.mark.parametrize(
    ("first", "second", "patience", "quiet", "late", "stall"),
    [
        # beats of ranks 0 and 1 (pid, seconds, phase); a time at which nobody has stalled; one at which one has
        ((10, 1100.0, "compute"), (11, 1101.0, "reduce"), PATIENCE, 1104.9, 1106.5, Stall(0, "compute", 6.5)),
        ((10, 1100.0, "compute"), (11, 1098.0, "reduce"), PATIENCE, 1102.9, 1107.0, Stall(1, "reduce", 9.0)),
        ((10, 1000.0, "startup"), (11, 1000.0, "startup"), PATIENCE, 1059.0, 1061.0, Stall(0, "startup", 61.0)),
        # left by an earlier worker, which is no sign of life
        ((9, 1059.0, "compute"), None, PATIENCE, 1059.0, 1061.0, Stall(0, "startup", 61.0)),
        # one that has finished waits for the others
        ((10, 1000.0, "done"), (11, 1100.0, "save"), PATIENCE, 1104.9, 1106.0, Stall(1, "save", 6.0)),
        # a first step may compile; a heal has its own timeout
        ((10, 1100.0, "compute"), (11, 1100.0, "reduce"), COMPILING, 1159.0, 1161.0, Stall(0, "compute", 61.0)),
        ((10, 1100.0, "heal"), (11, 1105.0, "reduce"), COMPILING, 1104.9, 1106.0, Stall(0, "heal", 6.0)),
    ],
)
def test_the_rank_that_is_silent_for_longest_has_stalled(first, second, patience, quiet, late, stall):
    told = {rank: beat and Beat(beat[0], beat[1], 3, beat[2]) for rank, beat in enumerate((first, second))}
    assert find_stall({0: 10, 1: 11}, told, 1000.0, quiet, patience) is None
    assert find_stall({0: 10, 1: 11}, told, 1000.0, late, patience) == stall


def test_a_beat_comes_back_as_written(tmp_path):
    before = time.monotonic()
    Heartbeat(tmp_path, 2, 1).beat("a phase with a name that is too long", 7)
    beat = read_beat(beat_path(tmp_path, 2, 1))
    assert beat is not None
    assert before <= beat.mono <= time.monotonic()
    assert (beat.step, beat.phase) == (7, "a phase with a name that is ")
    assert read_beat(beat_path(tmp_path, 0, 0)) is None


def deaths(*exits, committed=False, **more):
    return [Death(float(i), exitcode, committed, **more) for i, exitcode in enumerate(exits)]


def why_given_up(deaths):
    return reason_to_give_up(deaths, *LIMITS)


def test_kills_are_what_restarts_are_for():
    assert not why_given_up(deaths(-9, -9, -9, -9, -9))
    assert failures(deaths(-9, -9, -9, -9, -9)) == 0


def test_a_trainer_that_says_it_is_hopeless_is_believed():
    assert "no use" in why_given_up(deaths(-9, HOPELESS_EXIT, committed=True))


FAILED = [Death(30.0 * i, 1, committed=False, run_step=i) for i in range(50)]


@pytest.mark.parametrize(
    ("ended", "count"),
    [
        (deaths(1, 1), 2),
        (deaths(1, 1, 1, committed=True), 0),
        ([*deaths(1, 1), *deaths(1, committed=True), *deaths(1, 1)], 2),
        (deaths(1, -9, 1, -9), 2),
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


def test_failures_of_one_cause_are_counted_and_put_off_the_next_start():
    here, there = (Cause(1, "KeyError", f"data.py:{line} read") for line in (7, 9))
    of = lambda *causes: [Death(float(i), 1, True, cause=cause) for i, cause in enumerate(causes)]  # noqa: E731
    assert [alike(of(*causes)) for causes in ([here], [here, here], [here, there], [there, here, here])] == [1, 2, 1, 2]
    assert alike([*of(here, here), Death(9.0, -9, True)]) == 0, "a kill is nobody's failure"
    waits = [pause_s(of(*[here] * count)) for count in range(1, 12)]
    assert waits[0] == 0.0, "one failure costs nothing"
    assert waits == sorted(waits)
    assert waits[3] == 4 * waits[1]
    assert waits[-1] == 30.0
    assert pause_s(deaths(-9, -9, -9, -9)) == 0.0


def test_an_invalid_configuration_is_not_tried_again():
    assert "configuration" in why_given_up(deaths(2))


def test_restarts_are_counted_within_their_window():
    assert "died 6 times" in why_given_up(deaths(-9, -9, -9, -9, -9, -9))
    spread = [Death(30.0 * i, -9, True) for i in range(20)]
    assert not why_given_up(spread)


def test_an_exit_in_words():
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(3) == "exited with status 3"


def test_each_group_gets_devices_of_its_own_while_they_last():
    assert devices_of_groups(list("01234567"), 3, 2) == ["0,1", "2,3", "4,5"]
    assert devices_of_groups(["0"], 3, 1) == ["0", "0", "0"]
    assert devices_of_groups([], 2, 1) == [None, None]


def test_a_worker_is_told_its_place():
    argv = GroupSettings("c.toml", Path("runs/x"), 1, 3, 1, "http://h:1", host="10.0.0.1").worker_argv
    assert argv[:6] == ["--module", "everstep", "--config", "c.toml", "--dump_folder", "runs/x"]
    assert argv[argv.index("--fault_tolerance.group_id") + 1] == "1"
    assert argv[argv.index("--fault_tolerance.lighthouse") + 1] == "http://h:1"
    assert argv[argv.index("--fault_tolerance.bind_host") + 1] == "10.0.0.1"
