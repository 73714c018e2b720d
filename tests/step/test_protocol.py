"""The step protocol between real processes: lighthouse, quorums, Gloo, healing, SIGKILL and SIGSTOP."""

import contextlib
import os
import signal

import pytest

from harness import ENDLESS, check, check_states, expected


def test_groups_share_the_slots_and_reach_the_same_state(run):
    groups = run.together(2, steps=15)
    for group in groups:
        check(group, 15)
    assert set(groups[0].commits[10]["owners"]) == {0, 1}


def test_survivors_keep_what_they_hold_when_a_group_dies(run):
    first = run.group(0, steps=20, slot_s=0.05, pause_after=2)
    first.until(2)
    second = run.group(1, steps=20, slot_s=0.05).ready()
    victim = run.group(2, steps=20, slot_s=0.05, crash_at="compute:12:1").ready()
    first.go()
    check(first, 20)
    check(second, 20)
    assert victim.death() == -signal.SIGKILL
    retries = [event for event in run.events("attempt") if event["held_before"]]
    assert {event["step"] for event in retries} == {12}
    assert all(set(event["computed"]).isdisjoint(event["held_before"]) for event in retries)
    assert sorted(slot for event in retries for slot in event["computed"]) == [2, 5], "only what the dead group owed"
    assert not any(event["recomputed"] for event in run.events("attempt"))


@pytest.mark.parametrize("phase", ["quorum:7", "compute:7:0", "reduce:7", "vote:7"])
def test_a_group_may_die_in_any_phase(run, phase):
    survivor = run.group(0, steps=12, slot_s=0.02, pause_after=2)
    survivor.until(2)
    victim = run.group(1, steps=12, slot_s=0.02, crash_at=phase).ready()
    survivor.go()
    check(survivor, 12)
    assert victim.death() == -signal.SIGKILL


@pytest.mark.parametrize("phase", ["connect", "heal"])
def test_a_group_may_die_while_it_joins_again_and_again_and_come_back(run, phase):
    survivor = run.group(0, steps=ENDLESS, slot_s=0.02)
    survivor.until(2)
    for _ in range(3):
        assert run.group(1, steps=ENDLESS, slot_s=0.02, crash_at=phase).death() == -signal.SIGKILL
    last = run.group(1, steps=ENDLESS, slot_s=0.02)
    last.until(last.first() + 10)
    check_states(survivor)
    check_states(last)


def test_two_of_three_die_at_once(run):
    first, second, third = run.together(3, steps=20, slot_s=0.03)
    second.until(6)
    third.until(6)
    for group in (second, third):
        group.process.kill()
    check(first, 20)


def test_a_stopped_group_is_left_behind_and_heals_when_it_wakes(run):
    first, second, sleeper = run.together(3, steps=60, slot_s=0.04)
    sleeper.until(5)
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    first.until(25)
    os.kill(sleeper.process.pid, signal.SIGCONT)
    for group in (first, second, sleeper):
        check(group, 60)
    assert run.events("heal")[-1]["group"] == 2


def test_the_lighthouse_dies_and_comes_back_with_an_empty_memory(run):
    first, second = run.together(2, steps=40, slot_s=0.02)
    second.until(6)
    run.kill_lighthouse()
    run.start_lighthouse()
    check(first, 40)
    check(second, 40)


def test_a_group_gives_up_when_no_quorum_ever_comes(run):
    group = run.group(0, steps=ENDLESS, give_up_s=3)
    group.until(3)
    run.kill_lighthouse()
    with contextlib.suppress(AssertionError):
        group.until(ENDLESS)
    assert group.death() == 1
    assert run.events("quorum_failed")


def test_shrink_commits_without_the_lost_slots(run):
    first = run.group(0, steps=20, slot_s=0.03, on_loss="shrink", pause_after=2)
    first.until(2)
    run.group(1, steps=20, slot_s=0.03, on_loss="shrink", crash_at="compute:9:1").ready()
    first.go()
    first.until(20)
    short = [commit for commit in first.commits.values() if -1 in commit["owners"]]
    assert [commit["step"] for commit in short] == [9]
    assert short[0]["owners"] == (0, -1, 0, -1, 0, -1)
    assert short[0]["tokens"] == 30.0


