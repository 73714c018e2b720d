"""Between groups: lighthouses that can fail, a group's voice there, and the sums of a rank column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from everstep.quorum.turns import HEAD_START_S, LOOK_S, Turns
from everstep.step.interfaces import QuorumUnavailable, SumsBroken
from everstep.step.quorum import Member, Request, decode, encode, read_quorum
from simulation.judge import Contribution
from simulation.lighthouse import Announced, Lighthouse, Listener, Options
from simulation.scheduler import Process, Signal

if TYPE_CHECKING:
    from simulation.groups import Rank
    from simulation.world import World

HEARTBEAT_S = 0.25
ASK_AGAIN_S = 0.1
NOTICE_S = 0.1
"""How long a rank still waits for a sum after a peer broke it: the peer watch's grace."""


class Beacon:
    """The heartbeats of one voice, worked out when somebody looks instead of every 250 ms."""

    def __init__(self, process: Process, replica_id: str) -> None:
        self.process, self.replica_id = process, replica_id
        self.node: LighthouseNode | None = None
        self.phase = process.scheduler.random.random() * HEARTBEAT_S
        self.silent_until = -1.0
        self.left = False

    def beating(self) -> bool:
        now = self.process.scheduler.now
        return self.process.alive and not self.left and now >= max(self.silent_until, self.process.stopped_until)

    def settle(self) -> None:
        if self.node is not None:
            self.node.settle()

    def look(self) -> None:
        if self.node is not None:
            self.node.look()


def makers(members: Sequence[tuple[str, str]]) -> list[str]:
    """Which of the members of a quorum make its step, as the gate sees it; something that is no group makes none."""
    try:
        found = {name: decode(said) for name, said in members}
        able = read_quorum(0, list(found.values())).able
    except ValueError:
        return []
    return [name for name, request in found.items() if request.group in able]


@dataclass(slots=True)
class Asked:
    """A request on its way through the gate: its listener once it is through."""

    listener: Listener | None = None
    gone: bool = False


class LighthouseNode:
    """A lighthouse behind its gate, at an address: up, frozen or gone."""

    def __init__(self, world: World, address: str, options: Options) -> None:
        self.world, self.address, self.options = world, address, options
        self.rules = Lighthouse(options)
        self.up = self.frozen = False
        self.epoch = 0
        self.waiting: list[Signal] = []
        self._pending: list[Callable[[], None]] = []
        self._held: list[Callable[[], None]] = []
        """Requests that wait for their turn."""
        self._alarm = 0
        self.start()

    def start(self) -> None:
        self.rules = Lighthouse(self.options)
        self.turns = Turns(lambda replica: replica in self.rules.healthy(self.world.scheduler.now))
        self._held = []
        self.up, self.frozen = True, False
        self.epoch += 1

    def die(self) -> None:
        self.settle()
        self.up = self.frozen = False
        self._pending.clear()
        waiting, self.waiting = self.waiting, []
        for signal in waiting:
            signal.fire(self.world.scheduler)

    def freeze(self) -> None:
        self.settle()
        self.frozen = True

    def thaw(self) -> None:
        if not self.frozen:
            return
        self.frozen = False
        pending, self._pending = self._pending, []
        for act in pending:
            act()
        self._see_turns()
        self.look()

    def settle(self) -> None:
        """Write down the heartbeats that came until now."""
        if not self.up or self.frozen:
            return
        now = self.world.scheduler.now
        for beacon in self.world.beacons:
            if beacon.node is self and beacon.beating():
                last = math.floor((now - beacon.phase) / HEARTBEAT_S) * HEARTBEAT_S + beacon.phase
                if last > self.rules.heartbeats.get(beacon.replica_id, -1.0):
                    self.rules.heartbeats[beacon.replica_id] = last

    def ask(self, replica_id: str, payload: str, answer: Callable[[Announced], None]) -> Asked:
        """A request reaches it; at once or when it thaws."""
        asked, epoch = Asked(), self.epoch

        def hear(quorum: Announced) -> None:
            self.turns.formed(makers(quorum.members))
            answer(quorum)

        def enter() -> None:
            if not asked.gone and self.up and self.epoch == epoch:
                self.settle()
                asked.listener = self.rules.ask(self.world.scheduler.now, replica_id, payload, hear)
                self.look()

        def arrive() -> None:
            self.settle()
            self.turns.asked(replica_id)
            if not self.turns.may_pass():
                self._held.append(enter)
                if len(self._held) == 1:
                    self.world.scheduler.call_in(LOOK_S, self._see_turns)
            elif self._held:
                self._let_in()
                self.world.scheduler.call_in(HEAD_START_S, enter)
            else:
                enter()

        if self.frozen:
            self._pending.append(arrive)
        else:
            arrive()
        return asked

    def _let_in(self) -> None:
        held, self._held = self._held, []
        for enter in held:
            enter()

    def _see_turns(self) -> None:
        """The gate looks now and then whether those that the held ones wait for have died."""
        if self._held and self.up and not self.frozen:
            self.settle()
            if self.turns.may_pass():
                self._let_in()
            else:
                self.world.scheduler.call_in(LOOK_S, self._see_turns)

    def cancel(self, asked: Asked) -> None:
        """The client gave up. A frozen lighthouse learns of it when it thaws; the request may count until then."""

        def forget() -> None:
            asked.gone = True
            if asked.listener is not None:
                self.rules.cancel(asked.listener)

        if self.up and self.frozen:
            self._pending.append(forget)
        elif self.up:
            forget()

    def look(self) -> None:
        """Tick when something may have changed by itself."""
        if not self.up or self.frozen:
            return
        now = self.world.scheduler.now
        beating = {beacon.replica_id for beacon in self.world.beacons if beacon.node is self and beacon.beating()}
        when = self.rules.next_change(now, beating)
        self._alarm += 1
        if when is not None:
            tick = self.options.quorum_tick_s
            self.world.scheduler.call_at((math.floor(when / tick) + 1) * tick, self._tick, self._alarm, self.epoch)

    def _tick(self, alarm: int, epoch: int) -> None:
        if alarm == self._alarm and epoch == self.epoch and self.up and not self.frozen:
            self.settle()
            self.rules.tick(self.world.scheduler.now)
            self.look()


