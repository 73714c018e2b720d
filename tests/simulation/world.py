"""One simulated run: its plan, drawn from a seed; the world in which it happens; and its outcome."""

from __future__ import annotations

import gc
import random
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn

from everstep.quorum.errors import GroupBroken
from everstep.quorum.request import Request, name_of, read_quorum
from everstep.step.attempt import Outcome
from everstep.step.holding import FINDINGS
from everstep.step.interfaces import Commit, Timeouts
from simulation import system
from simulation.checks import Sick
from simulation.faults import AT_VOTE, CLOSING, KINDS, REFUSALS, Fault, break_it, place
from simulation.files import Shared
from simulation.groups import Group, Life, Rank
from simulation.judge import ASKED, START, Judge, State, Violation
from simulation.lighthouse import Options
from simulation.network import Network
from simulation.nodes import LighthouseNode
from simulation.scheduler import Process, Scheduler, Signal
from simulation.trainer import FIRST, SimWork

COMPLETE = {Outcome.OVER, Outcome.TOO_LATE}
LOOK_S = 5.0
HEARTBEAT_S, LONG_S = 2.0, 30.0
"""Seconds of the usual heartbeat timeout, and of one that must lengthen no pause: then all faults are CLOSING ones."""
STALL_S, GIVE_UP_S = 120.0, 240.0
FAILURES = 3
"""Attempts of one group that may fail for each fault; as many more may fail without a fault."""
STUCK = 4
"""A run is stuck after this many times its bound without a commit."""
STAYS, AUDITS, HEALS, FAILED_HEALS, MISSES, IN_VAIN = 3, 3, 4, 2, 3, 2
"""How often each may happen to a group or rank before it is a violation. The methods that use them say what it is."""
CALM_S, HEARD_S = 5.0, 1.0
"""Seconds after a fault in which groups may ask without need: by then answers to heartbeats have told them the news.
Seconds after which a group that asks is in the next quorum."""
UNHEARD = 3
"""Connect timeouts for which a host may be silent before others take it for lost."""
AGAIN = 1.5
"""Repeated commits of a step that are allowed for each fault."""
MOST_EVENTS = 2_000_000
"""Events after which a run is endless. The largest runs take a tenth of it."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The runs that a campaign simulates. groups, ranks, steps: lowest and highest number. Small runs find more in the
    same time: within 25 s, 33 of 44 changes of the code that can be seen, and runs of twice the size 31 of them."""

    groups: tuple[int, int] = (2, 3)
    ranks: tuple[int, int] = (1, 2)
    steps: tuple[int, int] = (5, 8)
    faults: int = 8
    kinds: tuple[str, ...] = KINDS
    homes: bool = False
    """Whether slots have home groups."""
    quiet_s: float = 0.0
    """Seconds without faults at the start."""
    spares: int | None = None
    """Number of spare groups. None: a fifth of the runs of three groups and more have one spare."""


LASTING = ("stop", "stop-group", "gone", "kill", "group", "slow", "join", "leave")
VOTES = (*AT_VOTE, "lh-out", "lh-move", "leave", "join", "join-odd", "part", "full")
DEFAULT, SEEDS = "default", range(2000)
"""The seeds that `scripts/simulate` tries by default, with Settings()."""
VARIANTS = {
    "errors": (range(150), Settings((2, 5), faults=12, kinds=(*REFUSALS, "kill", "group", "cut", "lose", "beats"))),
    "a group alone": (range(30, 60), Settings(groups=(1, 1), faults=12, kinds=("refuse", "nan", "full"))),
    "large": (range(9000, 9060), Settings((4, 4), (2, 3), (6, 14))),
    "homes": (range(5000, 5060), Settings((2, 4), homes=True)),
    "spares": (range(6000, 6060), Settings(groups=(3, 5), spares=1)),
    "few": (range(8000, 8060), Settings(steps=(12, 20), quiet_s=20.0, faults=2, kinds=LASTING)),
    "votes": (range(7000, 7060), Settings(kinds=VOTES)),
}
"""Name -> seeds and settings that `scripts/simulate` tries beside the default ones."""


