"""One simulated run: its plan from a seed, the world in which it happens, and what came of it."""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NoReturn

from everstep.quorum.errors import GroupBroken
from everstep.quorum.request import Request, name_of, read_quorum
from everstep.step.attempt import Turn
from everstep.step.interfaces import Commit, Timeouts
from simulation import system
from simulation.checks import Sick
from simulation.faults import AT_VOTE, CLOSING, KINDS, REFUSALS, Fault, break_it, place
from simulation.files import Shared
from simulation.groups import Group, Life, Rank
from simulation.judge import START, Judge, State, Violation
from simulation.lighthouse import Options
from simulation.network import Network
from simulation.nodes import LighthouseNode
from simulation.scheduler import Process, Scheduler, Signal
from simulation.trainer import SimWork

COMPLETE = {Turn.OVER, Turn.TOO_LATE}
LOOK_S = 5.0
HEARTBEAT_S, LONG_S = 2.0, 30.0
"""The usual heartbeat timeout, and one that no pause may show: its runs meet no fault but CLOSING ones."""
STALL_S, GIVE_UP_S = 120.0, 240.0
FAILURES = 3
"""Attempts of one group that may fail for each fault, and without any."""
STUCK = 4
"""So many times its bound without a commit a run counts as stuck."""
STAYS, AUDITS, HEALS, FAILED_HEALS, MISSES, IN_VAIN = 3, 3, 4, 2, 3, 2
CALM_S = 5.0
"""After a fault, for a quorum that nobody needs: who beats has been told what there was to tell."""
AGAIN = 1.5
"""Commits of a step that there is already, for each fault."""
MOST_EVENTS = 2_000_000
"""A run of the largest size takes a tenth of it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a campaign asks for."""

    groups: tuple[int, int] = (2, 4)
    ranks: tuple[int, int] = (1, 3)
    faults: int = 8
    kinds: tuple[str, ...] = KINDS
    homes: bool = False
    """Whether slots have homes."""
    spares: int | None = None
    """Groups that stand by; None: one in a fifth of the runs of three groups and more."""


DEFAULT, SEEDS = "default", range(2000)
"""The seeds that `scripts/simulate` tries if nothing else is asked, with Settings()."""
VARIANTS = {
    "errors": (range(120), Settings(faults=12, kinds=(*REFUSALS, "kill", "group", "cut", "lose", "beats"))),
    "a group alone": (range(30, 60), Settings(groups=(1, 1), faults=12, kinds=("refuse", "nan"))),
    "homes": (range(5000, 5060), Settings(homes=True)),
    "spares": (range(6000, 6060), Settings(groups=(3, 5), spares=1)),
    "votes": (range(7000, 7060), Settings(kinds=(*AT_VOTE, "lh-out", "lh-move", "leave", "join", "part"))),
}
"""Seeds and settings that `scripts/simulate` tries beside its own."""


@dataclass(frozen=True)
class Plan:
    """What a run is like, drawn from its seed."""

    groups: int
    ranks: int
    slots: int
    steps: int
    slot_s: float
    on_loss: Literal["redistribute", "shrink"]
    data_ends: tuple[int, int]
    may_refuse: bool
    audit_every: int
    save_every: int
    save_s: float
    heal_s: tuple[float, float]
    heal_fails: float
    tail_s: tuple[float, ...]
    quorum_s: float
    reduce_s: float
    connect_s: float
    stall_s: float
    startup_s: tuple[float, float]
    restart_s: tuple[float, float]
    lighthouse: Options
    faults: tuple[Fault, ...]
    homes: int
    spares: int
    audit_slots: float
    """Where it is not 0, checks see nothing of what is wrong, and audits have to."""

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(
            quorum=timedelta(seconds=self.quorum_s),
            reduce=timedelta(seconds=self.reduce_s),
            compute=timedelta(seconds=0.8 * self.stall_s),
            join=timedelta(seconds=self.lighthouse.join_timeout_s),
            pause=timedelta(seconds=self.lighthouse.heartbeat_timeout_s),
            give_up=timedelta(seconds=GIVE_UP_S),
        )


