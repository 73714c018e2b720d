"""What attempts threw away and computed again."""

from everstep.report.attempts import collect_attempts, slots_recomputed, thrown_away
from timeline import Timeline


def test_the_groups_events_of_one_pass_are_one_attempt():
    run = Timeline().start(0, 0, 1)
    run.attempt(1.0, 1, 0, [0, 1]).attempt(1.2, 1, 1, [2, 3])
    run.attempt(2.0, 2, 0, [0, 1]).attempt(2.2, 2, 1, [2, 3])
    attempts = collect_attempts(run.events)
    assert [(a.step, a.members) for a in attempts] == [(1, {0, 1}), (2, {0, 1})]
    assert thrown_away(attempts) == slots_recomputed(attempts) == 0


def retry(recomputed=()):
    """Group 2 dies in step 1; groups 0 and 1 notice at slightly different times and compute its slots."""
    run = Timeline().start(0, 0, 1, 2)
    run.attempt(1.0, 1, 0, [0, 1], committed=False).attempt(1.4, 1, 1, [2], took_s=1.4, committed=False)
    run.attempt(2.0, 1, 0, [4], held=[0, 1], took_s=1.0)
    return run.attempt(2.0, 1, 1, [3, *recomputed], held=[2], recomputed=recomputed, took_s=0.6)


def test_a_retry_is_a_second_attempt_that_throws_nothing_away():
    attempts = collect_attempts(retry().events)
    assert [a.members for a in attempts] == [{0, 1}, {0, 1}]
    assert thrown_away(attempts) == 0


def test_the_dead_groups_slots_are_computed_again_by_others():
    assert slots_recomputed(collect_attempts(retry().events)) == 2


def test_a_survivor_that_computes_again_what_it_held_throws_the_attempt_away():
    attempts = collect_attempts(retry(recomputed=[2]).events)
    assert thrown_away(attempts) == 1
    assert slots_recomputed(attempts) == 3


def test_computing_a_held_slot_again_is_seen_even_when_the_group_does_not_say_so():
    run = Timeline().start(0, 0).attempt(1, 1, 0, [0, 1], committed=False).attempt(2, 1, 0, [0, 1])
    assert thrown_away(collect_attempts(run.events)) == 1


def test_a_group_of_which_a_slot_was_refused_held_nothing_that_could_be_thrown_away():
    run = Timeline().start(0, 0, 1).add(0.9, "slot_refused", 0, 1, slot=1, reason="a gradient is not finite")
    run.attempt(1, 1, 0, [0, 1], committed=False).attempt(1, 1, 1, [2, 3], committed=False)
    run.attempt(2, 1, 0, [0, 1], recomputed=[0, 1], took_s=0.5).attempt(2, 1, 1, [], held=[2, 3], took_s=0.5)
    attempts = collect_attempts(run.events)
    assert (len(attempts), thrown_away(attempts), slots_recomputed(attempts)) == (2, 0, 2)
    run.attempt(3, 2, 0, [0, 1], committed=False).attempt(4, 2, 0, [0, 1], recomputed=[0, 1], took_s=0.5)
    assert thrown_away(collect_attempts(run.events)) == 1, "of another step"


def test_groups_that_threw_work_away_in_the_same_attempt_count_once():
    run = Timeline().start(0, 0, 1)
    for t, committed in ((1, False), (2, True)):
        run.attempt(t, 1, 0, [0, 1], took_s=0.9, committed=committed)
        run.attempt(t + 0.05, 1, 1, [2, 3], took_s=0.9, committed=committed)
    attempts = collect_attempts(run.events)
    assert (len(attempts), thrown_away(attempts), slots_recomputed(attempts)) == (2, 1, 4)


def test_a_restarted_or_healed_group_held_nothing_that_could_be_thrown_away():
    run = Timeline().start(0, 0, 1).attempt(1, 1, 0, [0, 1], committed=False)
    run.start(2, 0).attempt(3, 1, 0, [0, 1], took_s=0.5, committed=False)
    run.heal(3.5, 0, source=1).attempt(4, 1, 0, [0, 1], took_s=0.4)
    attempts = collect_attempts(run.events)
    assert (len(attempts), thrown_away(attempts), slots_recomputed(attempts)) == (3, 0, 4)


def test_steps_trained_again_after_a_rollback_are_recomputed_but_nothing_a_survivor_held_is_thrown_away():
    run = Timeline().start(0, 0).attempt(1, 1, 0, range(4)).attempt(2, 2, 0, range(4))
    run.start(5, 0, step=2, source="disk").attempt(6, 2, 0, range(4)).attempt(7, 3, 0, range(4))
    attempts = collect_attempts(run.events)
    assert (len(attempts), thrown_away(attempts), slots_recomputed(attempts)) == (4, 0, 4)


def test_an_attempt_that_ended_before_computing_makes_no_work_be_done_again():
    run = Timeline().start(0, 0).attempt(1, 1, 0, [], committed=False).attempt(2, 1, 0, range(4))
    attempts = collect_attempts(run.events)
    assert (len(attempts), slots_recomputed(attempts)) == (2, 0)


def test_a_slot_that_two_groups_compute_at_once_is_computed_once_too_often():
    run = Timeline().start(0, 0, 1).attempt(1, 1, 0, [0, 1]).attempt(1, 1, 1, [1, 2, 3])
    assert slots_recomputed(collect_attempts(run.events)) == 1


def test_a_joiner_in_a_retry_does_not_make_a_third_attempt():
    run = Timeline().start(0, 0).attempt(1, 1, 0, [0, 1], committed=False).start(1.2, 1)
    run.attempt(1.9, 1, 1, [], took_s=0.6).attempt(2.0, 1, 0, [2, 3], held=[0, 1], took_s=1.0)
    assert [a.members for a in collect_attempts(run.events)] == [{0}, {0, 1}]