@dataclass(frozen=True)
class Plan:
    """The properties of a run, drawn from its seed."""

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
    lighthouse: Options
    faults: tuple[Fault, ...]
    homes: int
    spares: int
    audit_slots: float
    """Share of the slots that are audited. In these, checks see no errors."""
    connect_s: float = 2.0
    stall_s: float = STALL_S
    startup_s: tuple[float, float] = 0.2, 1.5
    restart_s: tuple[float, float] = 1.0, 5.0

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
    placed = place(chance, kinds, settings.faults, groups, ranks, settings.quiet_s)
    busy_s = max((fault.at for fault in placed), default=20.0)
    slot_s = chance.choice([0.2, 0.5, 1.5]) * min(groups, slots) / slots
    steps = chance.randint(*settings.steps)
    spares = settings.spares
    if spares is None:
        spares = int(groups > 2 and not settings.homes and random.Random(f"spares {seed}").random() < 0.2)
    return Plan(
        groups=groups,
        ranks=ranks,
        slots=slots,
        steps=steps,
        # Most runs last about as long as their faults, and a slow group's slot is shorter than the watchdog's timeout.
        slot_s=min(max(slot_s, 0.8 * busy_s / steps * min(groups, slots) / slots), 0.09 * STALL_S),
        on_loss=chance.choice(["redistribute"] * 5 + ["shrink"]),
        data_ends=(chance.randint(5, steps), chance.randrange(slots)) if chance.random() < 0.15 else (10**9, 0),
        may_refuse=chance.random() < 0.5 or "sick" in kinds,
        audit_every=chance.choice([0, 1, 3]),
        save_every=chance.choice([5, 11]),
        save_s=chance.choice([0.3, 4.0, 25.0]),
        heal_s=(0.005, chance.choice([0.02, 0.02, 0.2, 3.0, 40.0])),
        heal_fails=chance.choice([0.0, 0.0, 0.3]),
        tail_s=chance.choice([(0.002, 0.02), (0.002, 0.02, 0.3)]),
        quorum_s=chance.choice([10.0, 60.0]),
        reduce_s=chance.choice([3.0, 10.0]),
        lighthouse=Options(1, join_timeout_s=chance.choice([2.0, 10.0]), heartbeat_timeout_s=heartbeat_s),
        faults=placed,
        homes=groups if settings.homes else 0,
        spares=spares,
        audit_slots=random.Random(f"audits {seed}").choice([0.0, 0.0, 0.5, 1.0]),
    )


@dataclass
class Outcome:
    seed: int
    plan: Plan
    violations: list[Violation]
    trace: list[tuple[float, str, str, int | None, str]]
    fell: Counter[str]
    """Kind -> number of faults that happened."""
    unfit: int
    """Number of starts of groups that were found at fault."""
    costs: Counter[str]
    """The run's figures; see `simulation.costs.RECORDED`."""


