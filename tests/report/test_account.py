"""Tests of the account: event sequences with a known story, and the figures that follow from them."""

import tracemalloc

import pytest

from everstep.report.account import read
from everstep.report.faults import Pace
from everstep.report.groups import STATES
from everstep.report.score import figures_of, loss_by_step
from timeline import Timeline


def first_commit():
    """Return the log of two groups with slots of four samples that have committed step 1."""
    run = Timeline().add(0, "run_started", role="supervisor", groups=2, global_batch_size=16).start(1, 0, 1)
    return run.attempt(2, 1, 0, [0, 2]).attempt(2.01, 1, 1, [1, 3]).commit(2.1, 1, [0, 1])


def add_kill(run, t, *groups):
    run.fault(t, "kill-group", [*groups])
    for group in groups:
        run.add(t + 0.01, "workers_died", group, role="agent", reason="killed", exitcodes={"0": -9})
    return run


STORIES = {
    "a group that dies with a commit that no other has": (
        lambda run: add_kill(run.commit(4, 2, [0, 1], by=[0], loss=9.0), 4.1, 0)
        .attempt(6, 2, 1, [0, 2]).commit(6.1, 2, [1]).start(7, 0).heal(7.5, 0, 1, 3)
        .attempt(9, 3, 0, [0, 2]).attempt(9, 3, 1, [1, 3]).commit(9.1, 3, [0, 1]),
        [1.0, 2.0, 3.0], {"commits_dropped": 1, "kills": 1, "attempts": 3, "rejoins": [5.0]},
    ),
    "all die and load an older state": (
        lambda run: add_kill(
            run.attempt(4, 2, 0, [0, 2]).attempt(4, 2, 1, [1, 3]).commit(4.1, 2, [0, 1], loss=9.0), 5, 0, 1
        ).start(8, 0, 1, step=2, source="disk")
        .attempt(10, 2, 0, [0, 2]).attempt(10, 2, 1, [1, 3]).commit(10.1, 2, [0, 1]),
        [1.0, 2.0], {"commits_dropped": 1, "slots_recomputed": 4, "attempts": 3, "rejoins": [5.1]},
    ),
    "a group that is back has its part when it owns a slot, or there are fewer than groups": (
        lambda run: add_kill(add_kill(run, 3, 0).commit(4, 2, [1]), 5, 0).start(6, 0).heal(6.5, 0, 1, 3)
        .commit(7, 3, [0, 1], owners=[1, 1, 1, 1]).commit(8, 4, [0, 1], owners=[1]),
        [1.0, 2.0, 3.0, 4.0], {"kills": 2, "attempts": 1, "rejoins": [5.0, 3.0]},
    ),
    "a group that misses a commit and heals": (
        lambda run: run.commit(4, 2, [0, 1], by=[1]).heal(4.5, 0, 1, 3)
        .attempt(6, 3, 0, [0, 2]).attempt(6, 3, 1, [1, 3]).commit(6.1, 3, [0, 1]),
        [1.0, 2.0, 3.0], {"attempts": 2, "healing_s": 0.1},
    ),
    "a slot in nobody's sum": (
        lambda run: run.commit(4, 2, [0, 1], owners=[0, 1, -1, 1], coverage_ok=False),
        [1.0, 2.0], {"samples_lost": 4, "samples": 28},
    ),
    "two groups that do not agree whose a slot is": (
        lambda run: run.commit(4, 2, [0, 1], by=[0]).commit(4, 2, [0, 1], by=[1], owners=[0, 1, 0, 0]),
        [1.0, 2.0], {"samples_repeated": 4},
    ),
    "an attempt that fails, after which all is held": (
        lambda run: run.attempt(4, 2, 0, [0, 2], committed=False).attempt(4, 2, 1, [1, 3], committed=False)
        .attempt(5, 2, 0, took_s=0.1).attempt(5, 2, 1, took_s=0.1).commit(5.1, 2, [0, 1]),
        [1.0, 2.0], {"attempts": 3, "stalled_s": 3.8},
    ),
    "and one after which groups have lost what they held": (
        lambda run: run.attempt(4, 2, 0, [0, 2], committed=False).attempt(4, 2, 1, [1, 3], committed=False)
        .attempt(6, 2, 0, [0, 2], [0, 2]).attempt(6, 2, 1, [1, 3], [3]).commit(6.1, 2, [0, 1]),
        [1.0, 2.0], {"attempts": 3, "attempts_thrown_away": 1, "slots_recomputed": 4, "recomputed_s": 3.0},
    ),
}  # fmt: skip
"""Name -> what happens after `begun`, the losses of the steps of the final state, and figures; other counts are 0."""


