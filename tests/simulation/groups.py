"""Replica groups: their processes, and the agents that start, watch and end them."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from everstep.quorum.errors import GroupBroken
from everstep.quorum.request import Request
from everstep.step.attempt import Group as OwnGroup
from everstep.step.attempt import Host, Outcome, Rules
from everstep.step.driver import Driver
from everstep.step.ledger import Dealing
from everstep.step.protocol import StepProtocol
from simulation import real
from simulation.checks import Checks
from simulation.files import DONE, STARTUP, Shared, SimEvents, SimFiles
from simulation.judge import State
from simulation.nodes import TOKEN, Voice
from simulation.ranks import Collectives, GroupRanks
from simulation.scheduler import Process
from simulation.services import Communicator, StoreServer
from simulation.system import monotonic, sleep
from simulation.trainer import DiskFull, SimWork

if TYPE_CHECKING:
    from simulation.world import World

OPEN_PATIENCE_S = 60.0
"""Seconds for which a source keeps a joiner waiting for a step that it has not opened yet."""
BUFFERS = 2
"""Snapshots of each rank that a keeper holds."""
CLOSES_S = 0.3, 1.0
"""Seconds from the last step until a process's connections close: it closes its snapshots, and Python exits."""
NEVER = float("inf")


class Group:
    """A group id, and all that outlives the processes of the group."""

    def __init__(self, world: World, number: int) -> None:
        self._world, self.id = world, number
        self.life: Life | None = None
        self.lives: list[Life] = []
        self.wanted = True
        """Whether its agent starts the group again."""
        self.asks_at_vote = False
        self.ranks = world.plan.ranks
        self.suspicious = self.named = False
        """Whether a fault changed its parameters, so that an audit may name it. Whether a reliable audit named it."""
        self.started: Shared[Life | None] = Shared(None)
        """Its newest start, as the fence in the run directory says."""
        self.forget_beat()
        self.keeper: defaultdict[int, dict[int, State]] = defaultdict(dict)

    def forget_beat(self) -> None:
        self.beat: Shared[tuple[float, str, int]] = Shared((-NEVER, STARTUP, 0))
        """Time, phase and step of the last beat of its rank 0."""

    def start(self) -> None:
        if self.wanted:
            self.suspicious = False
            self.life = Life(self._world, self, len(self.lives))
            self.lives.append(self.life)
            self.started.write(self._world.scheduler.now, self.life)
            self.life.start()


class Life:
    """One start of a group: its ranks and their collectives."""

    def __init__(self, world: World, group: Group, number: int) -> None:
        self.world, self.group = world, group
        self.number, self.name = number, f"{group.id}.{number}"
        self.host = f"h{group.id}"
        self.size = group.ranks
        self.broken = self.ended = False
        self.accused = False
        """Whether the last audit named it, so that it ends."""
        self.met, self.met_at = list[Request](), 0.0
        """The requests of all members of its last quorum, and when it had that."""
        self.able: list[int] = []
        """The groups that have the state in its current attempt, as the rows say."""
        self.committed = False
        """Whether its last attempt committed, and it has not asked for a quorum since."""
        self.in_vain = 0
        """Quorums in a row for which it asked although nothing had changed."""
        self.asks_since = NEVER
        self.asks_at_vote = group.asks_at_vote
        """Whether its first request waits until another group votes."""
        self.passed_by: set[int] = set()
        """Steps that others committed while it was asking for a quorum."""
        self.proven = False
        """Whether an audit found its parameters equal to the others' since it took over a state."""
        self.stayed = self.audits_passed = 0
        """Commits since it was asked to leave. Audits since a fault changed its parameters."""
        self.saves = False
        """Whether it is writing a checkpoint, which may take longer than the others wait for it."""
        self.missed: set[int] = set()
        """Steps in a row that others committed without it, though nothing kept it from taking part."""
        self.able_since = NEVER
        """Time from which on its beats said that it has a state."""
        self.heals_in_vain = (0, 0)
        """Heals in a row after which it computed nothing, and the number of faults before the last of them."""
        self.endings: list[Outcome] = []
        self.decisions = Collectives(world, self, "decision")
        self.work = Collectives(world, self, "call of the trainer")
        self.chosen: list[State] | None = None
        """The states that its ranks restored when no group had a state."""
        self.thrown: dict[tuple[int, int, int], str] = {}
        self.checks = Checks(world, self)
        self.refused: set[tuple[int, int]] = set()
        """Steps and slots that its checks refused."""
        self.not_finite = Counter[tuple[int, int, int]]()  # history, step, slot → how often it alone was not finite
        self._spoiled: dict[tuple[str, int], bool] = {}
        self.ranks = [Rank(world, self, number) for number in range(self.size)]
        self.store = StoreServer(world.network, self.ranks[0].process).address

    @property
    def alive(self) -> bool:
        return not self.ended and not self.broken

    def flipped(self) -> bool:
        return any(rank.work.state.flipped for rank in self.ranks)

    def start(self) -> None:
        self.world.network.dark.discard(self.host)
        self.world.note(self.name, "starts", None, {})
        for rank in self.ranks:
            self.world.scheduler.spawn(rank.process, rank.main)

    def spoiled(self, what: tuple[str, int], faults: dict[int, int]) -> bool:
        """Return whether a fault hits a computation, alike on all ranks. what: the fault, the computation's number."""
        if what not in self._spoiled:
            self._spoiled[what] = faults.get(self.group.id, 0) > 0
            if self._spoiled[what]:
                faults[self.group.id] -= 1
                self.world.note(self.name, what[0], None, {})
        return self._spoiled[what]

    def rank_died(self) -> None:
        """Have the agent end the other ranks after one has died without finishing."""
        if self.broken or self.ended:
            return
        self.broken = True
        scheduler = self.world.scheduler
        scheduler.call_in(0.02, self.decisions.changed.fire, scheduler)
        scheduler.call_in(0.02, self.work.changed.fire, scheduler)
        scheduler.call_in(scheduler.random.uniform(0.005, 0.05), self.end)

    def end(self) -> None:
        """End all processes, and have the agent start the group again after a while."""
        if self.ended:
            return
        self.broken = self.ended = True
        self.world.note(self.name, "ends", None, {})
        for rank in self.ranks:
            rank.process.kill()
        if self.group.life is self and not self.endings:
            after_s = self.world.scheduler.random.uniform(*self.world.plan.restart_s)
            self.world.scheduler.call_in(after_s, lambda: self.group.life is self and self.group.start())

    def rank_finished(self, end: Outcome) -> None:
        self.endings.append(end)
        if len(self.endings) == self.size:
            self.ended = True
            self.world.note(self.name, "is done", None, {"end": end.name})
            if len(set(self.endings)) > 1:
                self.world.judge.violate("ranks end differently", f"{self.name}: {self.endings}")
            if end is Outcome.LEFT and min(rank.leave_at for rank in self.ranks) > self.world.scheduler.now:
                self.world.judge.violate("leaves unasked", self.name)
            self.world.scheduler.call_in(0.5, self.world.life_ended)


