"""Many simulated runs of the real protocol and driver, in none of which the promise is broken; and that the simulation
sees what it is there to see."""

import itertools
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import simulation.world
from everstep.step.driver import End
from simulation.faults import KINDS, REFUSALS, Fault
from simulation.files import SimFiles
from simulation.judge import Contribution, Judge, State
from simulation.scheduler import Process, Scheduler
from simulation.world import Outcome, Settings, World, draw_plan, simulate

ROOT = Path(__file__).parents[2]


def runs(seeds: range, settings: Settings) -> list[Outcome]:
    with ProcessPoolExecutor(2) as pool:
        return list(pool.map(partial(simulate, settings=settings), seeds, chunksize=16))


def assert_promise_kept(outcomes: list[Outcome]) -> None:
    broken = {o.seed: [f"{v.at} s {v.kind}: {v.text}" for v in o.violations[:3]] for o in outcomes if o.violations}
    assert not broken, f"{len(broken)} of {len(outcomes)} seeds: {dict(list(broken.items())[:5])}"


PART = 200
"""Seeds of a part: 40 s of one core at most. CI runs 2,000 seeds with `scripts/simulate` besides."""


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(10, 20))])
def test_mixed_faults_break_no_promise(part: int) -> None:
    """In this process: whoever runs tests in several has them share the parts."""
    outcomes = [simulate(seed) for seed in range(part * PART, (part + 1) * PART)]
    fell = sum((outcome.fell for outcome in outcomes), Counter())
    assert_promise_kept(outcomes)
    assert all(fell[kind] for kind in KINDS), fell
    assert fell.total() > 5 * PART
    assert sum(outcome.commits for outcome in outcomes) > 7 * PART


def test_a_group_that_errs_in_one_slot_is_named_and_a_narrow_bound_names_nobody() -> None:
    """With groups that die and sums that break meanwhile."""
    outcomes = runs(range(120), Settings(faults=12, kinds=(*REFUSALS, "kill", "group", "cut", "lose", "beats")))
    assert_promise_kept(outcomes)
    fell = sum((outcome.fell for outcome in outcomes), Counter())
    assert all(fell[kind] >= 20 for kind in REFUSALS), fell
    assert sum(outcome.unfit for outcome in outcomes) >= 20


def test_a_group_alone_gives_no_slot_up_for_two_different_errors() -> None:
    assert_promise_kept(runs(range(30, 60), Settings(groups=(1, 1), faults=12, kinds=("refuse", "nan"))))


def test_neither_do_slots_that_have_homes() -> None:
    assert_promise_kept(runs(range(5000, 5060), Settings(homes=True)))