class Voice:
    """Membership as `everstep.quorum.membership` has it: a request is made again until its time is up, heartbeats go to
    the address that was last followed."""

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank
        self.replica_id = f"{rank.life.group.id:06d}:{rank.life.name}"
        self._address = ""
        self._beacon = Beacon(rank.process, self.replica_id)
        world.beacons.append(self._beacon)

    def silence(self, seconds: float) -> None:
        """Its heartbeats do not come through for a while."""
        scheduler, beacon = self._world.scheduler, self._beacon
        beacon.settle()
        beacon.silent_until = max(beacon.silent_until, scheduler.now + seconds)
        scheduler.call_at(beacon.silent_until + HEARTBEAT_S, beacon.look)

    def follow(self) -> bool:
        world, beacon = self._world, self._beacon
        world.scheduler.check()
        before, self._address = self._address, world.published
        if before == self._address:
            return False
        if beacon.node is not None and beacon.node.frozen:
            # The heartbeat that waits for the frozen one's answer comes first.
            beacon.silent_until = world.scheduler.now + world.scheduler.random.uniform(
                0, beacon.node.options.heartbeat_timeout_s / 2
            )
            world.scheduler.call_at(beacon.silent_until + HEARTBEAT_S, beacon.look)
        beacon.settle()
        beacon.node = world.lighthouses[self._address]
        beacon.look()
        return before != ""

    def ask(self, request: Request, timeout: timedelta) -> tuple[int, list[Member]]:
        scheduler = self._world.scheduler
        deadline = scheduler.now + timeout.total_seconds()
        while True:
            left_s = deadline - scheduler.now
            try:
                return self._ask_once(request, max(left_s, 0.001))
            except QuorumUnavailable:
                if left_s < ASK_AGAIN_S:
                    raise
                scheduler.sleep(ASK_AGAIN_S)
                self.follow()

    def _ask_once(self, request: Request, timeout: float) -> tuple[int, list[Member]]:
        scheduler = self._world.scheduler
        scheduler.pause(0.0002, 0.003)
        node = self._world.lighthouses[self._address]
        if not node.up:
            raise QuorumUnavailable("the lighthouse cannot be reached")
        answers: list[Announced] = []
        came = Signal()

        def hear(quorum: Announced) -> None:
            answers.append(quorum)
            scheduler.call_in(scheduler.random.random() * 0.002, came.fire, scheduler)

        epoch = node.epoch
        place = node.ask(self.replica_id, encode(request), hear)
        node.waiting.append(came)
        in_time = scheduler.wait(came, lambda: bool(answers) or not node.up or node.epoch != epoch, timeout)
        if not answers:
            node.cancel(place)
            raise QuorumUnavailable("the lighthouse is gone" if in_time else f"no quorum within {timeout:.1f} s")
        try:
            members = [decode(payload) for _, payload in answers[0].members]
        except ValueError as error:
            raise QuorumUnavailable(f"not all are groups of this run: {error}") from error
        self._rank.life.met = members
        return answers[0].id, members

    def leave(self) -> None:
        self._world.scheduler.check()
        self._beacon.settle()
        self._beacon.left = True


class _Op:
    __slots__ = ("result", "signature", "values")

    def __init__(self, signature: tuple[Any, ...]) -> None:
        self.signature = signature
        self.values: dict[int, Any] = {}
        self.result: Any = None


