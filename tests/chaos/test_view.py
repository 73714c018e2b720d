"""What an injector knows of a run: who may be hit without anything being lost."""

import pytest

from everstep.chaos.kinds import FAULTS, KillAll, KillGroup
from everstep.chaos.view import SETTLED_S


@pytest.mark.parametrize(
    ("groups", "spared", "there", "hit", "lost", "candidates"),
    [
        (3, [], (0, 2), [], 1, [0, 2]),
        (3, [], (0, 2), [0], 1, []),  # group 2 is the last that holds the state
        (1, [], (0,), [], 1, [0]),  # there is no other
        (3, [], (0, 1, 2), [], 2, [0, 1, 2]),
        (3, [], (0, 1, 2), [], 3, []),
        (2, [0], (0, 1), [], 1, [1]),  # the spared one counts as the one that is left
        (2, [0], (0, 1), [1], 1, []),
    ],
)
def test_only_groups_that_take_part_may_be_hit_and_the_last_one_is_spared(
    told, groups, spared, there, hit, lost, candidates
):
    run = told(groups, spared=spared)
    run.take_part(*there)
    run.view.hit(hit)
    assert run.view.candidates(lost) == candidates


def test_a_group_that_was_hit_is_back_when_it_commits_after_its_new_start(told):
    run = told(2)
    run.take_part(0, 1)
    run.view.hit([0])
    run.commit(0, (0, 1))
    assert run.view.taking_part == {1}, "that step was on its way when it was hit"
    run.tell("workers_died", group=0)
    run.tell("workers_started", group=0, incarnation=1, pids=[9])
    assert run.view.taking_part == {1}
    run.commit(0, (0, 1), step=2)
    assert run.view.taking_part == {0, 1}


def test_a_group_that_was_only_stopped_is_back_when_it_commits_again(told, monkeypatch):
    run = told(2)
    run.take_part(0, 1)
    monkeypatch.setattr(run.view, "_now", lambda: run.now)
    run.view.hit([0])
    run.commit(0, (0, 1), step=2)
    assert run.view.taking_part == {1}, "it may have been on its way"
    run.now += SETTLED_S
    run.commit(0, (0, 1), step=3)
    assert run.view.taking_part == {0, 1}


@pytest.mark.parametrize(
    "ending",
    [
        {"kind": "workers_died", "group": 0},
        {"kind": "workers_stalled", "group": 0},
        {"kind": "agent_ended", "group": 0},
        {"kind": "run_started", "groups": 3},
        {"kind": "run_ended"},
    ],
)
def test_a_group_whose_workers_are_gone_does_not_take_part(told, ending):
    run = told(3)
    run.take_part(0, 1, 2)
    run.tell(**ending)
    assert 0 not in run.view.taking_part


def test_faults_that_lose_the_state_say_so_by_never_sparing_anybody(told):
    run = told(3, spared=[0])
    run.take_part(0, 1, 2)
    assert "spared" in KillAll().never(run.view)
    alone = told(1)
    alone.take_part(0)
    assert "one has to be left" in KillGroup(count=2).never(alone.view)


def test_a_fault_of_a_group_that_does_not_take_part_has_to_wait(told):
    run = told(3)
    run.take_part(0, 1)
    assert "group 2" in KillGroup(group=2).why_not(run.view)
    assert KillGroup(group=1).why_not(run.view) is None


@pytest.mark.parametrize("kind", FAULTS.values(), ids=FAULTS)
def test_every_fault_says_what_it_breaks(kind):
    assert kind.breaks.endswith(".")
    assert kind.on
    assert kind.on <= {"local", "slurm"}
    assert kind().name == kind.name
