"""What the account makes of logs that the simulated runs do not write: from event sequences with a known story."""

import pytest

from everstep.report.account import read
from everstep.report.faults import Fault, costs_s
from everstep.report.score import figures_of
from timeline import Timeline


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
