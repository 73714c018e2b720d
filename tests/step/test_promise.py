"""Schedules that broke the promise once, or would if a rule of the protocol were missing: real processes.

Timeouts are short, so that what should wait too long does.
"""

import signal
import time

import pytest

from harness import ENDLESS, check_states, newest

SHORT = {"steps": ENDLESS, "slots": 3, "slot_s": 0.1, "quorum_s": 4, "reduce_s": 2, "heal_s": 6}
COMMITS_ON = 8
"""Steps that have to follow a fault."""


def together(run, groups, ranks, **options):
    """All ranks of so many groups, once all groups take part."""
    found = [run.ranks(group, ranks, **SHORT | options) for group in range(groups)]
    for group in found:
        for rank in group:
            rank.first()
    return found


def assert_goes_on(groups, slots=3):
    """Every rank of these groups commits the next steps, in the failure-free states, and ranks agree on each."""
    everyone = [rank for group in groups for rank in group]
    goal = newest(everyone) + COMMITS_ON
    for rank in everyone:
        rank.until(goal)
        check_states(rank, slots)
    for step in range(goal - COMMITS_ON, goal + 1):
        told = {rank.commits[step]["history"] for rank in everyone if step in rank.commits}
        assert len(told) == 1, f"step {step} has histories {told}"


@pytest.mark.parametrize("phase", ["backward", "reduce", "vote", "quorum", "connect"])
def test_a_rank_killed_in_any_phase_stops_no_surviving_group(run, phase):
    """A rank whose column failed must not skip a collective that its sibling enters."""
    first, victim, third = together(run, 3, 2)
    if phase == "connect":  # only then do groups connect
        late = run.ranks(3, 2, **SHORT)
        run.order(3, 0, phase, "kill")
        run.carried_out(3, 0)
        time.sleep(0.05)
        late[1].kill()
        assert_goes_on([first, victim, third])
        return
    run.order(1, 0, phase, "kill")
    victim[0].death()
    time.sleep(0.05)  # as its agent does
    victim[1].kill()
    assert_goes_on([first, third])


def test_a_rank_stopped_in_its_sums_holds_nobody_after_its_group_is_killed(run):
    first, victim, third = together(run, 3, 2)
    run.order(1, 0, "reduce", "stop")
    run.carried_out(1, 0)
    time.sleep(3)
    for rank in victim:
        rank.kill()
    assert_goes_on([first, third])


def test_a_joiner_whose_ranks_heal_at_different_speeds_splits_no_vote(run):
    """Its second rank is slower than reduce_timeout."""
    groups = together(run, 2, 2)
    joiner = run.ranks(2, 2, of_rank={1: {"heal_delay_s": 3.5}}, **SHORT)
    for rank in joiner:
        rank.first()
    assert_goes_on([*groups, joiner])


def test_a_rank_that_pauses_before_its_vote_parts_no_group(run):
    groups = together(run, 3, 2, audit=5)
    run.order(1, 1, "vote", "sleep", 3.0)
    run.carried_out(1, 1)
    assert_goes_on(groups)
    assert not [event for event in run.events("audit") if event["differing"]]


@pytest.mark.parametrize("on_loss", ["redistribute", pytest.param("shrink", marks=pytest.mark.slow)])
def test_two_histories_of_one_step_are_told_apart_before_they_are_summed(begin, on_loss):
    """Group 0 alone gets the last sum and is busy for longer than join_timeout; 1 and 2 commit the step again."""
    run = begin(join_timeout_s=2.0, heartbeat_timeout_s=2.0)
    options = {"slots": 6, "slot_s": 0.25, "quorum_s": 20, "reduce_s": 5, "on_loss": on_loss}
    groups = together(run, 3, 1, **options)
    lost = newest([group[0] for group in groups]) + 3
    run.order(0, 0, "applied", "sleep", 6.0, step=lost)
    for group in (1, 2):
        (run.run_dir / f"drop-{group}").write_text(str(lost))
    run.carried_out(0, 0)
    everyone = [group[0] for group in groups]
    goal = newest(everyone) + COMMITS_ON
    for rank in everyone:
        rank.until(goal)
    twice = {
        step: told
        for step in range(1, goal + 1)
        if len(told := {rank.commits[step]["history"] for rank in everyone if step in rank.commits}) > 1
    }
    assert set(twice) == {lost}, "the schedule did not come about"
    for rank in everyone:
        parents = {commit["parent"] for step, commit in rank.commits.items() if step == goal}
        assert parents == {everyone[0].commits[goal]["parent"]}
    # Whoever summed a step together had one history before it.
    for step in range(1, goal + 1):
        by_history = {}
        for rank in everyone:
            if commit := rank.commits.get(step):
                by_history.setdefault(commit["history"], set()).add(commit["parent"])
        assert all(len(parents) == 1 for parents in by_history.values()), f"step {step}"
    assert run.events("history_left"), "the split has to be told"