def test_more_groups_than_slots_leaves_spares_that_step_in(run):
    groups = run.together(4, steps=30, slots=2, slot_s=0.03)
    groups[1].until(6)
    groups[1].kill()
    survivors = [groups[0], *groups[2:]]
    for group in survivors:
        check(group, 30, slots=2)
    assert {0, 1} <= {owner for commit in groups[0].commits.values() for owner in commit["owners"]}
    assert set(groups[0].commits[30]["owners"]) == {0, 2}


def test_a_spare_waits_for_as_long_as_the_others_compute(run):
    first, spare = run.together(2, steps=5, slots=1, slot_s=2.0, reduce_s=0.7)
    check(first, 5, slots=1)
    check(spare, 5, slots=1)
    failed = [event["reason"] for event in run.events("attempt") if not event["committed"]]
    assert not [reason for reason in failed if "Timed out" in reason or "lost" in reason], failed


def test_the_audit_finds_the_group_whose_parameters_changed_and_heals_it(run):
    first = run.group(0, steps=30, slot_s=0.02, pause_after=2)
    first.until(2)
    second = run.group(1, steps=30, slot_s=0.02).ready()
    corrupt = run.group(2, steps=30, slot_s=0.02, flip_at=8).ready()
    first.go()
    check(first, 30)
    check(second, 30)
    corrupt.until(30)
    named = [event for event in run.events("audit") if not event["agreed"]]
    assert named
    assert all(event["differing"] == [2] for event in named)
    wrong = [step for step, commit in corrupt.commits.items() if commit["state"] != expected(step, 6)]
    assert wrong
    assert max(wrong) <= 10, "healed right after the audit of step 10"


def told_of(run, step):
    """By attempt and group: what it held, computed, and computed of what it had given up."""
    attempts = {(event["attempt"], event["group"]): event for event in run.events("attempt") if event["step"] == step}
    return {key: (event["held_before"], event["computed"], event["recomputed"]) for key, event in attempts.items()}


def test_a_group_drops_what_it_holds_with_a_refused_slot_and_the_others_keep_theirs(run):
    """Also where its sum with the other slots has begun."""
    groups = run.together(2, steps=12, slot_s=0.02, refuse=(6, 2))
    for group in groups:
        check(group, 12)
    assert [(event["step"], event["slot"], event["group"]) for event in run.events("slot_refused")] == [(6, 2, 0)]
    assert told_of(run, 6) == {
        (1, 0): ([], [0, 2, 4], []),
        (1, 1): ([], [1, 3, 5], []),
        (2, 0): ([], [2, 0], [0, 2]),
        (2, 1): ([1, 3, 5], [4], []),
    }


def test_what_is_not_finite_is_given_up_and_counted_where_the_same_group_computes_it_again(run):
    groups = run.together(2, steps=9, slot_s=0.02, poison=(6, 3))
    for group in groups:
        check(group, 9)
    assert told_of(run, 6) == {
        (1, 0): ([], [0, 2, 4], []),
        (1, 1): ([], [1, 3, 5], []),
        (2, 0): ([0, 2, 4], [], []),
        (2, 1): ([], [1, 3, 5], [1, 3, 5]),
    }


def test_a_group_that_is_asked_to_leave_finishes_its_step_and_the_others_go_on(run):
    first, second = run.together(2, steps=40, slot_s=0.02)
    second.until(6)
    second.process.terminate()
    assert second.death() == 0
    check(first, 40)
    assert 0 < len(second.commits) < 40


def test_a_group_can_leave_while_there_is_no_quorum(run):
    group = run.group(0, steps=ENDLESS)
    group.until(3)
    run.kill_lighthouse()
    group.process.terminate()
    assert group.death() == 0


def test_a_joiner_whose_host_has_no_memory_for_another_sum_begins_to_heal_anew(run):
    first, second = run.together(2, steps=ENDLESS, slot_s=0.05)
    second.first()
    joiner = run.group(2, steps=ENDLESS, slot_s=0.05, heal_delay_s=1.5, keeps=2)
    joiner.first()
    assert "no memory" in run.events("heal_failed")[0]["reason"]
    joiner.until(max(joiner.commits) + 3)
    for group in (first, second, joiner):
        check_states(group)