def test_neither_do_groups_that_stand_by() -> None:
    assert_promise_kept(runs(range(6000, 6060), Settings(groups=(3, 5), spares=1)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(42))
def test_a_million_faults_break_no_promise(part: int) -> None:
    """About 24,500 faults in each part, one every 14 s of a run."""
    seeds = range(40_000 + part * 200, 40_000 + (part + 1) * 200)
    assert_promise_kept(runs(seeds, Settings(faults=200)))


def test_a_run_without_faults_does_every_step_once_in_one_history_at_the_first_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lasts longer than any group would wait for one commit."""
    monkeypatch.setattr(simulation.world, "GIVE_UP_S", 12.0)
    for seed in range(8):
        plan = replace(draw_plan(seed, Settings(faults=0)), save_s=0.3)
        world = World(seed, plan, trace=True)
        outcome = world.run()
        assert not outcome.violations
        connected = Counter(who for who, _ in world.judge.keys)
        assert max(connected.values()) <= plan.groups, "anew only when another group comes"
        last = min(outcome.plan.steps, outcome.plan.data_ends[0] - 1)
        assert outcome.commits == last
        assert outcome.virtual_s > 12.0
        attempts = [text for _, _, kind, step, text in outcome.trace if kind == "attempt" and (step or 0) > 2]
        assert all(text.startswith("attempt=1 ") for text in attempts)


def run_of(
    kind: str, *, groups: int = 3, at: float = 8.0, size: float = 0.9, heal_s: tuple[float, float] = (0.05, 0.2)
) -> tuple[Outcome, World]:
    """A quiet run of `groups` that meets one fault."""
    plan = draw_plan(0, Settings(groups=(groups, groups), ranks=(2, 2), faults=0))
    quick = {"steps": 60, "slots": 6, "slot_s": 0.2, "data_ends": (10**9, 0), "on_loss": "redistribute", "save_s": 0.3}
    waits = {"reduce_s": 3.0, "quorum_s": 10.0, "heal_s": heal_s, "heal_fails": 0.0, "audit_every": 0}
    options = replace(plan.lighthouse, join_timeout_s=2.0)
    plan = replace(plan, **quick, **waits, lighthouse=options, faults=(Fault(at, kind, 2, 0, size),))
    world = World(0, plan, trace=True)
    return world.run(), world


def test_a_joiner_follows_for_longer_than_it_would_wait_for_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation.world, "GIVE_UP_S", 12.0)
    outcome, _ = run_of("join", heal_s=(15.0, 15.0))
    assert not outcome.violations
    assert [text for _, _, kind, _, text in outcome.trace if kind == "heal" and "caught_up=0" not in text]


@pytest.mark.parametrize(
    ("kind", "bound_s"),
    [
        ("part", 3.0 + 0.5 + 3 * 2.0 + 1.5 * 2.0),
        ("one-way", 3.0 + 0.5 + 3 * 2.0 + 1.5 * 2.0),
        ("unreached", 3.0 + 0.5 + 3 * 2.0 + 1.5 * 2.0),
        ("gone", 3.0 + 0.5 + 3 * 2.0 + 1.5 * 2.0),
        ("closed", 3 * 2.0 + 1.5 * 2.0),
        ("dark", 3.0 + 0.5 + 1.5 * 2.0),
        ("slow-link", 3.0),
    ],
)
def test_one_cause_of_the_network_stops_the_others_for_no_longer_than_its_bound(kind: str, bound_s: float) -> None:
    """For half a minute. Reduce, connect and heartbeat timeouts make the bound, and a step of two groups."""
    outcome, world = run_of(kind)
    assert not outcome.violations
    assert world.fell == {kind: 1}
    told = [text.split(" cut")[0] for _, _, what, _, text in outcome.trace if what == "left_out"]
    if kind in ("part", "one-way", "unreached", "closed"):
        assert len(told) > 1, "who is left out is said"
        assert told[-1] == "groups=[]", "and that it is not any more"
    times = [at for at, who, what, _, _ in outcome.trace if what == "applied" and who in ("0.0/0", "1.0/0")]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < bound_s + 2.0


class StandsStill(World):
    """Rank 1 of group 0 stands still for a minute at the end of its attempt at `step`, as soon as it waits."""

    step = 0

    def note(self, who: str, kind: str, step: int | None, fields: dict[str, Any]) -> None:
        super().note(who, kind, step, fields)
        if (who, kind, step) == ("0.0/1", "attempt", self.step):
            self.stop(self.groups[0].lives[0].ranks[1].process, 60.0)


@pytest.mark.parametrize("step", range(1, 6))
def test_a_rank_that_stood_still_while_the_others_ended_the_run_makes_no_step_again(step: int) -> None:
    plan = draw_plan(0, Settings(groups=(3, 3), ranks=(2, 2), faults=0))
    quick = {"steps": 6, "slots": 3, "slot_s": 0.2, "data_ends": (10**9, 0), "on_loss": "redistribute", "save_s": 0.3}
    world = StandsStill(0, replace(plan, **quick))
    world.step = step
    outcome = world.run()
    assert not outcome.violations
    assert world.groups[0].lives[0].endings == [End.COMPLETE] * 2
    assert outcome.virtual_s > 60.0 > world.finished_at


@pytest.mark.parametrize("groups", [2, 3])
def test_the_end_of_a_run_that_needs_all_its_groups_waits_for_nobody_who_has_left(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last state is written before another group has heard the quorum in which that was decided."""
    beat = SimFiles.beat

    def beat_alone(files: SimFiles, phase: str, step: int) -> None:
        beat(files, phase, step)
        if phase == "checkpoint":
            for other in world.lives():
                if other is not files._rank.life:
                    world.stop(other.ranks[0].process, 2.0)

    monkeypatch.setattr(SimFiles, "beat", beat_alone)
    for seed in range(20):
        plan = draw_plan(seed, Settings(groups=(groups, groups), ranks=(1, 2), faults=0))
        options = replace(plan.lighthouse, min_replicas=groups, join_timeout_s=10.0)
        quick = {"steps": 3, "slots": groups, "slot_s": 0.2, "save_s": 0.3, "save_every": 5, "data_ends": (10**9, 0)}
        world = World(seed, replace(plan, **quick, quorum_s=60.0, lighthouse=options))
        outcome = world.run()
        assert not outcome.violations
        assert outcome.virtual_s - world.finished_at < 5.0, seed


def digest(seed: int, hash_seed: str) -> str:
    """Of a whole run, in a process of its own."""
    code = f"from simulation.world import simulate; print(simulate({seed}, trace=True).digest())"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'plugin'}:{ROOT / 'tests'}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_seed_replays_to_the_byte() -> None:
    assert digest(3, "0") == digest(3, "12345") == simulate(3, trace=True).digest()
    assert simulate(17, trace=True).digest() != simulate(3, trace=True).digest()


