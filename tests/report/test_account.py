"""What the account makes of logs that the simulated runs do not write: from event sequences with a known story."""

import pytest

from everstep.report.account import read
from everstep.report.faults import Fault, costs_s
from everstep.report.score import figures_of, rows_of, step_s_of
from timeline import Timeline


def attempts(run):
    found = read(run.events).attempts
    return found.count, found.thrown_away, found.slots_recomputed


def refused():
    run = Timeline().start(0, 0, 1).add(0.9, "slot_refused", 0, 1, slot=1, reason="a gradient is not finite")
    run.attempt(1, 1, 0, [0, 1], committed=False).attempt(1, 1, 1, [2, 3], committed=False)
    return run.attempt(2, 1, 0, [0, 1], recomputed=[0, 1], took_s=0.5).attempt(2, 1, 1, [], held=[2, 3], took_s=0.5)


def healed():
    run = Timeline().start(0, 0, 1).attempt(1, 1, 0, [0, 1], committed=False)
    run.start(2, 0).attempt(3, 1, 0, [0, 1], took_s=0.5, committed=False)
    return run.heal(3.5, 0, source=1, step=1).attempt(4, 1, 0, [0, 1], took_s=0.4)


@pytest.mark.parametrize(
    ("run", "count", "thrown_away", "recomputed"),
    [
        (Timeline().start(0, 0).attempt(1, 1, 0, [0, 1], committed=False).attempt(2, 1, 0, [0, 1]), 2, 1, 2),
        (refused(), 2, 0, 2),
        (refused().attempt(3, 2, 0, [0], committed=False).attempt(4, 2, 0, [0], recomputed=[0], took_s=0.5), 4, 1, 3),
        (healed(), 3, 0, 4),
        (Timeline().start(0, 0).attempt(1, 1, 0, [], committed=False).attempt(2, 1, 0, range(4)), 2, 0, 0),
        (Timeline().start(0, 0, 1).attempt(1, 1, 0, [0, 1]).attempt(1, 1, 1, [1, 2, 3]), 1, 0, 1),
    ],
    ids=[
        "a survivor computes again what it held and does not say so",
        "a group of which a slot was refused holds nothing", "but holds what it computes in the next step",
        "a group that started again or healed holds nothing",
        "an attempt that ended before computing", "a slot that two groups compute at once",
    ],
)  # fmt: skip
def test_attempts_and_what_they_threw_away(run, count, thrown_away, recomputed):
    assert attempts(run) == (count, thrown_away, recomputed)


def final(run):
    return [(commit.step, commit.t) for commit in read(run.events).lineage.final()]


def told_late():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).commit(2, 2, [0, 1], by=[0])
    return run.commit(3, 3, [0]).commit(4, 4, [0]).commit(9, 2, [0, 1], by=[1])


def behind():
    run = Timeline().start(-9, 0, 1).commit(1, 1, [0, 1], by=[0])
    return run.heal(-5, 1, source=0, step=1).commit(-4, 2, [1])


def gap():
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1])
    return run.start(2, 0, 1, history="of a commit that nobody could log").commit(3, 3, [0, 1])


def circle():
    run = Timeline().start(0, 0).commit(1, 1, [0], parent="a")
    run.logged[-1]["history"] = "a"
    return run


@pytest.mark.parametrize(
    ("run", "steps"),
    [
        (told_late(), [(1, 1), (2, 2), (3, 3), (4, 4)]),
        (behind(), [(1, 1), (2, -4)]),
        (behind().commit(-3, 3, [1]).heal(3, 0, 1, step=3).commit(4, 4, [0]), [(1, 1), (2, -4), (3, -3), (4, 4)]),
        (Timeline().start(0, 0, step=501, source="disk").commit(1, 501, [0]).commit(2, 502, [0]), [(501, 1), (502, 2)]),
        (gap(), [(1, 1), (3, 3)]),
        (circle(), [(1, 1)]),
        (Timeline(), []),
    ],
    ids=[
        "an old commit that is told late", "the newest step, of a host whose clock is behind", "a chain over that host",
        "a run that was continued elsewhere", "a commit that the log lost", "histories that name each other", "none",
    ],
)  # fmt: skip
def test_which_commits_the_final_state_contains(run, steps):
    assert final(run) == steps


