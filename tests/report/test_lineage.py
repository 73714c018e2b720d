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
    assert [c.continued for c in history.final] == [False, True, True]


def test_after_all_groups_died_the_steps_since_the_checkpoint_count_as_committed_again():
    run = Timeline().start(0, 0, 1)
    for step in (1, 2, 3, 4):
        run.commit(step, step, [0, 1])
    run.start(10, 0, 1, step=3, source="disk")
    run.commit(11, 3, [0, 1]).commit(12, 4, [0, 1])
    history = trace(run.events)
    assert [(c.step, c.t) for c in history.final] == [(1, 1), (2, 2), (3, 11), (4, 12)]
    assert [c.continued for c in history.final] == [False, True, False, True]
    assert not any(c.repeated for c in history.commits)


def test_a_run_that_went_back_is_in_the_state_it_went_back_to_even_before_it_catches_up():
    run = Timeline().start(0, 0, 1, 2)
    for step in range(1, 9):
        run.commit(step, step, [0, 1, 2])
    run.start(20, 0, step=3, source="disk").start(20, 1, step=1, source="fresh").heal(20.5, 1, source=0)
    run.commit(21, 3, [0, 1], by=[1]).commit(21.1, 3, [0, 1], by=[0])
    assert final(run) == [(1, 1), (2, 2), (3, 21)]


def test_a_start_from_nothing_makes_all_earlier_steps_void():
    run = Timeline().start(0, 0).commit(1, 1, [0]).commit(2, 2, [0])
    run.start(5, 0).commit(6, 1, [0])
    assert final(run) == [(1, 6)]


def test_a_commit_that_died_with_its_only_group_is_not_in_the_final_state():
    run = Timeline().start(0, 0, 1, 2).commit(1, 1, [0, 1, 2])
    run.commit(2, 2, [0, 1, 2], by=[2])  # and dies
    run.commit(3, 2, [0, 1]).commit(4, 3, [0, 1])
    history = trace(run.events)
    assert [(c.step, c.t) for c in history.final] == [(1, 1), (2, 3), (3, 4)]
    assert len(history.commits) == 4


def test_of_two_commits_of_a_step_the_one_that_is_named_as_parent_counts():
    run = Timeline().start(0, 0, 1, 2).commit(1, 1, [0, 1, 2])
    run.commit(2, 2, [0, 1, 2], by=[2]).commit(2.5, 2, [0, 1])
    run.start(3, 3).heal(3.5, 3, source=2).commit(4, 3, [2, 3], by=[3])
    assert final(run) == [(1, 1), (2, 2), (3, 4)]


def test_a_joiner_that_started_after_a_commit_does_not_belong_to_it():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[0])
    run.start(5, 0, 1, step=2, source="disk").commit(6, 2, [0, 1], by=[1]).commit(6.1, 2, [0, 1], by=[0])
    history = trace(run.events)
    assert [(c.t, c.emitters) for c in history.commits if c.step == 2] == [(2, {0}), (6, {0, 1})]


def test_a_group_that_logs_an_old_commit_late_does_not_move_the_tip():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[0])
    run.commit(3, 3, [0]).commit(4, 4, [0])
    run.commit(9, 2, [0, 1], by=[1])  # it followed, or hung in between
    assert final(run) == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_host_whose_clock_is_behind_breaks_no_chain():
    run = Timeline().start(-9, 0, 1).commit(1, 1, [0, 1], by=[0])
    run.heal(-5, 1, source=0).commit(-4, 2, [1]).commit(-3, 3, [1])
    run.heal(3, 0, source=1).commit(4, 4, [0])
    assert final(run) == [(1, 1), (2, -4), (3, -3), (4, 4)]


def test_the_tip_is_the_highest_step_behind_the_last_new_commit_whatever_the_clocks_say():
    run = Timeline().start(-9, 0, 1).commit(1, 1, [0, 1], by=[0])
    run.heal(-5, 1, source=0).commit(-4, 2, [1])
    assert final(run) == [(1, 1), (2, -4)]


def test_the_lineage_of_a_run_continued_elsewhere_begins_where_the_log_begins():
    run = Timeline().start(0, 0, step=501, source="disk").commit(1, 501, [0]).commit(2, 502, [0])
    assert final(run) == [(501, 1), (502, 2)]


def test_a_commit_lost_from_the_log_leaves_a_gap_but_breaks_no_chain():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1])
    run.start(2, 0, 1, history="of a commit that nobody could log").commit(3, 3, [0, 1])
    assert final(run) == [(1, 1), (3, 3)]


def test_histories_that_name_each_other_end():
    run = Timeline().start(0, 0).commit(1, 1, [0], parent="a")
    for event in run.logged:
        if event["kind"] == "commit":
            event["history"] = "a"
    assert final(run) == [(1, 1)]


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


def test_a_step_that_a_group_puts_on_another_state_than_it_says_is_repeated():
    run = Timeline().start(0, 0).commit(1, 1, [0])
    first = run.held[0]
    run.commit(2, 2, [0]).commit(3, 2, [0, 9], by=[0], owners=[0, 0], parent=first).commit(4, 3, [0])
    history = trace(run.events)
    assert [(c.step, c.t, len(c.repeated)) for c in history.final] == [(1, 1, 0), (2, 3, 2), (3, 4, 0)]
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).heal(2, 1, 0, history="another").commit(3, 2, [0, 1])
    run.logged[-1] |= {"history": run.logged[-2]["history"], "parent": run.logged[-2]["parent"]}
    assert trace(run.events).final[-1].repeated == {0, 1, 2, 3}


def test_only_rank_0_speaks_for_its_group_and_broken_events_are_passed_over():
    run = Timeline().start(0, 0).commit(1, 1, [0])
    names = {"history": "b", "parent": run.held[0]}
    run.add(1, "commit", 0, 1, rank=1, owners=[0, 0, 0, 0], groups=[0], **names)
    run.add(1.5, "commit", 0, None, **names).add(1.6, "commit", None, 2, **names).add(1.7, "commit", 0, 2, **names)
    history = trace(run.events)
    assert [(c.step, c.owners) for c in history.commits] == [(1, (0, 0, 0, 0)), (2, ())]


def test_no_events_no_history():
    assert trace([]).final == []