def draw_plan(seed: int, settings: Settings) -> Plan:
    chance = random.Random(f"plan {seed}")
    groups, ranks = chance.randint(*settings.groups), chance.randint(*settings.ranks)
    slots = chance.randint(max(2, groups - 1), 6)
    closing = [kind for kind in settings.kinds if kind in CLOSING]
    heartbeat_s = LONG_S if closing and random.Random(f"heartbeat {seed}").random() < 0.15 else HEARTBEAT_S
    kinds = closing if heartbeat_s == LONG_S else settings.kinds
    placed = place(chance, kinds, settings.faults, groups, ranks)
    busy_s = max((fault.at for fault in placed), default=20.0)
    slot_s = chance.choice([0.2, 0.5, 1.5]) * min(groups, slots) / slots
    steps = chance.randint(6, 14)
    spares = settings.spares
    if spares is None:
        spares = int(groups > 2 and not settings.homes and random.Random(f"spares {seed}").random() < 0.2)
    return Plan(
        groups=groups,
        ranks=ranks,
        slots=slots,
        steps=steps,
        # Most runs last about as long as their faults, and a slow group's slot is shorter than its watchdog waits.
        slot_s=min(max(slot_s, 0.8 * busy_s / steps * min(groups, slots) / slots), 0.09 * STALL_S),
        on_loss=chance.choice(["redistribute"] * 5 + ["shrink"]),
        data_ends=(chance.randint(5, steps), chance.randrange(slots)) if chance.random() < 0.15 else (10**9, 0),
        may_refuse=chance.random() < 0.5,
        audit_every=chance.choice([0, 1, 3]),
        save_every=chance.choice([5, 11]),
        save_s=chance.choice([0.3, 4.0, 25.0]),
        heal_s=(0.05, chance.choice([0.2, 3.0, 40.0])),
        heal_fails=chance.choice([0.0, 0.0, 0.3]),
        tail_s=chance.choice([(0.002, 0.02), (0.002, 0.02, 0.3)]),
        quorum_s=chance.choice([10.0, 60.0]),
        reduce_s=chance.choice([3.0, 10.0]),
        connect_s=2.0,
        stall_s=STALL_S,
        startup_s=(0.2, 1.5),
        restart_s=(1.0, 5.0),
        lighthouse=Options(1, join_timeout_s=chance.choice([2.0, 10.0]), heartbeat_timeout_s=heartbeat_s),
        faults=placed,
        homes=groups if settings.homes else 0,
        spares=spares,
        audit_slots=random.Random(f"audits {seed}").choice([0.0, 0.0, 1.0]),
    )


@dataclass
class Outcome:
    seed: int
    plan: Plan
    violations: list[Violation]
    virtual_s: float
    commits: int
    applied: int
    trace: list[tuple[float, str, str, int | None, str]]
    fell: Counter[str] = field(default_factory=Counter)
    """Faults that found something to break, by kind."""
    unfit: int = 0
    """How often a group was found at fault."""
    costs: Counter[str] = field(default_factory=Counter)
    """What was asked, computed, sent and told, see `simulation.costs.RECORDED`."""