class World:
    """Everything outside of the protocol, and the judge's view over all groups."""

    def __init__(self, seed: int, plan: Plan, *, trace: bool = False) -> None:
        self.seed, self.plan = seed, plan
        self.scheduler = Scheduler(f"world {seed}")
        self.rumour = random.Random(f"rumour {seed}")
        """Draws whether a host has memory for a copy, independently of all other draws."""
        self.setting, self._set_s = random.Random(f"wall clock {seed}"), 0.0
        """Draws how the wall clock of a lighthouse's host is set. Seconds by which it is wrong."""
        self.judge = Judge(plan.slots, lambda: self.scheduler.now)
        self.trace: list[tuple[float, str, str, int | None, str]] = []
        self._tracing = trace
        self.address = Shared("")
        """Address of the newest lighthouse, as published in the run directory."""
        self.lags: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """Host -> until when, and by how many seconds, it sees the writes of others to the run directory late."""
        self.lighthouses: dict[str, LighthouseNode] = {}
        here, chance = system.HERE, self.scheduler.random
        heals = lambda: chance.uniform(*plan.heal_s), lambda: chance.random() < plan.heal_fails
        self.network = Network(self.scheduler, *heals)
        self.network.silence_s = UNHEARD * plan.connect_s
        here.scheduler, here.network, here.judge = self.scheduler, self.network, self.judge
        here.room, here.wall_s, here.tail_s = self.room, self.wall_s, lambda: chance.choice(plan.tail_s)
        self.groups: dict[int, Group] = {}
        self.disk: dict[int, list[State]] = {}
        """Step -> a state for each rank column, once rank 0 has noted that all of them are written."""
        self._writing: dict[tuple[str, int], dict[int, State]] = {}
        self.end: Shared[tuple[int, bool]] = Shared((-1, False))
        """The step after which the run ended, and whether it ended for all groups."""
        self.finished_at = 0.0
        self.refusing: dict[int, int] = {}
        self.sick: dict[int, Sick] = {}
        self.all_counts: dict[int, bool] = {}
        """History -> whether errors in its last commit count."""
        self.narrow, self.infinite = set[tuple[int, int]](), set[tuple[int, int]]()
        """Steps and slots whose numbers are beyond the bound of a check, or not finite, on every group."""
        self.retried: set[int] = set()
        """Steps that some group has tried more than once. What it held after the first attempt stays in the step."""
        self.passed: set[tuple[int, int]] = set()
        """(group, step) for each step in which a group let a slot pass in which all that had the state erred."""
        self.unfit: set[str] = set()
        """Names of the starts of groups that were found at fault."""
        self.spoiling: dict[int, int] = {}
        self.full: dict[int, int] = {}
        """Group -> how often it cannot write the last checkpoint."""
        self.slow: dict[int, float] = {}
        self.fell: Counter[str] = Counter()
        self.last_event = self.last_fault = 0.0
        self.failed_heals = Counter[str]()
        """Rank -> heals that failed in a row while nothing broke."""
        self.top = self.rewound = 0
        """The newest step that some group has had. Steps that were lost because all groups with their state died."""
        self.failed: Counter[str] = Counter()
        """Group -> attempts that committed nothing."""
        self._waits_for_state = False
        """Whether some group found, since the last commit, that a group which is in no quorum may have a state."""
        self.votes, self.voted = 0, Signal()
        """Number of beats of ranks that vote, and a signal that fires at each."""
        self.sessions = self._starting = 0
        self.stuck = False
        self.costs = Counter[str]()
        """The figures of the whole run, among them the number of events of each kind on all ranks."""
        self.move_lighthouse()
        for number in range(plan.groups):
            self.add_group(number)
        for fault in plan.faults:
            self.scheduler.call_at(fault.at, break_it, self, fault)
        self.scheduler.call_in(LOOK_S, self._look)

    @property
    def published(self) -> str:
        return self.address.read()

    def seen_at(self, host: str, when: float | None = None) -> float:
        """Return the time as of which a host sees the run directory, now or at time `when`."""
        when = self.scheduler.now if when is None else when
        lags = self.lags.get(host, ())
        return when - max((late_s for until, late_s in lags if when < until), default=0.0) if lags else when

    def note(self, who: str, kind: str, step: int | None, fields: dict[str, Any]) -> None:
        self.costs[kind] += 1
        self.costs["wait_s"] += fields.get("wait_s", 0.0)
        self.costs["brief_wait_s"] += min(fields.get("wait_s", 0.0), 0.5)  # what a long wait adds varies by chance
        if not all(0.0 <= fields.get(name, 0.0) <= self.scheduler.now for name in ("wait_s", "waited_s", "took_s")):
            self.judge.violate("no duration", f"{who} tells of {kind}: {fields}")
        if kind == "slot_accepted":
            group, where = int(who.partition(".")[0]), (step, fields["slot"])
            able = [self.groups[number].lives for number in self.groups[group].life.able]
            if all(any(where in life.checks.erred for life in lives) for lives in able):
                self.passed.add((group, step or 0))
        if kind == "waiting_for_state":
            self._waits_for_state = True
        if kind == "heal_failed":
            self._judge_failed_heal(who, fields["reason"])
        if kind == "slot_refused" and fields["reason"] == FINDINGS and who.endswith("/0"):
            self._judge_refusal(self.groups[int(who.partition(".")[0])].life, (step or 0, fields["slot"]))
        if kind == "quorum_failed":
            self._judge_failed_quorum(who, fields["reason"])
        if kind == "attempt" and not fields["committed"] and who.endswith("/0"):
            self.failed[who.partition(".")[0]] += 1
            self.costs["failed_s"] += fields["took_s"]
        if kind == "audit":
            self.audited(who, fields["differing"])
        if self._tracing:
            text = " ".join(f"{name}={value}" for name, value in fields.items())
            self.trace.append((round(self.scheduler.now, 4), who, kind, step, text))

    def audited(self, who: str, differing: list[int]) -> None:
        """Note an audit's finding, as a rank tells it in an event."""
        for group in self.groups.values():
            life = group.life
            if life is not None and who.startswith(f"{life.name}/"):
                able = [self.groups[number].life for number in life.able]
                voters = [voter for voter in able if voter is not None and voter.proven]
                most_sound = 2 * sum(voter.flipped() for voter in voters) < len(voters)
                # The audit may be wrong about a group that no audit has found sound since it took over a state. It
                # cannot tell which of two groups is ill.
                group.named = life.proven and most_sound and group.id in differing
                life.accused = group.id in differing
                life.proven = not life.accused

    def room(self, nbytes: int) -> bool:
        """Return whether a host has memory for so many bytes. To get that for a state takes a while."""
        if nbytes > 1:
            self.scheduler.pause(0.0, min(0.5, self.plan.heal_s[1]))
        return self.rumour.random() > 0.02

    def wall_s(self) -> float:
        """Return the time on the clock of the lighthouse's host, which is set anew in one of ten readings."""
        if self.setting.random() < 0.1:
            self._set_s = self.setting.uniform(-60.0, 60.0)
        return self.scheduler.now + self._set_s

    def starts(self) -> list[Life]:
        """Return all lives of all groups."""
        return [life for group in self.groups.values() for life in group.lives]

    def lives(self) -> list[Life]:
        """Return the newest life of every group, if it is alive."""
        return [group.life for group in self.groups.values() if group.life is not None and group.life.alive]

    def with_state(self) -> list[Life]:
        return [life for life in self.lives() if all(rank.work.has_state for rank in life.ranks)]

    def mostly_fit(self, groups: Collection[int]) -> bool:
        """Return whether more than half of these groups are not sick."""
        return 2 * len(self.sick.keys() & set(groups)) < len(groups)

    def leaves(self, rank: Rank, commit: Commit) -> NoReturn:
        """End a group that is at fault, and judge that it is. Its next start is on a sound machine."""
        life, sick = rank.life, self.sick.get(rank.life.group.id)
        spoils = sick is not None and not sick.finite  # a sum that is not finite does not tell which slot is wrong
        if not spoils and not life.checks.erred.intersection((commit.step, slot) for slot in commit.unfit):
            self.judge.violate("named in vain", f"{life.name} made no error in {commit.unfit} of step {commit.step}")
        self.unfit.add(life.name)
        self.sick.pop(life.group.id, None)
        self.disturbed()  # it ends at once, and some of the others may not have the commit yet
        raise GroupBroken(f"unfit: slots {commit.unfit}")

    def disturbed(self, until: float | None = None) -> None:
        """Note that something broke, or stays broken until a time."""
        until = self.scheduler.now if until is None else until
        self.last_event, self.last_fault = max(self.last_event, until), max(self.last_fault, until)

    def applied(self, rank: Rank, commit: Commit) -> None:
        if rank.number == 0:
            if not 0.0 <= commit.compute_s + commit.reduce_s <= commit.took_s <= self.scheduler.now:
                self.judge.violate("no duration", f"{rank.name} tells of {commit}")
            self._judge_audit(rank, commit)
            if rank.life.group.id in commit.able:  # a group that catches up applies old commits
                self._judge_members(rank.life, commit)
            self.top = max(self.top, commit.step)
            self._judge_pause(self.scheduler.now - self.last_event)
            self.last_event = max(self.last_event, self.scheduler.now)
            self.note(rank.name, "applied", commit.step, {"history": f"{commit.history:x}", "groups": commit.groups})

    def judge_commit(self, rank: Rank, step: int, took_s: float) -> None:
        """Judge a group's commit in an attempt of `took_s` seconds: when the attempt began, the run had not ended, as
        the host saw it, and the group had not been asked to leave. STAYS commits after that are allowed."""
        looked = self.seen_at(rank.life.host, self.scheduler.now - took_s)
        finished, for_all = self.end.read()
        if for_all and looked > self.finished_at + 0.5 and step <= finished:
            text = f"{rank.name} commits step {step}, though the run ended after {finished}"
            self.judge.violate("after the end", text)
        if self.scheduler.now - took_s > max(other.leave_at for other in rank.life.ranks):
            rank.life.stayed += 1
            if rank.life.stayed > STAYS:
                self.judge.violate("does not leave", f"{rank.life.name}, asked over {STAYS} commits ago")

    def _judge_audit(self, rank: Rank, commit: Commit) -> None:
        """Judge audits: if most groups that compute are sound, one of AUDITS audits sends the ill group away. Groups
        that took over a state since the last audit have no vote: they may have it from the ill group."""
        every, life = self.plan.audit_every, rank.life
        if not every or commit.step % every:
            return
        members = [other for other in self.with_state() if other.group.id in commit.able]
        ill = [other for other in members if other.flipped()]
        voters = [other for other in members if other.proven]
        if ill == [life] and len(members) >= 3 and 2 * sum(voter.flipped() for voter in voters) <= len(voters):
            life.audits_passed += 1
            if life.audits_passed > AUDITS:
                self.judge.violate("audit without effect", f"{life.name} differed in over {AUDITS} audits")
        else:
            life.audits_passed = 0

    def _judge_members(self, own: Life, commit: Commit) -> None:
        """Judge that, while nothing breaks, no group makes a step that another one has made otherwise, each group that
        has a state and writes no checkpoint takes part in every step, and each group that asks is let in."""
        for life in self.with_state():
            state = life.ranks[0].work.state
            broke = self.last_fault > min(own.met_at, life.met_at) or not self.is_calm()
            if state.step == commit.step and state.history != commit.history and not broke:
                self.judge.violate("two chains", f"step {commit.step} is made again, though {life.name} has made it")
            if self._is_missed(commit, life, life.missed, not life.group.wanted or life.saves):
                text = f"steps {sorted(life.missed)} are made without {life.name}, which has a state"
                self.judge.violate("left out", text)
        for life in self.lives():
            if self._is_missed(commit, life, life.passed_by, life.asks_since > self.scheduler.now, CALM_S):
                text = f"{life.name} asks since {life.asks_since:.1f}, but is not in steps {sorted(life.passed_by)}"
                self.judge.violate("not let in", text)

    def is_calm(self, for_s: float = CALM_S) -> bool:
        return self.scheduler.now - self.last_fault > for_s and self.network.is_open()

    def _is_missed(self, commit: Commit, life: Life, missed: set[int], excused: bool, calm_s: float = 0.0) -> bool:
        """Collect in `missed` the steps made without a group in calm, and return whether these are too many."""
        if excused or life.group.id in commit.groups or life.size != self.groups[commit.able[0]].ranks:
            missed.clear()
        elif self.is_calm(calm_s or self.bound_s()):
            missed.add(commit.step)
            return len(missed) > MISSES
        return False

    def judge_question(self, life: Life, request: Request, members: list[Request]) -> None:
        """Judge that a quorum has each group that asks for long, and that this group asks only if it needs one: not
        after a step with most of the others while nothing breaks and no group joins, leaves or heals."""
        self.costs["ask"] += 1
        life.passed_by.clear()
        before = {member.name for member in life.met}
        alive = {name_of(other.group.id, other.name) for other in self.starts() if not other.ended}
        calm = self.is_calm()
        names, since = {member.name for member in members}, self.scheduler.now - HEARD_S
        late = {name_of(one.group.id, one.name) for one in self.lives() if one.asks_since < since} - names
        if calm and late:
            self.judge.violate("not let in", f"{sorted(late)} asked for long before the quorum of {sorted(names)}")
        stands = alive == before == names
        stands = stands and all(len(read_quorum(0, some).able) == len(members) for some in (members, life.met))
        most = 2 * len(members) > len(self.groups)  # with those that joined, as all may have been in one quorum
        in_vain = calm and stands and most and life.committed and not request.finishing
        life.met, life.committed, life.in_vain = members, False, life.in_vain + 1 if in_vain else 0
        life.met_at = self.scheduler.now
        if life.in_vain > IN_VAIN:
            self.judge.violate("asks in vain", f"{life.name}, step {request.state.step}: still {sorted(alive)}")

    def _judge_refusal(self, life: Life, where: tuple[int, int]) -> None:
        """Judge that no more than ASKED groups refuse a slot of a step."""
        life.refused.add(where)
        refused = [n for n in life.able if (other := self.groups[n].life) is not None and where in other.refused]
        if len(refused) > ASKED:
            self.judge.violate("refused by too many", f"groups {refused} refused step and slot {where}")

    def judge_silence(self, rank: Rank, does: str) -> None:
        """Judge that a rank which begins what takes long has told its watchdog before that it is alive."""
        silent_s = self.scheduler.now - rank.beaten
        if self.is_calm() and silent_s > self.plan.startup_s[1] + HEARD_S:
            self.judge.violate("no beat", f"{rank.name} {does}, and has not beaten for {silent_s:.1f} s")

    def _judge_failed_quorum(self, who: str, reason: str) -> None:
        """Judge that, while nothing breaks, a gate tells a group in time why there is no quorum."""
        if self.is_calm(CALM_S + self.plan.quorum_s) and any(node.host in reason for node in self.lighthouses.values()):
            self.judge.violate("no reason", f"{who} gets no quorum and is not told why: {reason}")

    def _judge_commits(self) -> None:
        """Judge that each step was committed once, except for AGAIN repeated commits for each fault."""
        steps = max((link.step for link in self.judge.chain.values()), default=0)
        above = self.judge.commits - steps - self.rewound
        if above > self.fell.total() * AGAIN:
            text = f"{self.judge.commits} for {steps} steps, {self.rewound} lost ones and {self.fell.total()} faults"
            self.judge.violate("commits", text)

    def judge_restore(self, rank: Rank) -> None:
        """Judge that no group goes back to snapshots or disk if another beats and had a state when this one looked."""
        now, looked = self.scheduler.now, max(own.looked for own in rank.life.ranks)
        for other in self.with_state():
            beaten, _, step = other.group.beat.read()
            mine = other.group is rank.life.group
            heard = step > 0 and not other.endings and now - beaten < self.plan.stall_s - 2 * LOOK_S
            if not mine and heard and other.able_since < looked:
                text = f"{rank.name} restores while {other.name} has {other.ranks[0].work.state}"
                self.judge.violate("went back", text)

    def judge_heal(self, rank: Rank, state: State) -> None:
        """Judge a heal: if most groups are sound, an audit does not make a sound one take over the ill one's state."""
        self.failed_heals[rank.name] = 0
        able = self.with_state()
        ill = [life for life in able if life.flipped()]
        if rank.life.group.named and state.flipped and rank.life not in ill and len(able) >= 3 and len(ill) == 1:
            self.judge.violate("the ill one is believed", f"{rank.name} takes over the state of {ill[0].name}")
        rank.life.group.named = rank.life.proven = False

    def _judge_failed_heal(self, who: str, reason: str) -> None:
        """Judge a failed heal: it has a reason, and if nothing breaks and hosts have memory, a next one succeeds."""
        if not reason:
            self.judge.violate("no reason", f"{who} reports a failed heal without a reason")
        if "memory" in reason:
            return
        self.failed_heals[who] = self.failed_heals[who] + 1 if self.is_calm() and not self.plan.heal_fails else 0
        if self.failed_heals[who] > FAILED_HEALS:
            self.judge.violate("does not heal", f"{who} failed {self.failed_heals[who]} times in a row: {reason}")

    def judge_healing(self, rank: Rank) -> None:
        """Judge that a group which heals while nothing breaks then computes. Behind a slow link a group is let in again
        in vain after 0.2 s, 0.4 s and so on (`quorum.reachability`)."""
        count, faults = rank.life.heals_in_vain
        so_far = self.fell.total()
        rank.life.heals_in_vain = (count + 1 if faults == so_far and self.is_calm() else 1), so_far
        if rank.life.heals_in_vain[0] > HEALS:
            self.judge.violate("does not catch up", f"{rank.life.name} healed over {HEALS} times without computing")

    def thrown_away(self, work: SimWork) -> None:
        """Note that a group discards gradients. If nothing justifies that, it must not compute their slots again."""
        life, state = work.rank.life, work.state
        held = {(step, slot) for step, slot in work.gradient if slot >= 0 and step == state.step + 1}
        if not held or life.accused or held & (life.checks.erred | self.narrow | self.infinite):
            return
        if self.plan.audit_slots and any(held & rival.checks.erred for rival in self.starts()):
            return  # the owner or the auditor erred, and a third group has to decide
        for theirs in (rival.ranks[0].work for rival in self.starts() if rival is not life):
            if theirs.state.step > state.step or held & set(theirs.gradient):
                return
            if theirs.has_state and theirs.state.step == state.step and theirs.state.history != state.history:
                return
        if any(link.step > state.step for link in self.judge.chain.values()):
            return
        for step, slot in held:
            life.thrown[state.history, step, slot] = f"at {self.scheduler.now:.3f}"

    def save(self, rank: Rank, state: State) -> None:
        """Note that a rank has written its part of a checkpoint."""
        self._writing.setdefault((rank.life.name, state.step), {})[rank.number] = state

    def saved(self, life: Life, step: int) -> None:
        """Note that all parts of a checkpoint, and then its mark of completeness, are written."""
        parts = self._writing[life.name, step]
        self.disk[step] = [parts[number] for number in range(life.size)]
        for other in self.lives():
            other.in_vain = 0  # if that took longer than a sum may, the others failed, and this group asks as they did

    def restorable(self, rank: Rank) -> State:
        """Return the newest whole state, the same for all ranks: in snapshots of any group or on disk, or the start."""
        life = rank.life
        if life.chosen is None:
            choices = [[START] * life.size, *self.disk.values()]
            for group in sorted(self.groups.values(), key=lambda group: group is not life.group):
                for step in group.keeper[0]:
                    states = [group.keeper[number].get(step) for number in range(group.ranks)]
                    whole = [state for state in states if state is not None]
                    if len(whole) == len(states) and len({state.history for state in whole}) == 1:
                        choices.append(whole)
            life.chosen = max((one for one in choices if len(one) == life.size), key=lambda states: states[0].step)
            self.rewound += max(0, self.top - life.chosen[0].step)
            self.top = life.chosen[0].step
        return life.chosen[rank.number]

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
        """Start a new lighthouse on a new host, and publish it."""
        node = LighthouseNode(self, f"lighthouse{len(self.lighthouses)}", self.plan.lighthouse)
        self.lighthouses[node.address] = node
        self.address.write(self.scheduler.now, node.address)
        return node

    def stop(self, process: Process, seconds: float) -> None:
        process.stop(seconds)
        self.disturbed(process.stopped_until)

    def bound_s(self) -> float:
        """Return the longest time without a commit, in seconds, that any single fault may cause after it is over. It is
        made of a sum that fails, the next quorum, which waits for a group that hangs, the start of a group, and two
        attempts of the slowest group, or four if a group errs that may be the only one with the state. A group that may
        have the only state is waited for until its watchdog ends it."""
        plan = self.plan
        step_s = plan.slots * plan.slot_s * max(self.slow.values(), default=1.0)
        step_s += (FIRST - 1) * plan.slot_s
        if plan.audit_slots:  # every slot is computed twice, and a third time if the two differ
            step_s *= 3
        found_s = plan.reduce_s + 3 * plan.connect_s + 1.5 * HEARTBEAT_S
        again_s = plan.lighthouse.join_timeout_s + plan.restart_s[1] + plan.startup_s[1]
        steps_s = (4 if self.sick or self.infinite else 2) * step_s
        return found_s + again_s + plan.save_s + steps_s + (plan.stall_s if self._waits_for_state else 0.0)

    def _judge_pause(self, pause_s: float) -> None:
        """Judge the time between a commit and the later of the commit before it and the end of the last fault."""
        bound_s = self.bound_s()
        self._waits_for_state = False
        if pause_s > bound_s:
            self.judge.violate("pause", f"{pause_s:.1f} s without a commit, the bound is {bound_s:.1f} s")

    def _look(self) -> None:
        """Act as the agents' watchdogs, and judge whether the run makes progress."""
        now = self.scheduler.now
        for life in self.starts():
            late = [rank for rank in life.ranks if rank.process.alive and now - rank.beaten > self.plan.stall_s]
            if life.alive and late and not life.endings:
                self.note(life.name, "watchdog", None, {"late": [rank.name for rank in late]})
                recently = now - self.plan.stall_s - 60.0
                if not any(when > recently for rank in life.ranks for when in rank.process.stops):
                    text = f"{life.name} ended by its watchdog, but nothing was stopped; {late[0].name} beat last"
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
        """Return whether the run is stuck or has ended: no group runs or will start."""
        if self.stuck:
            return True
        waiting = [group for group in self.groups.values() if group.wanted]
        return (
            self.sessions == 0
            and self._starting == 0
            and all(group.life is not None and group.life.ended and group.life.endings for group in waiting)
            and all(life.ended for life in self.starts())
        )

    def run(self) -> Outcome:
        if self.scheduler.run(MOST_EVENTS):
            self._judge_the_end()
        else:
            self.judge.violate("no end", f"not over after {MOST_EVENTS} events")
        # A sick group that the others cannot outvote makes attempts fail in every step.
        if max(self.failed.values(), default=0) > FAILURES * (self.fell.total() + 1) and not self.fell["sick"]:
            self.judge.violate("attempts fail", f"{dict(self.failed)} by group, with {self.fell.total()} faults")
        self.costs.update(virtual_s=self.scheduler.now, commit=self.judge.commits, failed=self.failed.total())
        self.costs.update(message=self.network.carried, connection=self.network.connected)
        ranks = [rank for life in self.starts() for rank in life.ranks]
        for one in (*ranks, *self.lighthouses.values()):
            one.process.on_death.clear()
            one.process.kill()
        violations, unfit = self.judge.violations, len(self.unfit)
        return Outcome(self.seed, self.plan, violations, self.trace, self.fell, unfit, self.costs)

    def _judge_the_end(self) -> None:
        if self.stuck:
            return
        self._judge_commits()
        lives = ((group, group.life) for group in self.groups.values())
        complete = [group for group, life in lives if life is not None and COMPLETE.intersection(life.endings)]
        if not complete:
            return
        finished, _ = self.end.read()
        saved = self.disk.get(finished)
        if saved is None:
            text = f"step {finished} is reported as saved, but the disk has {list(self.disk)}"
            self.judge.violate("no last state", text)
            return
        last = min(self.plan.steps, self.plan.data_ends[0] - 1)
        # Under `shrink` a step may be made without the slot at which the data ends, if that slot was lost.
        wrong = finished < last if self.plan.on_loss == "shrink" else finished != last
        if wrong and any(group.wanted for group in complete):
            self.judge.violate("ended too early", f"after step {finished}, but the last step is {last}")
        steps = self.judge.lineage(saved[0])
        if sorted(steps) != list(range(1, finished + 1)):
            self.judge.violate("broken lineage", f"{sorted(steps)} behind the last state, of step {finished}")

    def finish(self, step: int, for_all: bool) -> None:
        """Note that a group has saved the state of a step, which is the last step."""
        self.finished_at = self.scheduler.now
        self.end.write(self.finished_at, (max(self.end.read()[0], step), for_all))

    def finishing(self) -> bool:
        """Return whether a group has reached the end of the run."""
        ended = self.end.read()[0] >= self.plan.steps
        return ended or any(COMPLETE.intersection(life.endings) for life in self.starts())


def simulate(seed: int, settings: Settings | None = None, *, trace: bool = False) -> Outcome:
    """Simulate the run of a seed and return its outcome."""
    plan = draw_plan(seed, settings or Settings())
    gc.disable()  # a run makes thousands of reference cycles, but no large ones
    try:
        return World(seed, plan, trace=trace).run()
    finally:
        gc.enable()