def test_a_quorum_that_came_before_is_not_believed(begin):
    """What an earlier request was answered must not take a group back a step."""
    run = begin(join_timeout_s=8.0, heartbeat_timeout_s=2.0)
    groups = together(run, 2, 1, slots=6, slot_s=0.05, quorum_s=20, reduce_s=5)
    (run.run_dir / "stale-1").write_text("1")
    assert_goes_on(groups, slots=6)
    assert any("another request" in event["reason"] for event in run.events("quorum_failed"))


def test_a_heal_slower_than_every_timeout_costs_the_others_nothing(run):
    groups = together(run, 2, 1, heal_s=3)
    joiner = run.ranks(2, 1, heal_delay_s=8.0, **SHORT | {"heal_s": 3})
    begun = newest([groups[0][0]])
    joiner[0].first()
    failed = [event for event in run.events("attempt") if not event["committed"] and event["step"] > begun + 1]
    assert not failed, failed
    assert_goes_on([*groups, joiner])
    assert run.events("heal")[-1]["caught_up"] > 3, "it followed while its state was on the way"


def test_a_joiner_does_not_take_over_what_the_same_audit_names(begin):
    run = begin(join_timeout_s=8.0, heartbeat_timeout_s=2.0)
    options = {"slots": 6, "slot_s": 0.1, "quorum_s": 20, "reduce_s": 5, "audit": 12, "pause_at": ("applied:12", 4.0)}
    corrupt = run.ranks(0, 1, flip_at=12, pause_after=2, **SHORT | options)
    corrupt[0].until(2)
    others = [run.ranks(group, 1, **SHORT | options) for group in (1, 2)]
    for group in others:
        group[0].ready()
    corrupt[0].go()
    corrupt[0].until(12)
    joiner = run.ranks(3, 1, **SHORT | options | {"pause_at": ("", 0.0)})
    joiner[0].first()
    for group in (*others, joiner):
        goal = newest([rank for group in others for rank in group]) + COMMITS_ON
        group[0].until(goal)
        check_states(group[0], 6)
    assert {tuple(event["differing"]) for event in run.events("audit") if event["differing"]} == {(0,)}


def test_a_group_that_an_audit_named_goes_on_when_everybody_else_dies(begin):
    """Its state may be wrong, but it is the only one left: it must not be thrown away before another is there."""
    run = begin(join_timeout_s=8.0, heartbeat_timeout_s=1.0)
    options = {"slots": 6, "slot_s": 0.1, "quorum_s": 5, "reduce_s": 5, "audit": 12, "pause_at": ("applied:12", 1.0)}
    source = run.ranks(0, 1, pause_after=2, **SHORT | options)
    source[0].until(2)
    named = run.ranks(1, 1, flip_at=12, **SHORT | options)
    named[0].ready()
    source[0].go()
    source[0].until(12)
    run.order(0, 0, "compute", "kill")
    assert source[0].death() == -signal.SIGKILL
    named[0].until(12)
    named[0].until(12 + COMMITS_ON)
    assert named[0].order_of_commits == sorted(set(named[0].order_of_commits)), "no step was made again"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_lighthouses_that_come_and_go_lead_to_no_sum_over_two_histories(begin, seed):
    import random

    draw = random.Random(seed)
    run = begin(join_timeout_s=10.0, heartbeat_timeout_s=2.0)
    groups = together(run, 3, 1, slots=6, slot_s=0.3, quorum_s=60, reduce_s=10, heal_s=20)
    everyone = [group[0] for group in groups]
    for _ in range(6):
        time.sleep(draw.uniform(2, 4))
        run.kill_lighthouse()
        time.sleep(draw.uniform(0.2, 8))
        run.start_lighthouse()
        goal = newest(everyone) + 1
        for rank in everyone:
            rank.beyond(goal)
    for rank in everyone:
        for step, commit in rank.commits.items():
            for other in everyone:
                same = other.commits.get(step)
                if same is not None and same["history"] == commit["history"]:
                    assert same["parent"] == commit["parent"], f"step {step}"
        check_states(rank)