def test_a_step_that_a_group_puts_on_another_state_than_it_says_is_repeated():
    run = Timeline().start(0, 0).commit(1, 1, [0])
    first = run.held[0]
    run.commit(2, 2, [0]).commit(3, 2, [0, 9], by=[0], owners=[0, 0], parent=first).commit(4, 3, [0])
    found = read(run.events).lineage.final()
    assert [(c.step, c.t, len(c.repeated)) for c in found] == [(1, 1, 0), (2, 3, 2), (3, 4, 0)]
    run = Timeline().start(0, 0, 1).commit(1, 1, [0, 1]).heal(2, 1, 0, step=1, history="another").commit(3, 2, [0, 1])
    run.logged[-1] |= {"history": run.logged[-2]["history"], "parent": run.logged[-2]["parent"]}
    assert read(run.events).lineage.final()[-1].repeated == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("t", "commits", "stall", "delay"),
    [
        (10.5, [9, 10, 13, 14], 1.5, 2.0),
        (10.5, [10, 11, 12], 0.0, 0.0),
        (10.9, [10, 12, 13], 0.1, 1.0),  # late in the step
        (10.9, [10, 11, 14, 15], 0.0, 2.0),  # noticed in the next one
        (0.5, [1, 2], None, None),
        (2.5, [1, 2], None, None),
    ],
)
def test_a_delay_shows_what_a_late_fault_hides_from_the_stall(t, commits, stall, delay):
    fault = Fault(t, "kill-group", (1,))
    assert costs_s(fault, commits, 1.0) == (None if stall is None else pytest.approx((stall, delay)))


def both():
    return Timeline().start(0, 0, 1).commit(1, 1, [0, 1])


@pytest.mark.parametrize(
    ("run", "rejoin"),
    [
        (both().fault(1.5, "kill-worker", 1).start(4, 1).heal(4.5, 1, 0, step=1)
         .commit(5, 2, [0, 1], owners=[0, 0, 0, 0]).commit(6, 3, [0, 1]), 4.5),
        (both().fault(1.5, "kill-worker", 1).start(3, 1).commit(4, 2, [0, 1], owners=[0]), 2.5),
        (both().fault(1.5, "kill-worker", 1).commit(1.6, 2, [0, 1]).start(4, 1).commit(5, 3, [0, 1]), 3.5),
        (both().fault(2, "slow-network", 1).commit(3, 2, [0, 1]).fault(4, "kill-worker", 1).start(6, 1)
         .commit(7, 3, [0, 1]), None),
        (both().fault(2, "hang", 1).start(6, 1).commit(7, 2, [0, 1]), 5),
    ],
    ids=[
        "back when it computes slots, not when it joins", "with more groups than slots, when it takes part",
        "what the dying process still logged is none",
        "a fault without a restart does not borrow that of a kill", "a hung group",
    ],
)  # fmt: skip
def test_how_long_a_group_was_away(run, rejoin):
    assert rows_of(read(run.events))[0]["rejoin_s"] == (None if rejoin is None else pytest.approx(rejoin))


def life(*story):
    """("up" | "died", t, group), ("well", t, group) for one that ended well, (fault, t, group or groups)."""
    run = Timeline()
    for what, t, group in story:
        if what == "up":
            run.add(t, "workers_started", group, role="agent", incarnation=0, pids=[1])
        elif what in ("died", "well"):
            codes = {"0": 0, "1": -9 * (what == "died")}
            run.add(t, "workers_died", group, role="agent", reason="", exitcodes=codes)
        else:
            run.fault(t, what, group)
    return run


