"""Which commits the final state contains, from event sequences with a known story."""

from everstep.report.lineage import trace
from timeline import Timeline


def final(timeline):
    return [(commit.step, commit.t) for commit in trace(timeline.events).final]


def test_all_groups_commits_of_one_vote_are_one_commit():
    run = Timeline().start(0, 0, 1, 2)
    for step in (1, 2, 3):
        run.commit(step, step, [0, 1, 2])
    history = trace(run.events)
    assert [(c.step, c.emitters) for c in history.commits] == [(k, {0, 1, 2}) for k in (1, 2, 3)]
    assert history.final == history.commits


def test_after_all_groups_died_the_steps_since_the_checkpoint_count_as_committed_again():
    run = Timeline().start(0, 0, 1)
    for step in (1, 2, 3, 4):
        run.commit(step, step, [0, 1])
    run.add(2.5, "checkpoint_saved", 0, 2, path="step-2")
    run.start(10, 0, 1, step=3, source="disk")
    run.commit(11, 3, [0, 1]).commit(12, 4, [0, 1])
    assert final(run) == [(1, 1), (2, 2), (3, 11), (4, 12)]


def test_a_run_that_went_back_is_in_the_state_it_went_back_to_even_before_it_catches_up():
    run = Timeline().start(0, 0, 1, 2)
    for step in range(1, 9):
        run.commit(step, step, [0, 1, 2])
    run.add(2.5, "checkpoint_saved", 0, 2, path="step-2")
    run.start(20, 0, step=3, source="disk").start(20, 1, step=3, source="disk")
    run.commit(21, 3, [0, 1])
    assert final(run) == [(1, 1), (2, 2), (3, 21)]


def test_a_start_from_nothing_makes_all_earlier_steps_void():
    run = Timeline().start(0, 0).commit(1, 1, [0]).commit(2, 2, [0])
    run.start(5, 0).commit(6, 1, [0])
    assert final(run) == [(1, 6)]


def test_when_everybody_reloads_and_one_heals_from_another_it_is_still_a_way_back():
    run = Timeline().start(0, 0, 1)
    for step in range(1, 6):
        run.commit(step, step, [0, 1])
    run.add(2.5, "checkpoint_saved", 0, 2, path="step-2")
    run.start(20, 0, step=3, source="disk").start(20, 1, step=1, source="fresh").heal(20.5, 1, source=0)
    run.commit(21, 3, [0, 1], by=[1]).commit(21.1, 3, [0, 1], by=[0])
    assert final(run) == [(1, 1), (2, 2), (3, 21)]


def test_a_way_back_shows_even_when_only_the_group_that_healed_from_the_reloaded_one_commits():
    run = Timeline().start(0, 0, 1)
    for step in range(1, 6):
        run.commit(step, step, [0, 1])
    run.add(2.5, "checkpoint_saved", 0, 2, path="step-2")
    run.start(20, 0, step=3, source="disk").start(20, 1, step=1, source="fresh").heal(20.5, 1, source=0)
    run.commit(21, 3, [0], by=[1])
    assert final(run) == [(1, 1), (2, 2), (3, 21)]


def test_a_state_that_was_healed_but_not_committed_on_passes_on_with_the_next_heal():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[1])
    run.heal(2.5, 0, source=1).commit(3, 3, [1], by=[1])  # both commits died with group 1, but 0 has the first
    run.commit(3.5, 2, [2], by=[2])  # a stray that nobody builds on
    run.start(4, 1).heal(4.5, 1, source=0).commit(5, 3, [0], by=[1])
    assert final(run) == [(1, 1), (2, 2), (3, 5)]


def test_a_commit_that_died_with_its_only_group_is_not_in_the_final_state():
    run = Timeline().start(0, 0, 1, 2).commit(1, 1, [0, 1, 2])
    run.commit(2, 2, [0, 1, 2], by=[2])  # and dies
    run.commit(3, 2, [0, 1]).commit(4, 3, [0, 1])
    history = trace(run.events)
    assert [(c.step, c.t) for c in history.final] == [(1, 1), (2, 3), (3, 4)]
    assert len(history.commits) == 4


def test_a_commit_of_one_group_stays_when_the_others_heal_from_it():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1])
    run.commit(2, 2, [0, 1], by=[1])
    run.heal(2.5, 0, source=1).commit(3, 3, [0, 1])
    assert final(run) == [(1, 1), (2, 2), (3, 3)]


def test_of_two_commits_of_a_step_the_healing_groups_source_decides():
    run = Timeline().start(0, 0, 1, 2).commit(1, 1, [0, 1, 2])
    run.commit(2, 2, [0, 1, 2], by=[2]).commit(2.5, 2, [0, 1])
    run.start(3, 3, step=1).heal(3.5, 3, source=2).commit(4, 3, [2, 3], by=[3])
    assert final(run) == [(1, 1), (2, 2), (3, 4)]


