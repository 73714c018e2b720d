"""Many simulated runs of the real code keep the promise, and single faults cost no more than they should."""

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import simulation.trainer
import simulation.world
from everstep.step.attempt import Attempt
from everstep.step.protocol import StepProtocol
from simulation import costs
from simulation.faults import KINDS, REFUSALS, Fault
from simulation.trainer import SimWork
from simulation.world import DEFAULT, HEARTBEAT_S, VARIANTS, Outcome, Settings, World, draw_plan, simulate

SEEDS = range(40)
"""The first seeds. `scripts/simulate` tries 2,000 seeds and all of VARIANTS; CI runs it before the tests."""


def assert_promise_kept(outcomes: list[Outcome]) -> None:
    broken = {o.seed: [f"{v.at} s {v.kind}: {v.text}" for v in o.violations[:3]] for o in outcomes if o.violations}
    assert not broken, f"{len(broken)} of {len(outcomes)} seeds: {dict(list(broken.items())[:5])}"


def test_mixed_faults_break_no_promise() -> None:
    outcomes = [simulate(seed) for seed in SEEDS]
    fell = sum((outcome.fell for outcome in outcomes), Counter())
    assert_promise_kept(outcomes)
    assert not costs.changed(DEFAULT, [outcome.costs for outcome in outcomes[: costs.PARTS[0]]]), "see costs.RECORDED"
    assert all(fell[kind] for kind in KINDS), fell


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_breaks_a_promise(variant: str) -> None:
    seeds, settings = VARIANTS[variant]
    outcomes = [simulate(seed, settings) for seed in seeds[:12]]
    assert_promise_kept(outcomes)
    if variant == "errors":  # a group that errs is named, and a bound that is too narrow names nobody
        fell = sum((outcome.fell for outcome in outcomes), Counter())
        assert all(fell[kind] for kind in REFUSALS), fell
        assert any(outcome.unfit for outcome in outcomes)