@pytest.mark.parametrize(
    ("run", "faults"),
    [
        (life(("up", 0, 1), ("kill-worker", 1, 1), ("died", 1.1, 1), ("up", 2, 1), ("died", 5, 1)),
         [("kill-worker", (1,)), ("died", (1,))]),
        (life(("up", 0, 1), ("died", 5, 1), ("died", 5.1, 1)), [("died", (1,))]),
        (life(("up", 0, 1), ("up", 0, 2), ("kill-worker", 1, 1), ("died", 1.2, 2)),
         [("kill-worker", (1,)), ("died", (2,))]),
        (life(("up", 0, 1), ("up", 0, 2), ("power-cut", 1, None), ("died", 1.2, 2), ("died", 1.2, 1)),
         [("power-cut", ())]),
        (life(("up", 0, 1), ("up", 0, 2), ("kill-all", 1, [1, 2]), ("died", 1.2, 2), ("died", 1.2, 1)),
         [("kill-all", (1, 2))]),
        (life(("up", 0, 1), ("well", 5, 1)), []),
    ],
)  # fmt: skip
def test_a_death_that_no_fault_explains_is_a_fault_of_its_own(run, faults):
    assert [(fault.name, fault.groups) for fault in read(run.events).faults.found] == faults


def test_a_healthy_step_has_no_fault_one_attempt_and_all_groups():
    run = Timeline().start(0, 0, 1)
    for step, t in enumerate([10, 11, 12.2, 20, 21, 23, 24], start=1):
        run.commit(t, step, [0, 1] if step not in (5, 6) else [0])
    run.fault(12.5, "kill-worker", 1)
    assert step_s_of(read(run.events)) == pytest.approx(1.0), "of 1, 1.2 and 1; not 7.8 (fault), 1 and 2 (one group)"
    run.attempt(10.5, 2, 0, [0], took_s=0.4, committed=False).attempt(11, 2, 0, [1], took_s=0.4)
    assert step_s_of(read(run.events)) == pytest.approx(1.1)


def weaker():
    run = Timeline().add(0, "run_started", role="supervisor", groups=3).start(0, 0)
    for step in range(1, 5):
        run.commit(step * 2, step, [0])
    return run


@pytest.mark.parametrize(
    ("run", "step_s"),
    [
        (weaker(), 2.0),
        (Timeline().start(0, 0).commit(1, 1, [0]).commit(2, 2, [0]).start(50, 0, step=3).commit(60, 3, [0]), 1.0),
        (Timeline().start(0, 0).commit(9, 1, [0], took_s=1.5), 1.5),
        (Timeline().start(0, 0), None),
    ],
    ids=["no step at full strength", "the pause of a restart is no step", "one commit", "none"],
)
def test_what_a_healthy_step_is_where_there_is_no_better_one(run, step_s):
    assert step_s_of(read(run.events)) == step_s


def test_a_run_started_again_with_other_groups_is_one_account():
    run = Timeline().add(0, "run_started", role="supervisor", groups=2, steps=4).start(0, 0, 1)
    run.commit(1, 1, [0, 1]).commit(2, 2, [0, 1])
    run.add(3, "run_ended", role="supervisor", status="stopped", reason="signal")
    run.add(1000, "run_started", role="supervisor", groups=1, steps=4).start(1001, 0, step=3, source="disk")
    run.fault(1001.5, "kill-worker", 0).start(1001.7, 0, step=3, source="disk")
    run.commit(1002, 3, [0]).commit(1003, 4, [0])
    run.add(1003, "run_ended", role="supervisor", status="done", reason="")
    figures = figures_of(read(run.events))
    assert (figures["sessions"], figures["wall_s"], figures["training_s"]) == (2, 6, 5)
    assert (figures["steps"], figures["status"], figures["groups"]) == (4, "done", 1)
    assert figures["stalls_unmeasured"] == 1, "nothing had been committed in the session that it hit"
    assert figures["groups_mean"] == pytest.approx(1.5)


def test_a_group_that_left_does_nothing_any_more_and_one_that_is_down_starts_again():
    run = both().add(1.5, "left", 0).add(2, "workers_died", 1, role="agent", reason="", exitcodes={"0": -9})
    times = figures_of(read(run.add(9, "run_ended", role="supervisor", status="failed", reason="").events))
    assert [times["time_by_group"][group]["restarting"] for group in ("0", "1")] == [0.0, 7.0]
