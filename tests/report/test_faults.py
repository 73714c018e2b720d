"""What faults cost: stalls, delays, rejoins, and the healthy step they are measured against."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.report.attempts import collect_attempts
from everstep.report.faults import (
    Fault,
    collect_faults,
    delay_s,
    normal_step_s,
    presences,
    rejoin_s,
    stall_s,
)
from everstep.report.lineage import trace
from timeline import Timeline


def kill(t, *groups):
    return Fault(t, "kill-group", groups)


def rejoin(run, group=1):
    faults = collect_faults(run.events)
    return rejoin_s(faults[0], group, faults, presences(run.events).get(group))


def test_a_stall_lasts_from_the_fault_to_the_next_commit_less_a_normal_step():
    assert stall_s(kill(10.5, 1), [9, 10, 13, 14], normal_s=1.0) == pytest.approx(1.5)


def test_a_fault_that_delays_nothing_has_no_stall():
    assert stall_s(kill(10.5, 1), [10, 11, 12], normal_s=1.0) == 0


def test_a_fault_before_the_first_commit_or_after_the_last_has_no_stall_to_measure():
    assert stall_s(kill(0.5, 1), [1, 2], 1.0) is None
    assert stall_s(kill(2.5, 1), [1, 2], 1.0) is None


def test_a_delay_shows_what_a_late_fault_hides_from_the_stall():
    late_in_the_step = kill(10.9, 1)
    assert stall_s(late_in_the_step, [10, 12, 13], 1.0) == pytest.approx(0.1)
    assert delay_s(late_in_the_step, [10, 12, 13], 1.0) == pytest.approx(1.0)
    noticed_in_the_next_step = [10, 11, 14, 15]
    assert stall_s(late_in_the_step, noticed_in_the_next_step, 1.0) == 0
    assert delay_s(late_in_the_step, noticed_in_the_next_step, 1.0) == pytest.approx(2.0)


times = st.lists(st.floats(0, 1e6), min_size=2, max_size=20).map(sorted)


@given(times, st.floats(0, 1e6), st.floats(0, 100))
def test_a_delay_is_never_below_the_stall_nor_the_stall_below_zero(commits, t, normal):
    stall, delay = stall_s(kill(t, 0), commits, normal), delay_s(kill(t, 0), commits, normal)
    assert (stall is None) == (delay is None)
    assert stall is None or 0 <= stall <= delay


def test_a_killed_group_is_back_when_it_computes_slots_not_when_it_joins():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).fault(1.5, "kill-worker", 1).commit(2, 2, [0])
    run.start(4, 1).heal(4.5, 1, source=0).commit(5, 3, [0, 1], owners=[0, 0, 0, 0]).commit(6, 4, [0, 1])
    assert rejoin(run) == pytest.approx(4.5)


def test_with_more_groups_than_slots_taking_part_is_enough():
    run = Timeline().start(0, 0, 1, 2).commit(1, 1, [0, 1, 2]).fault(1.5, "kill-worker", 2)
    run.start(3, 2).commit(4, 2, [0, 1, 2], owners=[0, 1])
    assert rejoin(run, 2) == pytest.approx(2.5)


def test_a_commit_that_the_dying_process_still_logged_is_no_rejoin():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).fault(1.5, "kill-worker", 1)
    run.commit(1.6, 2, [0, 1]).start(4, 1).commit(5, 3, [0, 1])
    assert rejoin(run) == pytest.approx(3.5)


def test_a_group_killed_again_before_it_was_back_was_away_the_whole_time():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).fault(2, "kill-worker", 1).start(4, 1)
    run.fault(5, "kill-worker", 1).start(7, 1).commit(9, 2, [0, 1])
    assert rejoin(run) == pytest.approx(7)


def test_a_group_that_does_not_come_back_has_no_rejoin():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).fault(2, "kill-worker", 1).commit(3, 2, [0])
    assert rejoin(run) is None
    assert rejoin(run, group=7) is None
    assert rejoin(run.start(4, 1)) is None


def test_a_fault_without_a_restart_does_not_borrow_the_restart_of_a_later_kill():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).fault(2, "slow-network", 1).commit(3, 2, [0, 1])
    run.fault(4, "kill-worker", 1).start(6, 1).commit(7, 3, [0, 1])
    assert rejoin(run) is None


def test_a_hung_group_that_was_restarted_has_a_rejoin():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).fault(2, "hang", 1).start(6, 1).commit(7, 2, [0, 1])
    assert rejoin(run) == pytest.approx(5)


def died(run, t, group, exitcodes=(-9,)):
    return run.add(
        t,
        "workers_died",
        group,
        role="agent",
        incarnation=0,
        exitcodes={str(rank): code for rank, code in enumerate(exitcodes)},
    )


def up(run, t, group):
    return run.add(t, "workers_started", group, role="agent", incarnation=0, pids=[1])


def test_a_death_that_no_fault_explains_is_a_fault_of_its_own():
    run = up(Timeline(), 0, 1).fault(1, "kill-worker", 1)
    died(run, 1.1, 1)
    up(run, 2, 1)
    died(run, 5, 1)
    faults = collect_faults(run.events)
    assert [(f.t, f.name, f.groups) for f in faults] == [(1, "kill-worker", (1,)), (5, "died", (1,))]


def test_one_death_that_two_nodes_of_a_group_report_is_one():
    run = up(Timeline(), 0, 1)
    died(died(run, 5, 1), 5.1, 1)
    assert len(collect_faults(run.events)) == 1


def test_a_fault_of_one_group_explains_no_death_of_another():
    run = up(up(Timeline(), 0, 1), 0, 2).fault(1, "kill-worker", 1)
    died(run, 1.2, 2)
    assert [f.name for f in collect_faults(run.events)] == ["kill-worker", "died"]


def test_a_fault_of_no_group_explains_every_death_and_one_of_several_groups_theirs():
    run = up(up(Timeline(), 0, 1), 0, 2).fault(1, "power-cut", None)
    died(died(run, 1.2, 2), 1.2, 1)
    assert [(f.name, f.groups) for f in collect_faults(run.events)] == [("power-cut", ())]
    run = up(up(Timeline(), 0, 1), 0, 2).fault(1, "kill-all", [1, 2])
    died(died(run, 1.2, 2), 1.2, 1)
    assert [(f.name, f.groups) for f in collect_faults(run.events)] == [("kill-all", (1, 2))]


def test_workers_that_ended_well_did_not_die():
    run = died(up(Timeline(), 0, 1), 5, 1, exitcodes=(0, 0))
    assert collect_faults(run.events) == []
    assert len(collect_faults(died(run, 7, 1, exitcodes=(0, 1)).events)) == 1


def normal(run, groups=None):
    attempts = [attempt.step for attempt in collect_attempts(run.events)]
    retried = {step for step in attempts if attempts.count(step) > 1}
    return normal_step_s(trace(run.events).commits, collect_faults(run.events), retried, groups)


def test_a_healthy_step_has_no_fault_one_attempt_and_all_groups():
    run = Timeline().start(0, 0, 1)
    for step, t in enumerate([10, 11, 12.2, 20, 21, 23, 24], start=1):
        run.commit(t, step, [0, 1] if step not in (5, 6) else [0])
    run.fault(12.5, "kill-worker", 1)
    assert normal(run) == pytest.approx(1.0)  # of 1.0, 1.2 and 1.0; not 7.8 (fault), 1 and 2 (one group)
    run.attempt(10.5, 2, 0, [0], took_s=0.4, committed=False).attempt(11, 2, 0, [1], took_s=0.4)
    assert normal(run) == pytest.approx(1.1)


def test_without_a_step_at_full_strength_weaker_ones_count():
    run = Timeline().start(0, 0)
    for step in range(1, 5):
        run.commit(step * 2, step, [0])
    assert normal(run, groups=3) == pytest.approx(2)


def test_the_pause_of_a_restart_is_no_step():
    run = Timeline().start(0, 0).commit(1, 1, [0]).commit(2, 2, [0])
    run.start(50, 0, step=3, source="memory").commit(60, 3, [0])
    assert normal(run) == pytest.approx(1)


def test_of_one_commit_the_group_says_how_long_it_took_and_none_is_unknown():
    assert normal(Timeline().start(0, 0).commit(9, 1, [0], took_s=1.5)) == pytest.approx(1.5)
    assert normal(Timeline().start(0, 0)) is None