class World:
    """Everything outside of the protocol."""

    def __init__(self, seed: int, plan: Plan, *, trace: bool = False) -> None:
        self.seed, self.plan = seed, plan
        self.scheduler = Scheduler(f"world {seed}")
        self.rumour = random.Random(f"rumour {seed}")
        """Draws of what a host has memory for, apart from all others."""
        self.setting, self._set_s = random.Random(f"wall clock {seed}"), 0.0
        """Draws of how the wall clock of a lighthouse's host is set, and by how much it is wrong."""
        self.judge = Judge(plan.slots, lambda: self.scheduler.now)
        self.trace: list[tuple[float, str, str, int | None, str]] = []
        self._tracing = trace
        self.address = Shared("")
        """Of the newest lighthouse, as it is published."""
        self.lags: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """By host: until when, and by how much, it sees later what others write into the run directory."""
        self.lighthouses: dict[str, LighthouseNode] = {}
        self.network = Network(self.scheduler, self.heal_s, self.heal_fails)
        here = system.HERE
        here.scheduler, here.network, here.judge, here.tail_s = self.scheduler, self.network, self.judge, self.tail_s
        here.room, here.wall_s = lambda: self.rumour.random() > 0.02, self.wall_s
        self.groups: dict[int, Group] = {}
        self.disk: dict[int, list[State]] = {}
        """Step → a state for each rank column, once rank 0 has said that all of them are written."""
        self._writing: dict[tuple[str, int], dict[int, State]] = {}
        self.end: Shared[tuple[int, bool]] = Shared((-1, False))
        """The step after which the run ended, and whether for all groups."""
        self.finished_at = 0.0
        self.refusing: dict[int, int] = {}
        self.sick: dict[int, Sick] = {}
        self.all_counts: dict[int, bool] = {}
        """By history whether what is wrong in the commit counts."""
        self.narrow: set[tuple[int, int]] = set()
        """Steps and slots whose bound is too narrow for what is computed in them, on every group."""
        self.retried: set[int] = set()
        """Steps that some group has tried more than once: what it held the first time stays in the step."""
        self.passed: set[tuple[int, int]] = set()
        """Groups, and steps of which they let a slot pass that was refused."""
        self.unfit: set[str] = set()
        """Starts of groups that were found at fault."""
        self.spoiling: dict[int, int] = {}
        self.slow: dict[int, float] = {}
        self.fell: Counter[str] = Counter()
        self.last_event = self.last_fault = 0.0
        self.failed_heals = Counter[str]()
        """By rank, in a row while nothing broke."""
        self.top = self.rewound = 0
        """The newest step that some group had; how many were lost with all that had their state."""
        self.applied_count = 0
        self.failed: Counter[str] = Counter()
        """By group: attempts that committed nothing."""
        self._waits_for_state = False
        """Whether some group found, since the last commit, that one which is in no quorum may have a state."""
        self.votes, self.voted = 0, Signal()
        """Beats of ranks that vote."""
        self.sessions = self._starting = 0
        self.stuck = False
        self.costs = Counter[str]()
        """Of the whole run; kinds of events of all ranks among them."""
        self.move_lighthouse()
        for number in range(plan.groups):
            self.add_group(number)
        for fault in plan.faults:
            self.scheduler.call_at(fault.at, break_it, self, fault)
        self.scheduler.call_in(LOOK_S, self._look)

    # What the parts of the world ask for

    @property
    def published(self) -> str:
        return self.address.read()

    @property
    def finished(self) -> int:
        return self.end.read()[0]

    @property
    def finished_for_all(self) -> bool:
        return self.end.read()[1]

    def seen_at(self, host: str, when: float | None = None) -> float:
        """From when what a host reads of the run directory is, now or at a time."""
        when = self.scheduler.now if when is None else when
        return when - max((late_s for until, late_s in self.lags[host] if when < until), default=0.0)

    def note(self, who: str, kind: str, step: int | None, fields: dict[str, Any]) -> None:
        self.costs[kind] += 1
        self.costs["wait_s"] += fields.get("wait_s", 0.0)
        if kind == "slot_accepted":
            self.passed.add((int(who.partition(".")[0]), step or 0))
        if kind == "waiting_for_state":
            self._waits_for_state = True
        if kind == "heal_failed":
            self._judge_failed_heal(who, fields["reason"])
        if kind == "attempt" and not fields["committed"] and who.endswith("/0"):
            self.failed[who.partition(".")[0]] += 1
        if kind == "audit":
            self.audited(who, fields["differing"])
        if self._tracing:
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            self.trace.append((round(self.scheduler.now, 4), who, kind, step, text))

    def audited(self, who: str, differing: list[int]) -> None:
        """An audit's finding, as one of the groups tells it."""
        for group in self.groups.values():
            life = group.life
            if life is not None and who.startswith(f"{life.name}/"):
                voters = [self.groups[number].life for number in life.able]
                most_sound = 2 * sum(voter is not None and voter.flipped() for voter in voters) < len(voters)
                # Of those that no audit has found sound since they took over a state, it may name the wrong ones; nor
                # can it tell which of two is ill.
                group.named = life.proven and most_sound and group.id in differing
                life.accused = group.id in differing
                life.proven = not life.accused

    def heal_s(self) -> float:
        low, high = self.plan.heal_s
        return self.scheduler.random.uniform(low, high)

    def heal_fails(self) -> bool:
        return self.scheduler.random.random() < self.plan.heal_fails

    def tail_s(self) -> float:
        return self.scheduler.random.choice(self.plan.tail_s)

    def wall_s(self) -> float:
        """By the clock of the lighthouse's host, which is set anew every tenth time that it is read."""
        if self.setting.random() < 0.1:
            self._set_s = self.setting.uniform(-60.0, 60.0)
        return self.scheduler.now + self._set_s

    def lives(self) -> list[Life]:
        """The newest life of every group, where it goes on."""
        return [group.life for group in self.groups.values() if group.life is not None and group.life.alive]

    def with_state(self) -> list[Life]:
        return [life for life in self.lives() if all(rank.work.has_state for rank in life.ranks)]

    def mostly_fit(self, groups: Collection[int]) -> bool:
        """Whether more than half of these groups are not sick."""
        return 2 * len(self.sick.keys() & set(groups)) < len(groups)

    def leaves(self, rank: Rank, commit: Commit) -> NoReturn:
        """A group is at fault, and goes on on another machine."""
        life = rank.life
        if not life.checks.erred.intersection((commit.step, slot) for slot in commit.unfit):
            self.judge.violate("named in vain", f"{life.name} for slots {commit.unfit} of step {commit.step}")
        self.unfit.add(life.name)
        self.sick.pop(life.group.id, None)
        raise GroupBroken(f"unfit: slots {commit.unfit}")

    def disturbed(self, until: float | None = None) -> None:
        """Something broke, or will not be whole until a time."""
        until = self.scheduler.now if until is None else until
        self.last_event, self.last_fault = max(self.last_event, until), max(self.last_fault, until)

    def applied(self, rank: Rank, commit: Commit) -> None:
        if rank.number == 0:
            self._judge_audit(rank, commit)
            if rank.life.group.id in commit.able:  # who catches up applies what was made long ago
                self._judge_members(commit)
            self.applied_count += 1
            self.top = max(self.top, commit.step)
            self._judge_pause(self.scheduler.now - self.last_event)
            self.last_event = max(self.last_event, self.scheduler.now)
            if self._tracing:
                self.note(
                    rank.name, "applied", commit.step, {"history": f"{commit.history:x}", "groups": commit.groups}
                )

    def judge_commit(self, rank: Rank, step: int, took_s: float) -> None:
        """A group that commits a step, in an attempt that took so long, was not asked to leave before it began, and the
        run had not ended as far as its host could see."""
        looked = self.seen_at(rank.life.host, self.scheduler.now - took_s)
        ended = self.finished_for_all and looked > self.finished_at + 0.5
        if ended and step <= self.finished:
            text = f"{rank.name} commits step {step} again, the run ended after {self.finished}"
            self.judge.violate("after the end", text)
        if self.scheduler.now - took_s > max(other.leave_at for other in rank.life.ranks):
            rank.life.stayed += 1
            if rank.life.stayed > STAYS:
                self.judge.violate("does not leave", f"{rank.life.name} was asked to {STAYS} commits ago")

    def _judge_audit(self, rank: Rank, commit: Commit) -> None:
        """Where most groups that compute are sound, the next audits send one that is not away. Those that took over a
        state since the last one have no voice in it: they may have it from the one that is ill."""
        every, life = self.plan.audit_every, rank.life
        if not every or commit.step % every:
            return
        members = [other for other in self.with_state() if other.group.id in commit.able]
        ill = [other for other in members if other.flipped()]
        voters = [other for other in members if other.proven]
        if ill == [life] and len(members) >= 3 and 2 * sum(voter.flipped() for voter in voters) <= len(voters):
            life.audits_passed += 1
            if life.audits_passed > AUDITS:
                self.judge.violate("audit without effect", f"{life.name} differs since {AUDITS} audits")
        else:
            life.audits_passed = 0

    def _judge_members(self, commit: Commit) -> None:
        """Where nothing breaks, whoever has a state and writes no checkpoint takes part in every step."""
        for life in self.with_state():
            if self._is_missed(commit, life, life.missed, not life.group.wanted or life.saves):
                text = f"steps {sorted(life.missed)} are made without {life.name}, which has a state"
                self.judge.violate("left out", text)
        for life in self.lives():
            if self._is_missed(commit, life, life.passed_by, life.asks_since > self.scheduler.now):
                text = f"{life.name} asks since {life.asks_since:.1f}, steps {sorted(life.passed_by)} are made"
                self.judge.violate("not let in", text)

    def _is_missed(self, commit: Commit, life: Life, missed: set[int], excused: bool) -> bool:
        """Whether with this commit too many steps were made without it in which nothing broke; they are in `missed`."""
        if excused or life.group.id in commit.groups or life.size != self.plan.ranks:
            missed.clear()
        elif self.scheduler.now - self.last_fault > self.bound_s() and self.network.is_open():
            missed.add(commit.step)
            return len(missed) > MISSES
        return False

    def judge_question(self, life: Life, request: Request, members: list[Request]) -> None:
        """Where nothing breaks and nobody comes, goes or heals, or has healed since the last quorum, a group that made
        a step with most of the others asks nobody for the next."""
        self.costs["ask"] += 1
        quorum, before = read_quorum(0, members), {member.name for member in life.met}
        lives = [other for group in self.groups.values() for other in group.lives if not other.ended]
        alive = {name_of(other.group.id, other.name) for other in lives}
        calm = self.scheduler.now - self.last_fault > CALM_S and self.network.is_open()
        stands = alive == before == {member.name for member in members} and len(quorum.able) == len(members)
        stands = stands and len(read_quorum(0, life.met).able) == len(members)
        most = 2 * len(members) > len(self.groups)  # those that joined count, as they may have been in one quorum
        in_vain = calm and stands and most and life.committed and not request.finishing
        life.met, life.committed, life.in_vain = members, False, life.in_vain + 1 if in_vain else 0
        if life.in_vain > IN_VAIN:
            self.judge.violate("asks in vain", f"{life.name} after step {request.state.step}, of {sorted(alive)}")

    def _judge_commits(self) -> None:
        """Each step is committed once; a fault may have it committed once more."""
        steps = max((link.step for link in self.judge.chain.values()), default=0)
        above = self.judge.commits - steps - self.rewound
        if above > self.fell.total() * AGAIN:
            text = f"{self.judge.commits} for {steps} steps and {self.fell.total()} faults; {self.rewound} were lost"
            self.judge.violate("commits", text)

    def judge_restore(self, rank: Rank) -> None:
        """Nobody goes back to snapshots or the disk while a group that can be heard has a state, and had one when this
        one looked."""
        now, looked = self.scheduler.now, min(own.looked for own in rank.life.ranks)
        for other in self.with_state():
            beaten, _, step = other.group.beat.read()
            mine = other.group is rank.life.group
            heard = step > 0 and not other.endings and now - beaten < self.plan.stall_s - 2 * LOOK_S
            if not mine and heard and other.able_since < looked:
                self.judge.violate(
                    "went back", f"{rank.name} restores while {other.name} has {other.ranks[0].work.state}"
                )

    def judge_heal(self, rank: Rank, state: State) -> None:
        """Where most groups are sound, an audit does not send a sound one to take over what the ill one has."""
        self.failed_heals[rank.name] = 0
        able = self.with_state()
        ill = [life for life in able if life.flipped()]
        if rank.life.group.named and state.flipped and rank.life not in ill and len(able) >= 3 and len(ill) == 1:
            self.judge.violate("the ill one is believed", f"{rank.name} takes over what {ill[0].name} has")
        rank.life.group.named = rank.life.proven = False

    def _judge_failed_heal(self, who: str, reason: str) -> None:
        """It says why, and where nothing breaks and hosts have memory one of the next succeeds."""
        if not reason:
            self.judge.violate("no reason", f"a heal failed as {who} says")
        if "memory" in reason:
            return
        calm = self.scheduler.now - self.last_fault > CALM_S and self.network.is_open() and not self.plan.heal_fails
        self.failed_heals[who] = self.failed_heals[who] + 1 if calm else 0
        if self.failed_heals[who] > FAILED_HEALS:
            self.judge.violate("does not heal", f"{who} has failed {self.failed_heals[who]} times: {reason}")

    def judge_healing(self, rank: Rank) -> None:
        """Whoever heals while nothing breaks can compute then. One behind a slow link is let in again, in vain, after
        0.2 s, 0.4 s and so on (`quorum.reach`): seven times while the longest lasts."""
        count, faults = rank.life.heals_in_vain
        so_far = self.fell.total()
        rank.life.heals_in_vain = (count + 1 if faults == so_far else 1), so_far
        most = HEALS if self.network.is_open() else 2 * HEALS
        if rank.life.heals_in_vain[0] > most:
            self.judge.violate("does not catch up", f"{rank.life.name} healed {most} times and computed nothing")

    def thrown_away(self, work: SimWork) -> None:
        """A group's gradients are forgotten. Remember slots for which nothing says so."""
        life, state = work.rank.life, work.state
        held = {(step, slot) for step, slot in work.gradient if slot >= 0 and step == state.step + 1}
        if not held or life.accused or work.refuses or any(slot < 0 for _, slot in work.gradient):
            return
        lives = [rival for other in self.groups.values() for rival in other.lives]
        if self.plan.audit_slots and any(held & rival.checks.erred for rival in lives):
            return  # owner or auditor: a third one has to say
        for other in self.groups.values():
            for rival in other.lives:
                theirs = rival.ranks[0].work
                if rival is life:
                    continue
                if theirs.state.step > state.step or held & set(theirs.gradient):
                    return
                if theirs.has_state and theirs.state.step == state.step and theirs.state.history != state.history:
                    return
        if any(link.step > state.step for link in self.judge.chain.values()):
            return
        for step, slot in held:
            life.thrown[state.history, step, slot] = f"at {self.scheduler.now:.3f}"

    def save(self, rank: Rank, state: State) -> None:
        """A rank has written its part of a checkpoint."""
        self._writing.setdefault((rank.life.name, state.step), {})[rank.number] = state

    def saved(self, life: Life, step: int) -> None:
        """All parts are written, and now what says so."""
        parts = self._writing[life.name, step]
        self.disk[step] = [parts[number] for number in range(self.plan.ranks)]

    def restorable(self, rank: Rank) -> State:
        """The newest state that the group's own snapshots, another group's or the disk have whole; the start if none
        has. The same on all ranks of a group."""
        life = rank.life
        if life.chosen is None:
            choices = [[START] * life.size, *self.disk.values()]
            own = life.group
            for group in [own, *(group for group in self.groups.values() if group is not own)]:
                for step in group.keeper[0]:
                    states = [held.get(step) for held in group.keeper]
                    whole = [state for state in states if state is not None]
                    if len(whole) == len(states) and len({state.history for state in whole}) == 1:
                        choices.append(whole)
            life.chosen = max(choices, key=lambda states: states[0].step)
            self.rewound += max(0, self.top - life.chosen[0].step)
            self.top = life.chosen[0].step
        return life.chosen[rank.number]

    # What faults do

    def add_group(self, number: int) -> None:
        group = self.groups.get(number)
        if group is None:
            group = self.groups[number] = Group(self, number)
        group.wanted = True
        self._starting += 1

        def start() -> None:
            self._starting -= 1
            group.start()

        self.scheduler.call_in(self.scheduler.random.uniform(0.0, 0.5), start)

    def move_lighthouse(self) -> LighthouseNode:
        """A new lighthouse on a new host, which is published."""
        node = LighthouseNode(self, f"lighthouse{len(self.lighthouses)}", self.plan.lighthouse)
        self.lighthouses[node.address] = node
        self.address.write(self.scheduler.now, node.address)
        return node

    def stop(self, process: Process, seconds: float) -> None:
        process.stop(seconds)
        self.disturbed(process.stopped_until)

    # Watching

    def bound_s(self) -> float:
        """The longest time without a commit that any one fault may cause once it is over: a sum that fails, the quorum
        after it, in which a group that hangs is waited for, a group that starts, two attempts of the slowest. A group
        that may have the only state is waited for until its watchdog would have ended it."""
        plan = self.plan
        step_s = plan.slots * plan.slot_s * max(self.slow.values(), default=1.0)
        if plan.audit_slots:  # every slot twice, and once more where the two differ
            step_s *= 3
        found_s = plan.reduce_s + 3 * plan.connect_s + 1.5 * HEARTBEAT_S
        again_s = plan.lighthouse.join_timeout_s + plan.restart_s[1] + plan.startup_s[1]
        return found_s + again_s + plan.save_s + 2 * step_s + (plan.stall_s if self._waits_for_state else 0.0)

    def _judge_pause(self, pause_s: float) -> None:
        """A commit comes so long after the one before, or after the last fault was over."""
        bound_s = self.bound_s()
        self._waits_for_state = False
        if pause_s > bound_s:
            self.judge.violate("pause", f"{pause_s:.1f} s without a commit, the bound is {bound_s:.1f} s")

    def _look(self) -> None:
        """The agents' watchdogs, and whether the run goes on."""
        now = self.scheduler.now
        for group in self.groups.values():
            for life in group.lives:
                late = [rank for rank in life.ranks if rank.process.alive and now - rank.beaten > self.plan.stall_s]
                if life.alive and late and not life.endings:
                    self.note(life.name, "watchdog", None, {"late": [rank.name for rank in late]})
                    recently = now - self.plan.stall_s - 60.0
                    if not any(when > recently for rank in life.ranks for when in rank.process.stops):
                        text = f"{life.name} ended by its watchdog though nothing was stopped; {late[0].name} last beat"
                        self.judge.violate("stalled", f"{text} at {late[0].beaten:.1f}")
                    life.end()
                    self.disturbed()
        if now - self.last_event > STUCK * self.bound_s() and not self.over():
            states = [(life.name, life.ranks[0].work.state.step) for life in self.lives()]
            self.judge.violate("no progress", f"no commit since {self.last_event:.1f}; alive: {states}")
            self.stuck = True
        self.scheduler.call_in(LOOK_S, self._look)
        self.life_ended()

    def life_ended(self) -> None:
        if self.over():
            self.scheduler.end()

    def over(self) -> bool:
        """Whether the run has ended: nobody is left who goes on."""
        if self.stuck:
            return True
        waiting = [group for group in self.groups.values() if group.wanted]
        return (
            self.sessions == 0
            and self._starting == 0
            and all(group.life is not None and group.life.ended and group.life.endings for group in waiting)
            and all(life.ended for group in self.groups.values() for life in group.lives)
        )

    def run(self) -> Outcome:
        if self.scheduler.run(MOST_EVENTS):
            self._judge_the_end()
        else:
            self.judge.violate("no end", f"{MOST_EVENTS} events")
        # A sick group that nobody can outvote makes attempts fail in every step.
        if max(self.failed.values(), default=0) > FAILURES * (self.fell.total() + 1) and not self.fell["sick"]:
            self.judge.violate("attempts fail", f"{dict(self.failed)} of {self.fell.total()} faults")
        virtual_s = self.scheduler.now
        self.costs.update(virtual_s=virtual_s, commit=self.judge.commits, failed=self.failed.total())
        self.costs.update(message=self.network.carried, connection=self.network.connected)
        for group in self.groups.values():
            for life in group.lives:
                for rank in life.ranks:
                    rank.process.on_death.clear()
                    rank.process.kill()
        for node in self.lighthouses.values():
            node.process.on_death.clear()
            node.process.kill()
        return Outcome(
            self.seed,
            self.plan,
            self.judge.violations,
            round(virtual_s, 3),
            self.judge.commits,
            self.applied_count,
            self.trace,
            self.fell,
            len(self.unfit),
            self.costs,
        )

    def _judge_the_end(self) -> None:
        if self.stuck:
            return
        self._judge_commits()
        lives = ((group, group.life) for group in self.groups.values())
        complete = [group for group, life in lives if life is not None and COMPLETE.intersection(life.endings)]
        if not complete:
            return
        saved = self.disk.get(self.finished)
        if saved is None:
            self.judge.violate(
                "no last state", f"step {self.finished} is said to be saved, on disk are {list(self.disk)}"
            )
            return
        last = min(self.plan.steps, self.plan.data_ends[0] - 1)
        # Under `shrink` a step may be made without the slot at which the data ends, if that was lost.
        wrong = self.finished < last if self.plan.on_loss == "shrink" else self.finished != last
        if wrong and any(group.wanted for group in complete):
            self.judge.violate("ended too early", f"after step {self.finished}, the last one is {last}")
        steps = self.judge.lineage(saved[0])
        if sorted(steps) != list(range(1, self.finished + 1)):
            self.judge.violate("broken lineage", f"{sorted(steps)} behind the last state, of step {self.finished}")

    def finish(self, step: int, for_all: bool) -> None:
        """A group says that the state of a step is saved, and is the last."""
        self.finished_at = self.scheduler.now
        self.end.write(self.finished_at, (max(self.finished, step), for_all))

    def finishing(self) -> bool:
        """Whether a group has come to the end of the run."""
        return self.finished >= self.plan.steps or any(
            COMPLETE.intersection(life.endings) for group in self.groups.values() for life in group.lives
        )


def simulate(seed: int, settings: Settings | None = None, *, trace: bool = False) -> Outcome:
    """The run of a seed."""
    plan = draw_plan(seed, settings or Settings())
    gc.disable()  # there are cycles by the thousand, and none is large
    try:
        return World(seed, plan, trace=trace).run()
    finally:
        gc.enable()