def test_a_run_without_faults_makes_each_step_once_at_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run lasts longer than a group waits for one commit."""
    monkeypatch.setattr(simulation.world, "GIVE_UP_S", 12.0)
    for seed in range(8):
        plan = replace(draw_plan(seed, Settings(faults=0)), save_s=0.3)
        world = World(seed, plan, trace=True)
        outcome = world.run()
        assert not outcome.violations
        connected = Counter(who for who, _ in world.judge.keys)
        assert max(connected.values()) <= plan.groups, "a group connects anew only when another one joins"
        last = min(outcome.plan.steps, outcome.plan.data_ends[0] - 1)
        assert outcome.costs["commit"] == last
        assert outcome.costs["virtual_s"] > 12.0
        attempts = [text for _, _, kind, step, text in outcome.trace if kind == "attempt" and (step or 0) > 2]
        assert all(text.startswith("attempt=1 ") for text in attempts)


def run_of(*faults: Fault | str, beat_s: float = HEARTBEAT_S, **more: Any) -> Outcome:
    """Return the outcome of a quiet run of three groups with these faults. Each of them happens, and none breaks the
    promise. A kind alone stands for a fault of some length. beat_s: heartbeat timeout. more: fields of the plan."""
    fell = tuple(Fault(13.0, fault, 2, 0, 0.9) if isinstance(fault, str) else fault for fault in faults)
    plan = draw_plan(0, Settings(groups=(3, 3), ranks=(2, 2), faults=0))
    quick = {"steps": 45, "slots": 6, "slot_s": 0.2, "data_ends": (10**9, 0), "on_loss": "redistribute", "save_s": 0.3}
    waits = {"reduce_s": 3.0, "quorum_s": 10.0, "heal_s": (0.05, 0.2), "heal_fails": 0.0, "audit_every": 0}
    options = replace(plan.lighthouse, join_timeout_s=2.0, heartbeat_timeout_s=beat_s)
    outcome = World(0, replace(plan, lighthouse=options, faults=fell, **quick | waits | more), trace=True).run()
    assert not outcome.violations
    assert outcome.fell == Counter(fault.kind for fault in fell)
    return outcome


def told(outcome: Outcome, kind: str, who: str = "") -> list[tuple[float, int, str]]:
    """Return time, step and text of all events of a kind, of one rank or of all."""
    return [(at, step or 0, text) for at, rank, what, step, text in outcome.trace if what == kind and who in ("", rank)]


def failed_attempts(outcome: Outcome, after_step: int = 0) -> list[str]:
    return [text for _, step, text in told(outcome, "attempt") if step > after_step and "committed=True" not in text]


def longest_pause_s(outcome: Outcome, *who: str) -> float:
    """Return the longest time between commits of the two groups that no fault hits, or of `who`."""
    who = who or ("0.0/0", "1.0/0")
    times = [at for at, rank, what, _, _ in outcome.trace if what == "applied" and rank in who]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def test_a_joiner_follows_for_long_and_then_catches_up_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """To apply it all takes longer than the others wait for a group, and than this one waits for a commit."""
    apply = SimWork.apply

    def slow(self: SimWork, commit: Any) -> None:
        self._world.scheduler.pause(0.3, 0.3)
        apply(self, commit)

    monkeypatch.setattr(simulation.world, "GIVE_UP_S", 12.0)
    monkeypatch.setattr(SimWork, "apply", slow)
    outcome = run_of("join", heal_s=(15.0, 15.0))
    assert [text for _, _, text in told(outcome, "heal") if int(text.rpartition("caught_up=")[2]) > 7]
    assert not failed_attempts(outcome)


@pytest.mark.parametrize(("kind", "bound_s"), [
    *((kind, 3.0 + 0.5 + 3 * 2.0 + 1.5 * 2.0) for kind in ("part", "one-way", "unreached", "gone")),
    ("closed", 3 * 2.0 + 1.5 * 2.0), ("dark", 3.0 + 0.5 + 1.5 * 2.0), ("slow-link", 3.0),
])  # fmt: skip
def test_one_cause_of_the_network_stops_the_others_for_no_longer_than_its_bound(kind: str, bound_s: float) -> None:
    """The fault lasts half a minute. The bound consists of reduce, connect and heartbeat timeouts, and a step."""
    outcome = run_of(kind)
    left_out = [text.split(" cut")[0] for _, _, text in told(outcome, "left_out")]
    if kind in ("part", "one-way", "unreached", "closed"):
        assert len(left_out) > 1, "an event names the group"
        assert left_out[-1] == "groups=[]", "and an event says when it is back"
    assert longest_pause_s(outcome) < bound_s + 2.0


@pytest.mark.parametrize("kind", ["lh-out", "lh-freeze", "lh-move", "lh-dark"])
def test_a_lighthouse_that_is_away_while_groups_make_steps_costs_them_nothing(kind: str) -> None:
    """It is away for ten seconds and more, and no group joins or leaves meanwhile."""
    outcome = run_of(kind)
    assert longest_pause_s(outcome) < 2.0, "steps of 1.4 s"
    assert not failed_attempts(outcome, after_step=3)


@pytest.mark.parametrize(("kind", "size"), [("lh-out", 0.25), ("lh-move", 0.05)])
@pytest.mark.parametrize("dead", [1, 2])
def test_a_death_while_the_lighthouse_is_away_costs_the_others_no_timeout(kind: str, size: float, dead: int) -> None:
    """For a second. The new lighthouse never heard of the dead, and would wait for them, as they may only be late."""
    deaths = tuple(Fault(13.5 + number, "group", 2 - number, 0, 0.9) for number in range(dead))
    outcome = run_of(Fault(13.0, kind, 2, 0, size), *deaths, beat_s=30.0, restart_s=(90.0, 90.0))
    assert longest_pause_s(outcome, "0.0/0") < 1.0 + 2.0 * 3.0, "a second, a failed attempt, a step of one group"


def test_a_stopped_group_is_waited_for_if_another_dies_while_the_lighthouse_is_away() -> None:
    """The group stops for 6 s. It is not known to be dead, so the living group makes no step without it."""
    then = (Fault(13.4, "stop-group", 2, 0, 0.5), Fault(13.5, "group", 1, 0, 0.9))
    outcome = run_of(Fault(13.0, "lh-out", 2, 0, 0.25), *then, beat_s=30.0, restart_s=(90.0, 90.0))
    together = {text.partition("groups=")[2] for at, _, text in told(outcome, "applied", "0.0/0") if at > 14}
    assert together == {"(0, 2)"}
    assert longest_pause_s(outcome, "0.0/0") < 6.0 + 2.0 + 2 * 2.0


def test_a_joiner_waits_for_the_step_and_a_beat_whatever_the_wall_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock of the lighthouse's host, which is in torchft's answers, goes backwards. No quorum is rejected."""
    monkeypatch.setattr(World, "wall_s", lambda self: 1e9 - self.scheduler.now)
    monkeypatch.setattr(World, "room", lambda self, nbytes: True)
    outcome = run_of("join")
    assert longest_pause_s(outcome) < 2.0, "steps of 1.4 s, and a quorum"
    assert not failed_attempts(outcome)
    assert float(told(outcome, "quorum", "3.0/0")[0][2].split("wait_s=")[1]) < 0.5 + 1.5
    assert told(outcome, "heal", "3.0/0")[0][2].endswith("caught_up=0"), "it computes in its first step"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_with_another_number_of_ranks_is_left_out_and_named(ranks: int) -> None:
    outcome = run_of("join-odd", ranks=ranks)
    assert longest_pause_s(outcome) < 2.0, "steps of 1.4 s, and a quorum"
    reason = f"group 3 has ranks = {1 + ranks % 2} and most have ranks = {ranks}"
    said = [text for _, _, text in told(outcome, "left_out")]
    assert said == [f"groups=[3] cut=[[0, 3], [1, 3], [2, 3]] reason={reason}", "groups=[] cut=[] reason="], "once"


