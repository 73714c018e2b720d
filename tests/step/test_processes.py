"""The protocol between real processes: heals, SIGKILL and SIGSTOP, with a model of four numbers. The kernel, Gloo and
torchft's lighthouse are real, which are virtual in the simulation (`tests/simulation`) of the same code."""

import itertools
import os
import signal
import time

import pytest

from everstep.run.directory import groups_file
from everstep.run.files import write_json
from harness import Run, check_states, newest
from watched import until

SHORT = {"slots": 3, "slot_s": 0.1, "quorum_timeout_s": 4, "reduce_timeout_s": 2}
COMMITS_ON = 8
"""Steps that every group must commit after a fault."""


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


def together(run, groups, ranks, **options):
    """Start groups, and return the ranks of each once all of them have committed a step."""
    found = [run.ranks(group, ranks, **SHORT | options) for group in range(groups)]
    for group in found:
        for rank in group:
            rank.beyond()
    return found


def assert_goes_on(groups, slots=3):
    """Assert that every rank commits the next steps, with the states of a run without failures and equal histories."""
    everyone = [rank for group in groups for rank in group]
    goal = newest(everyone) + COMMITS_ON
    for rank in everyone:
        rank.beyond(goal)
        check_states(rank, slots)
    for step in range(goal - COMMITS_ON, goal + 1):
        told = {rank.commits[step]["history"] for rank in everyone if step in rank.commits}
        assert len(told) == 1, f"step {step} has histories {told}"


@pytest.mark.parametrize("phase", ["reduce", "heal"])
def test_a_rank_killed_in_any_phase_stops_no_surviving_group(run, phase):
    """A rank whose column failed must not skip a collective that its sibling enters."""
    first, victim, third = together(run, 3, 2)
    stay = [first, third]
    if phase == "heal":  # only a joiner enters this phase
        stay, victim = [first, victim, third], run.ranks(3, 2, **SHORT)
    run.order(3 if len(stay) == 3 else 1, 0, phase, "kill")
    time.sleep(0.05)  # as its agent does
    victim[1].kill()
    assert_goes_on(stay)


def test_no_death_costs_a_heartbeat_timeout_and_that_of_a_lighthouse_costs_no_step(tmp_path):
    """The death of a lighthouse, a group or both closes connections, so no timeout has to pass. A silent host would be
    waited for, and so would a group that a new lighthouse does not know, if no other group said that it died."""
    timeout_s = 20.0
    write_json(groups_file(tmp_path), {"groups": 3})
    run = Run(tmp_path, heartbeat_timeout_s=timeout_s)
    groups = together(run, 3, 1, heartbeat_timeout_s=timeout_s, quorum_timeout_s=60, reduce_timeout_s=60)
    begin = time.monotonic()
    groups[2][0].kill()
    assert_goes_on(groups[:2])
    assert time.monotonic() - begin < timeout_s - 5
    run.kill_lighthouse()
    killed, when = time.monotonic(), time.time()
    assert_goes_on(groups[:2])
    times = sorted(commit["mono"] for commit in groups[0][0].commits.values() if commit["mono"] > killed - 0.5)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 0.5, "steps of 0.1 s"
    run.start_lighthouse()
    assert_goes_on(groups[:2])
    assert all(event["committed"] for event in run.events("attempt") if event["t"] > when)
    begin = time.monotonic()
    run.kill_lighthouse()
    groups[1][0].kill()
    run.start_lighthouse()
    assert_goes_on(groups[:1])
    assert time.monotonic() - begin < timeout_s - 5
    run.close()


def test_a_stopped_rank_costs_the_others_no_time_out_of_a_sum_and_its_group_heals_when_it_wakes(run):
    """They wait as long as their paces and the pause of a busy host explain. Then they compute its slots."""
    first, sleeper, third = together(run, 3, 2, reduce_timeout_s=30, quorum_timeout_s=60)
    first[0].beyond(newest(first) + COMMITS_ON)  # now the groups know their paces
    run.order(1, 0, "reduce", "stop")
    begin = time.monotonic()
    assert_goes_on([first, third])
    assert time.monotonic() - begin < 15
    os.kill(sleeper[0].process.pid, signal.SIGCONT)
    assert_goes_on([first, sleeper, third])
    assert run.events("heal")[-1]["group"] == 1


def test_a_group_that_has_other_data_is_left_out_and_named(run):
    first, second = together(run, 2, 1)
    [other] = run.ranks(2, 1, data="others", **SHORT)
    until(lambda: run.events("left_out"), "the other group", 30)
    assert_goes_on([first, second])
    assert (other.commits, run.events("left_out")[0]["reason"]) == (
        {}, "group 2 has data = others and most have data = known vectors"
    )  # fmt: skip


def test_a_group_leaves_or_gives_up_where_no_quorum_ever_comes(run):
    [asked] = run.ranks(0, 1, quorum_timeout_s=2)
    [alone] = run.ranks(1, 1, quorum_timeout_s=2, startup_timeout_s=0.75)
    asked.beyond()
    alone.beyond()
    run.kill_lighthouse()
    asked.process.send_signal(signal.SIGTERM)
    assert (asked.process.wait(60), alone.process.wait(60)) == (0, 1)
    waited_s = [event["waited_s"] for event in run.events("quorum_failed") if event["group"] == 1]
    assert waited_s[-1] >= 1.5 * len(waited_s), "it counts what came before"