def test_the_command_tells_a_run_as_a_timeline() -> None:
    command = [sys.executable, "-m", "simulation", "--trace", "3"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'plugin'}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    times = [float(line.split()[0]) for line in done.stdout.splitlines()]
    assert times == sorted(times)
    assert "FAULT" in done.stdout
    assert "applied" in done.stdout


def test_a_killed_process_does_nothing_more() -> None:
    scheduler, done = Scheduler("test"), []
    process = Process(scheduler, "a")

    def work() -> None:
        try:
            scheduler.sleep(5.0)
            done.append("woke")
        finally:
            scheduler.check()
            done.append("cleaned up")

    scheduler.spawn(process, work)
    scheduler.call_at(1.0, process.kill)
    scheduler.run()
    assert done == []
    assert scheduler.now == 5.0


class _Commit:
    step, history, parent, groups, able, owners, once = 1, 11, 0, (0, 1), (0,), (0, 1), True


def part(group: int, slot: int, history: int = 0) -> Contribution:
    return Contribution(group, (((1, slot), 1),), State(0, history, 0))


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([part(0, 0), part(1, 1)], None),
        ([part(0, 0), part(1, 0)], "slots not once"),
        ([part(0, 0)], "slots not once"),
        ([part(0, 0), part(1, 1, history=7)], "two histories summed"),
        ([part(1, 0), part(0, 1)], "wrong owner"),
    ],
)
def test_the_judge_sees_a_wrong_sum(parts: list[Contribution], kind: str | None) -> None:
    judge = Judge(2, lambda: 0.0)
    judge.applied("0/0", 0, State(0, 0, 0), _Commit(), parts)
    kinds = [violation.kind for violation in judge.violations]
    assert kind in kinds if kind else not kinds


def test_the_judge_sees_states_that_part_and_lineages_that_break() -> None:
    judge = Judge(2, lambda: 0.0)
    judge.applied("0/0", 0, State(0, 0, 0), _Commit(), [part(0, 0), part(1, 1)])
    judge.at("1/0", 0, State(1, 11, 99))
    judge.applied("1/0", 0, State(0, 5, 0), _Commit(), [part(0, 0), part(1, 1)])
    assert judge.lineage(State(1, 11, 0)) == [1]
    assert [violation.kind for violation in judge.violations][:2] == [
        "one history, two states",
        "applied to another state",
    ]
    judge.lineage(State(2, 11, 0))
    assert judge.violations[-1].kind == "broken lineage"