def test_a_group_that_waits_at_a_silent_lighthouse_asks_the_newly_published_one() -> None:
    """It waits during a step of 8 s. Its request would last for a minute."""
    silent, published = Fault(15.0, "lh-dark", 0, 0, 1.0), Fault(15.5, "lh-double", 0, 0, 0.0)
    outcome = run_of("join", silent, published, slot_s=4.0, quorum_s=60.0, steps=14)
    assert told(outcome, "quorum", "3.0/0")[0][0] < 13.0 + 30.0


def test_a_group_that_alone_had_the_state_and_later_hangs_is_waited_for_no_longer_than_others() -> None:
    """Only one of its ranks hangs, so its heartbeats go on. The others have healed from it meanwhile."""
    then = (Fault(13.1, "group", 1, 0, 0.9), Fault(30.0, "hang", 0, 1, 0.9))
    outcome = run_of("group", *then, startup_s=(0.5, 0.5), restart_s=(2.0, 2.0))
    assert longest_pause_s(outcome, "1.1/0", "2.1/0") < 3.0 + 2.0 + 2 * 3.0, "a sum, the join timeout, two attempts"


def test_a_spare_that_waits_for_a_late_share_and_tally_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for 40 s and for 29 s. The watchdog's timeout is 60 s."""
    tally = StepProtocol._tally

    def late(self: StepProtocol, mine: Any, attempt: Attempt) -> Any:
        if self.group == 0 and attempt.step == 1:
            self._clock.sleep(29.0)
        return tally(self, mine, attempt)

    monkeypatch.setattr(StepProtocol, "_tally", late)
    monkeypatch.setattr(simulation.trainer, "FIRST", 1.0)
    waits = {"stall_s": 60.0, "reduce_s": 30.0, "quorum_s": 35.0}
    assert not told(run_of(steps=6, slots=2, slot_s=40.0, spares=1, **waits), "watchdog")


def test_groups_that_leave_cost_no_attempt_and_no_quorum_in_each_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three groups leave. The one that stays would otherwise ask for a quorum in every step."""
    asked, judged = list[float](), World.judge_question

    def note(self: World, *what: Any) -> None:
        asked.append(self.scheduler.now)
        judged(self, *what)

    monkeypatch.setattr(World, "judge_question", note)
    outcome = run_of("leave", Fault(16.0, "leave", 1, 0, 0.9))
    assert not failed_attempts(outcome)
    assert len([at for at, _, _ in told(outcome, "applied", "0.0/0") if at > 25.0]) > 20
    assert len([at for at in asked if at > 25.0]) < 5, "only at the end of the run"


@pytest.mark.parametrize("spares", [0, 1])
def test_a_stopped_group_is_not_waited_for_until_sums_time_out(monkeypatch: pytest.MonkeyPatch, spares: int) -> None:
    """The others compute its slots, unless it is the spare. No notes are due, as the others would wait."""
    monkeypatch.setattr(simulation.trainer, "NOTES_EVERY", 1000)
    outcome = run_of(Fault(14.0, "stop-group", 2, 0, 0.9), reduce_s=20.0, spares=spares, steps=25)
    assert longest_pause_s(outcome) < HEARTBEAT_S + 4.0