@pytest.mark.parametrize("story", STORIES)
def test_the_figures_are_those_of_the_story(story):
    happens, losses, expected = STORIES[story]
    account = read(happens(first_commit()).events)
    figures = figures_of(account)
    assert [*loss_by_step(account.lineage.final()).items()] == [*enumerate(losses, 1)]
    counts = ("commits_dropped", "attempts_thrown_away", "slots_recomputed", "samples_lost", "samples_repeated")
    expected = {"rejoins": []} | dict.fromkeys(counts, 0) | expected
    rows = [fault.row(Pace(account.lineage)) for fault in account.faults.found]
    assert [row["rejoin_s"] for row in rows] == pytest.approx(expected.pop("rejoins"))
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    for row in rows:
        assert row["stall_s"] is None or 0 <= row["stall_s"] <= row["delay_s"]
    for spent in figures["time_by_group"].values():
        assert set(spent) == set(STATES)
        assert sum(spent.values()) == pytest.approx(figures["wall_s"]), "no moment is left out or told twice"
    assert figures["goodput"] + sum(figures["badput"].values()) == pytest.approx(1.0)


def test_steps_that_a_full_disk_kept_out_of_the_log_are_unseen_and_not_repeated():
    run, names = first_commit(), ("steps_unseen", "samples_repeated")
    for step, repeated in ((4, 0), (5, 16)):
        figures = figures_of(read(run.commit(2.0 * step, step, [0, 1], parent=f"not that of {step}").events))
        assert [figures[name] for name in names] == [2, repeated], "of step 4 nothing is known before it"
    for source, unseen in (("disk", 0), ("peer", 4)):
        run = Timeline().start(1, 0, step=5, source=source).commit(2, 5, [0])
        assert figures_of(read(run.events))["steps_unseen"] == unseen, "a peer had made the steps before in this run"


def test_a_step_takes_less_than_a_kilobyte_however_many_groups_there_are():
    run = Timeline()
    for step in range(1, 1001):
        run.commit(1.0 * step, step, [*range(200)], owners=[step % 7] * 200, by=[0, 1])
    events = run.events
    tracemalloc.start()
    commits = read(events).lineage.commits
    assert tracemalloc.get_traced_memory()[0] / len(commits) < 1000
    tracemalloc.stop()


def log_of(*story):
    """Return the log of ("up" | "died", t, group), ("well", t, group) for a good end, (fault, t, group or groups)."""
    run = Timeline()
    for what, t, group in story:
        if what == "up":
            run.add(t, "workers_started", group, role="agent", incarnation=0, pids=[1])
        elif what in ("died", "well"):
            run.add(t, "workers_died", group, role="agent", reason="", exitcodes={"0": 0, "1": -9 * (what == "died")})
        else:
            run.fault(t, what, group)
    return run


@pytest.mark.parametrize(("run", "faults", "deaths"), [
    (log_of(("up", 0, 1), ("kill-worker", 1, 1), ("died", 1.1, 1), ("up", 2, 1), ("died", 5, 1)),
     [("kill-worker", (1,)), ("died", (1,))], 2),
    (log_of(("up", 0, 1), ("died", 5, 1), ("died", 5.1, 1)), [("died", (1,))], 1),
    (log_of(("up", 0, 1), ("up", 0, 2), ("kill-worker", 1, 1), ("died", 1.2, 2)),
     [("kill-worker", (1,)), ("died", (2,))], 1),
    (log_of(("up", 0, 1), ("up", 0, 2), ("power-cut", 1, None), ("died", 1.2, 2), ("died", 1.2, 1)),
     [("power-cut", ())], 2),
    (log_of(("up", 0, 1), ("up", 0, 2), ("kill-all", 1, [1, 2]), ("died", 1.2, 2), ("died", 1.2, 1)),
     [("kill-all", (1, 2))], 2),
    (log_of(("up", 0, 1), ("stop-worker", 1, 1), ("died", 5, 1)).commit(3, 1, [1]),
     [("stop-worker", (1,)), ("died", (1,))], 1),
    (log_of(("up", 0, 1), ("well", 5, 1)), [], 1),
])  # fmt: skip
def test_a_death_that_no_fault_explains_is_a_fault_of_its_own(run, faults, deaths):
    found = read(run.events).faults
    assert [(fault.name, fault.groups) for fault in found.found] == faults
    assert found.deaths == deaths, "each node of a group tells of the same one"


def test_a_run_started_again_with_other_groups_is_one_account():
    run = Timeline().add(0, "run_started", role="supervisor", groups=2, steps=4).start(0, 0, 1)
    run.commit(1, 1, [0, 1]).commit(2, 2, [0, 1]).fault(2.3, "kill-group", 0).add(2.5, "scaled", role="scale", count=3)
    account = read(run.events)
    assert (figures_of(account)["groups"], account.lineage.final()) == (3, account.lineage.commits)
    assert account.lineage.final() is account.lineage.final(), "a page needs it twice"
    account.take(Timeline().commit(2.6, 3, [0, 1], parent=account.newest.history).logged[0])
    assert len(account.lineage.final()) == 3, "with what came since"
    run.add(3, "run_ended", role="supervisor", status="stopped", reason="signal")
    run.add(1000, "run_started", role="supervisor", groups=1, steps=4).start(1001, 0, step=3, source="disk")
    run.fault(1001.5, "kill-worker", 0).start(1001.7, 0, step=3, source="disk")
    run.commit(1002, 3, [0]).commit(1003, 4, [0])
    run.add(1003, "run_ended", role="supervisor", status="done", reason="")
    figures = figures_of(read(run.events))
    assert [figures[name] for name in ("sessions", "wall_s", "training_s", "down_s")] == [2, 6, 5, 997]
    assert (figures["steps"], figures["status"], figures["groups"]) == (4, "done", 1)
    assert figures["stalls_unmeasured"] == 2, "nothing had been committed in the session that it hit, or was after it"
    assert (figures["rejoin_s_max"], figures["rejoins_open"]) == (0.5, 1), "not from one session to the next"
    assert figures["groups_mean"] == pytest.approx(1.5)