class Rank:
    def __init__(self, world: World, life: Life, number: int) -> None:
        self.world, self.life, self.number = world, life, number
        self.name = f"{life.name}/{number}"
        self.process = Process(world.scheduler, self.name, life.host)
        self.process.on_death += [life.rank_died, partial(world.network.process_died, self.process)]
        self.beaten = self.looked = world.scheduler.now
        self.leave_at = NEVER
        self.dies_at_vote = False
        self.voice: Voice | None = None
        self.sums: Any = None
        self.door: Any = None
        self.work = SimWork(world, self)

    def snapshot(self, state: State) -> None:
        held = self.life.group.keeper[self.number]
        held[state.step] = state
        while len(held) > BUFFERS:
            del held[min(held)]

    def main(self) -> None:
        world, plan, life = self.world, self.world.plan, self.life
        files = SimFiles(world, self)
        files.beat(STARTUP, 0)
        world.scheduler.pause(*plan.startup_s)
        self.voice = Voice(world, self, files.fenced) if self.number == 0 else None
        patience = timedelta(seconds=OPEN_PATIENCE_S)
        self.door = real.heal.StateServer(life.host, TOKEN, patience, f"rank {self.number}")
        connects = timedelta(seconds=plan.connect_s)
        self.sums = real.process_group.RankColumn(
            "gloo", column=self.number, host=life.host, connect_timeout=connects, token=TOKEN, make=Communicator
        )
        host = Host(SimpleNamespace(now=monotonic, sleep=sleep), files, SimEvents(world, self))
        ranks = GroupRanks(life.decisions, self.number, life.size)
        try:
            group = OwnGroup(life.group.id, life.name, life.store, ranks, self.voice, self.sums, self.door)
            dealing = Dealing(plan.on_loss, plan.homes, plan.groups, plan.spares)
            rules = Rules(plan.slots, dealing, plan.timeouts, plan.audit_slots)
            protocol = StepProtocol(group=group, rules=rules, work=self.work, reducer=self.work.reducer, host=host)
            end = Driver(protocol, self.work, host, timedelta(seconds=3600)).run()
        except (GroupBroken, DiskFull) as broken:
            if isinstance(broken, DiskFull) and world.is_calm() and world.with_state() == [life]:
                world.judge.violate("last state lost", f"{self.name} ends, and no other group has a state")
            world.note(self.name, "group broken", None, {"reason": str(broken)})
            if "is not at decision" in str(broken):
                world.judge.violate("collectives paired", f"{self.name}: {broken}")
            world.scheduler.call_in(0.0, self.process.kill)
            return
        except Exception as error:  # noqa: BLE001 any exception here is a fault of the protocol
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{self.name}: {type(error).__name__}: {error} at {where.name}:{where.lineno}"
            world.judge.violate("crash", text)
            world.scheduler.call_in(0.0, self.process.kill)
            return
        if end is not Outcome.FENCED:  # a fenced start's files belong to the newer start
            files.beat(DONE, self.work.state.step)
        if self.voice is not None:
            self.voice.leave()
        life.rank_finished(end)
        world.scheduler.pause(*CLOSES_S)
        self.sums.abort()
        self.door.shutdown()