class Wire:
    """A process group over one rank column of a quorum."""

    def __init__(self, world: World, size: int, name: str) -> None:
        self.world, self.size, self.name = world, size, name
        self.members: dict[int, ColumnSums] = {}
        self.ops: dict[int, _Op] = {}
        self.broken_at: float | None = None
        self.changed = Signal()

    @property
    def noticed(self) -> bool:
        """Whether members know by now that it is broken."""
        return self.broken_at is not None and self.world.scheduler.now - self.broken_at > NOTICE_S

    def cut(self) -> None:
        if self.broken_at is None:
            scheduler = self.world.scheduler
            self.broken_at = scheduler.now
            scheduler.call_in(NOTICE_S * 1.01, self.changed.fire, scheduler)


class ColumnSums:
    """Sums of one rank over its column."""

    def __init__(self, world: World, rank: Rank, *, connect_s: float, reduce_s: float) -> None:
        self._world, self.rank, self.address = world, rank, f"watch-of-{rank.name}"
        self._connect_s, self._reduce_s = connect_s, reduce_s
        self._wire: Wire | None = None
        self._place = self._calls = 0
        self._used: set[str] = set()
        self.lose_next = False
        """The next sum that completes elsewhere does not complete here."""
        rank.process.on_death.append(self._cut)

    @property
    def connected(self) -> bool:
        return self._wire is not None

    @property
    def wire(self) -> Wire | None:
        return self._wire

    def unreached(self) -> frozenset[str]:
        return frozenset()

    def connect(self, *, key: str, store: str, host: int, rank: int, peers: Sequence[str]) -> None:
        world, scheduler, size = self._world, self._world.scheduler, len(peers)
        self.abort()
        column = self.rank.number
        if key in self._used:
            world.judge.violate("key used twice", f"{self.rank.name} connects with key {key} again")
        self._used.add(key)
        scheduler.pause(0.001, 0.02)
        if not world.store_answers(store):
            scheduler.pause(0.01, self._connect_s)
            raise SumsBroken(f"the store at {store} does not answer")
        name = f"{store}/{key}/{column}"
        wire = world.wires.get(name)
        if wire is None:
            wire = world.wires[name] = Wire(world, size, name)
        if wire.broken_at is not None or rank in wire.members or wire.size != size:
            wire.cut()
            raise SumsBroken("its peers gave up, or another is in this place")
        wire.members[rank] = self
        self._wire = wire
        self._place, self._calls = rank, 0
        if len(wire.members) == size:
            wire.changed.fire(scheduler)
        scheduler.wait(wire.changed, lambda: len(wire.members) == size or wire.noticed, self._connect_s)
        if len(wire.members) < size or wire.broken_at is not None:
            self.abort()
            raise SumsBroken("not all peers came")

    def abort(self) -> None:
        self._world.scheduler.check()
        self._cut()

    def _cut(self) -> None:
        if self._wire is not None:
            self._wire.cut()
        self._wire = None

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        assert all(-(1 << 63) <= word < 1 << 63 for word in words), words
        op = self._op(("words", len(words)), list(words), self._reduce_s)
        return [list(op.values[place]) for place in range(len(op.values))]

    def total(self, values: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        assert values.dtype == torch.float64
        op = self._op(("total", len(values)), values.clone(), timeout.total_seconds())
        if op.result is None:
            op.result = torch.stack([op.values[place] for place in range(len(op.values))]).sum(0)
        return op.result.clone()

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        op = self._op(("bytes",), mine, self._reduce_s)
        return [op.values[place] for place in range(len(op.values))]

    def gradients(self, mine: Contribution, timeout: float) -> list[Contribution]:
        """The sum of gradients, as what went into it."""
        op = self._op(("gradients",), mine, timeout)
        if op.result is None:
            op.result = [op.values[place] for place in range(len(op.values))]
            self._world.judge.summed(op.result)
        return op.result

    def _op(self, signature: tuple[Any, ...], value: Any, timeout: float) -> _Op:
        world, scheduler, wire = self._world, self._world.scheduler, self._wire
        scheduler.check()
        if wire is None or wire.noticed:
            self.abort()
            raise SumsBroken("not connected")
        number, self._calls = self._calls, self._calls + 1
        op = wire.ops.setdefault(number, _Op(signature))
        if op.signature != signature:
            text = f"{self.rank.name}: {signature} meets {op.signature}, call {number} of {wire.name}"
            world.judge.violate("sums paired", text)
        op.values[self._place] = value
        if len(op.values) == wire.size:
            wire.ops.pop(number - 2, None)
            wire.changed.fire(scheduler)
        in_time = scheduler.wait(wire.changed, lambda: len(op.values) == wire.size or wire.noticed, timeout)
        if len(op.values) == wire.size:
            # Everybody gave its part. The last message may still be lost, with its sender or by itself.
            scheduler.pause(0.0002, world.tail_s())
            lost, self.lose_next = self.lose_next or self._wire is None, False
            if not lost and not (wire.broken_at is not None and scheduler.random.random() < 0.5):
                return op
            reason = "the end of the sum did not come"
        else:
            reason = "a peer is gone" if in_time else f"no answer within {timeout:.1f} s"
        self.abort()
        raise SumsBroken(reason)