def test_the_group_that_saved_the_checkpoint_decides_which_commit_was_loaded():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1])
    run.commit(2, 2, [0, 1], by=[1]).add(2.1, "checkpoint_saved", 1, 2, path="step-2")
    run.commit(2.5, 2, [0], by=[0])
    run.start(5, 0, 1, step=3, source="disk").commit(6, 3, [0, 1])
    assert final(run) == [(1, 1), (2, 2), (3, 6)]


def test_a_joiner_that_started_after_a_commit_cannot_belong_to_it():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[0])
    run.start(5, 0, 1, step=2, source="disk").commit(6, 2, [0, 1], by=[1]).commit(6.1, 2, [0, 1], by=[0])
    history = trace(run.events)
    assert [(c.t, c.emitters) for c in history.commits if c.step == 2] == [(2, {0}), (6, {0, 1})]


def test_a_living_group_that_heals_and_says_so_stays_in_the_vote_it_heals_for():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[0])
    run.commit(3, 3, [0, 1], by=[0]).heal(3.01, 1, source=0, step=3)
    run.add(3.02, "training_started", 1, 3, source="peer", slots=4).commit(3.03, 3, [0, 1], by=[1])
    history = trace(run.events)
    assert [(c.step, c.emitters) for c in history.final] == [(1, {0, 1}), (2, {0}), (3, {0, 1})]


def test_a_group_that_logs_an_old_commit_late_does_not_move_the_tip():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[0])
    run.commit(3, 3, [0]).commit(4, 4, [0])
    run.commit(9, 2, [0, 1], by=[1])  # it hung in between
    assert final(run) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_the_lineage_of_a_run_continued_elsewhere_begins_where_the_log_begins():
    run = Timeline().start(0, 0, step=501, source="disk").commit(1, 501, [0]).commit(2, 502, [0])
    assert final(run) == [(501, 1), (502, 2)]


def test_a_heal_that_is_not_in_the_log_is_bridged_by_the_newest_commit_of_the_step_before():
    run = Timeline().start(0, 0, 1)
    run.commit(1, 1, [0, 1]).commit(2, 2, [0]).commit(3, 3, [0]).commit(4, 4, [0, 1], by=[1])
    assert final(run) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_group_that_went_on_knows_better_than_one_that_started_where_their_state_came_from():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0]).commit(2.5, 2, [9])
    run.start(3, 1).commit(4, 3, [0], by=[1]).commit(4.1, 3, [0], by=[0])
    assert final(run) == [(1, 1), (2, 2), (3, 4)]


def test_a_commit_lost_from_the_log_leaves_a_gap_but_breaks_no_chain():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(3, 3, [0, 1])
    run.start(4, 1, step=1).heal(4.5, 1, source=0).commit(5, 5, [0, 1], by=[1])
    assert final(run) == [(1, 1), (3, 3), (5, 5)]


def test_a_missing_slot_is_lost():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1], owners=[0, -1, 0, -1])
    assert trace(run.events).final[0].lost == {1, 3}


def test_a_slot_that_two_groups_claim_is_repeated():
    run = Timeline().start(0, 0, 1)
    run.commit(1, 1, [0, 1], by=[0], owners=[0, 0, 1, 1]).commit(1, 1, [0, 1], by=[1], owners=[0, 1, 1, 1])
    assert trace(run.events).final[0].repeated == {1}


def test_a_failed_coverage_check_without_a_missing_slot_makes_the_whole_step_repeated():
    run = Timeline().start(0, 0).commit(1, 1, [0], coverage_ok=False)
    run.commit(2, 2, [0], owners=[0, 0, 0, -1], coverage_ok=False)
    first, second = trace(run.events).final
    assert (first.lost, first.repeated) == (set(), {0, 1, 2, 3})
    assert (second.lost, second.repeated) == ({3}, set())


def test_a_step_committed_twice_by_one_process_is_repeated():
    run = Timeline().start(0, 0).commit(1, 1, [0]).commit(2, 2, [0]).commit(3, 2, [0]).commit(4, 3, [0])
    history = trace(run.events)
    assert [(c.step, len(c.repeated)) for c in history.final] == [(1, 0), (2, 0), (2, 4), (3, 0)]


def test_only_rank_0_speaks_for_its_group_and_broken_events_are_passed_over():
    run = Timeline().start(0, 0).commit(1, 1, [0])
    run.add(1, "commit", 0, 1, rank=1, owners=[0, 0, 0, 0], groups=[0])
    run.add(1.5, "commit", 0, None).add(1.6, "commit", None, 2).add(1.7, "commit", 0, 2)
    history = trace(run.events)
    assert [(c.step, c.owners) for c in history.commits] == [(1, (0, 0, 0, 0)), (2, ())]


def test_no_events_no_history():
    assert trace([]).final == []