def test_time_is_that_of_the_groups_which_a_start_had_and_of_more_from_when_they_come():
    run = Timeline().add(0, "run_started", role="supervisor", groups=1, steps=20).start(0, 0)
    run.commit(10, 1, [0]).start(11, 1, step=2).commit(12, 2, [0, 1]).add(20, "training_done", 0, 2)
    run.add(20, "training_done", 1, 2).add(25, "agent_ended", 0, role="agent", status="stopped", reason="asked to")
    run.add(25, "run_ended", role="supervisor", status="stopped", reason="signal")
    run.add(100, "run_started", role="supervisor", groups=2, steps=20).start(100, 0, 1, step=3, source="disk")
    run.commit(110, 3, [0, 1]).add(110, "run_ended", role="supervisor", status="stopped", reason="signal")
    figures = figures_of(read(run.events))
    spent = {state: seconds for state, seconds in figures["time_by_group"]["1"].items() if seconds}
    assert spent == {"productive": 9 + 10}, "it did not start up before it came"
    assert figures["restarting_s"] == 0, "nobody died"
    assert figures["badput"]["idle"] == 0, "only one group was there at first"
    run = Timeline().add(0, "run_started", role="supervisor", groups=2, steps=2).start(0, 0, 1).commit(10, 1, [0, 1])
    run.add(10, "left", 1, 1).add(10, "scaled", role="scale", count=1).commit(20, 2, [0])
    assert figures_of(read(run.events))["badput"]["idle"] == 0, "the other one is not wanted any more"
    run.add(20, "scaled", role="scale", count=3).commit(25, 3, [0])
    assert figures_of(read(run.events))["badput"]["idle"] == pytest.approx(2 * 5 / 45), "two are asked for in vain"
    assert figures_of(read(run.add(99, "workers_started", 1).start(102, 1, step=4).events))["restarting_s"] == 3


def test_a_fault_costs_the_steps_that_it_takes_back_and_time_without_groups_is_no_session():
    run = Timeline().start(0, 0, 1)
    for step in range(1, 301):
        run.attempt(step, step, 0, [0]).commit(step, step, [0, 1])
    run.fault(300.5, "kill-group", 0).start(310, 0, 1, step=2, source="disk").attempt(311, 2, 0, [0])
    run.commit(311, 2, [0, 1], parent="1").add(312, "agent_ended", 1, role="agent", status="fenced")
    account = read(run.add(9000, "lighthouse_started", role="lighthouse").events)
    names, figures = ("slots_recomputed", "delay_s_max", "wall_s"), figures_of(account)
    assert [figures[name] for name in names] == [1, 11 + 298, 312]
    assert account.current.groups[1].alive, "its successor is"


def test_a_healthy_step_is_one_of_as_many_groups_as_were_asked_for():
    run = Timeline().add(0, "run_started", role="supervisor", groups=1, steps=10).start(0, 0).fault(9, "stop-worker", 0)
    run.add(20, "scaled", role="scale", count=2).start(20, 1, step=6, source="peer")
    for step in range(1, 11):
        run.commit(min(4 * step, 10 + 2 * step), step, [0] if step < 6 else [0, 1])
    figures = figures_of(read(run.events))
    assert [figures[name] for name in ("step_s_median", "ettr", "delay_s_max")] == [2, 1, 0]


def test_a_group_without_which_the_others_go_on_does_not_live_until_it_says_so():
    """If its host is lost, so is its agent, and no event tells of the death."""
    run = Timeline().add(0, "run_started", role="supervisor", groups=2, steps=9).start(0, 0, 1)
    run.commit(10, 1, [0, 1]).commit(20, 2, [0])
    account = read(run.events)
    assert [group.alive for group in account.current.groups.values()] == [True, False]
    run.start(50, 1, step=3).add(60, "quorum", 1, 3, wait_s=1.0)
    run.commit(70, 3, [0, 1]).add(71, "workers_died", 1, role="agent", reason="killed", exitcodes={"0": -9})
    account = read(run.start(72, 1, step=4).commit(80, 4, [0]).events)
    assert all(group.alive for group in account.current.groups.values())
    spent = {state: seconds for state, seconds in figures_of(account)["time_by_group"]["1"].items() if seconds}
    assert spent == {"productive": 10 + 9 + 10, "stalled": 10 + 1, "restarting": 30 + 1, "waiting": 1}
