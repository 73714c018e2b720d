"""Stand in for torchft's lighthouse and torch's store and communicators. A sum is complete at a member when the parts
of all others have arrived there: a link that fails one way leaves some members with a sum and others without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from simulation.lighthouse import Announced, Lighthouse, Options
from simulation.network import Flow, Network, Socket
from simulation.scheduler import Process, Signal
from simulation.system import HERE

if TYPE_CHECKING:
    from simulation.judge import Contribution

STORE_RETRY_S = (0.2, 1.0)
LOST_S = 0.5
"""Seconds after the loss of a member until a communicator is aborted."""


class Inner:
    """torchft's lighthouse in a process: its rules, and the ticks that apply them."""

    def __init__(self, rules: Lighthouse, process: Process) -> None:
        self.rules, self.process = rules, process
        self.formed: tuple[Announced | None, float] = None, 0.0
        """The newest quorum, and the time on the wall clock at which it was formed."""
        self._alarm = 0

    def look(self) -> None:
        """Schedule a tick for when a quorum may form without a further request."""
        scheduler = self.process.scheduler
        when = self.rules.next_change(scheduler.now)
        self._alarm += 1
        if when is not None:
            tick = self.rules.options.quorum_tick_s
            scheduler.call_at((when // tick + 1) * tick, self._tick, self._alarm)

    def _tick(self, alarm: int) -> None:
        if alarm != self._alarm or not self.process.alive:
            return
        if self.process.stopped:
            self.process.scheduler.call_at(self.process.stopped_until, self._tick, alarm)
            return
        self.rules.tick(self.process.scheduler.now)
        self.look()


class LighthouseServer:
    """Replaces `torchft.coordination.LighthouseServer`, in the running process."""

    def __init__(
        self, *, bind: str, min_replicas: int, join_timeout_ms: int, quorum_tick_ms: int, heartbeat_timeout_ms: int
    ) -> None:
        process = HERE.scheduler.check()
        waits_s = (ms / 1000 for ms in (join_timeout_ms, heartbeat_timeout_ms, quorum_tick_ms))
        process.inner = Inner(Lighthouse(Options(min_replicas, *waits_s)), process)

    def address(self) -> str:
        return "http://127.0.0.1:1"


class LighthouseClient:
    """Replaces `torchft.coordination.LighthouseClient`, in the process of the lighthouse."""

    def __init__(self, address: str, connect_timeout: timedelta) -> None:
        self._inner: Inner = HERE.scheduler.check().inner

    def heartbeat(self, replica_id: str, timeout: timedelta) -> None:
        HERE.scheduler.check()
        HERE.network.carried += 1
        self._inner.rules.heartbeat(HERE.scheduler.now, replica_id)

    def quorum(self, replica_id: str, timeout: timedelta) -> Any:
        scheduler, inner, came = HERE.scheduler, self._inner, Signal()
        answers: list[tuple[Announced, float]] = []

        def hear(quorum: Announced) -> None:
            if inner.formed[0] is not quorum:
                inner.formed = quorum, HERE.wall_s()
            answers.append((quorum, inner.formed[1]))
            came.fire(scheduler)

        scheduler.pause(0.0001, 0.001)
        listener = inner.rules.ask(scheduler.now, replica_id, hear)
        inner.look()
        if not scheduler.wait(came, lambda: bool(answers), timeout.total_seconds()):
            inner.rules.cancel(listener)
            raise TimeoutError("deadline exceeded")
        quorum, when_s = answers[0]
        members = [SimpleNamespace(replica_id=name) for name in quorum.members]
        created = SimpleNamespace(seconds=int(when_s // 1), nanos=int(when_s % 1 * 1e9))
        return SimpleNamespace(quorum_id=quorum.id, participants=members, created=created)


class StoreServer:
    """The server of a group's store, in the process of its rank 0."""

    def __init__(self, network: Network, process: Process) -> None:
        listener = network.listen(process=process)
        self.network, self.process, self.place = network, process, listener.getsockname()
        self.boards: dict[str, dict[int, Communicator]] = defaultdict(dict)
        network.stores[self.place] = self

    @property
    def address(self) -> str:
        return f"{self.place[0]}:{self.place[1]}"

    def meets(self, board: str, member: Communicator) -> None:
        """Note a member that tells where it listens. Once all have told, send the list to each of them."""
        if not self.process.alive:
            return
        if self.process.stopped:
            self.process.scheduler.call_at(self.process.stopped_until, self.meets, board, member)
            return
        members = self.boards[board]
        members[member.rank] = member
        if len(members) == member.size:
            for each in members.values():
                self.network.carry((self.process.host, each.host), partial(each.learns, members), Flow())


class Store:
    def __init__(self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, timeout: timedelta) -> None:
        scheduler, place = HERE.scheduler, (host, port)
        until = scheduler.now + timeout.total_seconds()
        self.connection: Socket | None = None
        while self.connection is None:
            try:
                self.connection = HERE.network.connect(place, until - scheduler.now)
            except OSError as error:
                scheduler.pause(*STORE_RETRY_S)  # as torch's client does, even after its timeout
                if scheduler.now >= until:
                    raise RuntimeError(f"The client socket has timed out: {error}") from error
        self.server: StoreServer = HERE.network.stores[place]
        if self.server.process.stopped:
            scheduler.sleep(until - scheduler.now)
            raise RuntimeError("no answer in time")


class Prefix:
    def __init__(self, name: str, store: Store | Prefix) -> None:
        self.name = f"{store.name}/{name}" if isinstance(store, Prefix) else name
        self.base: Store = store.base if isinstance(store, Prefix) else store


class Summed:
    """The contributions to a sum of gradients. A rank column takes it for a tensor."""

    nbytes = 0

    def __init__(self, mine: Contribution) -> None:
        self.mine = mine
        self.all: list[Contribution] = []

    def take(self, parts: Sequence[Summed]) -> None:
        self.all = [part.mine for part in parts]


class Communicator:
    """Replaces `everstep.quorum.communicator.Communicator`, with the same arguments."""

    on_device = False

    def __init__(self, backend: str, store: Prefix, rank: int, size: int, timeout: timedelta) -> None:
        self.process, self.network = HERE.scheduler.check(), HERE.network
        self.host, self.rank, self.size = self.process.host, rank, size
        self._store, self._timeout_s = store, timeout.total_seconds()
        self.members: dict[int, Communicator] = {}
        self.others: list[Communicator] = []
        self.linked: set[int] = set()
        self.gone: set[int] = set()
        self.parts: dict[int, dict[int, Any]] = defaultdict(dict)
        self.changed = Signal()
        self.aborted = False
        self._calls, self._board = 0, ""
        self._flows: dict[int, Flow] = defaultdict(Flow)
        self.network.communicators[self.process].append(self)

    def tells(self, other: Communicator, what: Any) -> None:
        """Have `what` called at another member, after all that this member told it before."""
        self.network.carry((self.host, other.host), what, self._flows[other.rank])

    def connect(self, key: bytes) -> None:
        server = self._store.base.server
        self._board = f"{self._store.name}/{key.hex()}"
        HERE.judge.uses(self.process.name, key.hex())
        meets = partial(server.meets, self._board, self)
        self.network.carry((self.host, server.process.host), meets, Flow())
        whole = self._is_linked
        HERE.scheduler.wait(self.changed, lambda: whole() or self.aborted or bool(self.gone), self._timeout_s)
        if self.aborted or not whole():
            raise RuntimeError("the other members did not come")

    def _is_linked(self) -> bool:
        return bool(self.members) and len(self.linked) == self.size - 1

    def learns(self, members: dict[int, Communicator]) -> None:
        self.members = members
        self.others = [member for rank, member in sorted(members.items()) if rank != self.rank]
        for other in self.others:
            closed, way = self.network.closed + self.network.filtered, (self.host, other.host)
            if not (closed[way] or closed[way[::-1]]):
                self.tells(other, partial(other.is_greeted, self))
        self.news()

    def is_greeted(self, by: Communicator) -> None:
        if self.process.stopped:
            self.process.scheduler.call_at(self.process.stopped_until, self.is_greeted, by)
        elif self.process.alive and not self.aborted:
            self.tells(by, partial(by.is_linked, self.rank))

    def is_linked(self, rank: int) -> None:
        self.linked.add(rank)
        self.news()

    def unreached(self) -> frozenset[int]:
        if self.members:
            return frozenset(other.rank for other in self.others if other.rank not in self.linked)
        came = self._store.base.server.boards.get(self._board, {})
        return frozenset(rank for rank in range(self.size) if rank not in came)

    def allreduce(self, tensor: Any, timeout: timedelta) -> Work:
        if self.aborted:
            raise RuntimeError("aborted")
        number, self._calls = self._calls, self._calls + 1
        part = tensor.numpy().copy() if isinstance(tensor, torch.Tensor) else tensor
        self.parts[number][self.rank] = part
        for other in self.others:
            self.tells(other, partial(other.gets, number, self.rank, part))
        return Work(self, number, tensor, timeout.total_seconds())

    def gets(self, number: int, rank: int, part: Any) -> None:
        self.parts[number][rank] = part
        self.news()

    def error(self) -> str:
        return ""

    def news(self) -> None:
        if self.changed.waiters:
            self.changed.fire(self.process.scheduler)

    def abort(self) -> None:
        """Fail all sums under way, here and on the peers."""
        if not self.aborted:
            self.network.communicators[self.process].remove(self)
            self.dies(silent=False)

    def dies(self, silent: bool) -> None:
        self.aborted = True
        if not silent:
            for other in self.others:
                self.tells(other, partial(other.loses, self.rank))
        self.news()

    def loses(self, rank: int) -> None:
        self.gone.add(rank)
        self.process.scheduler.call_in(LOST_S, self._judge_loss)
        self.news()

    def _judge_loss(self) -> None:
        """Judge that the process has seen that a member is gone, if it did not stand still meanwhile."""
        runs = self.process.alive and self.process.scheduler.now - self.process.stopped_until > LOST_S
        if runs and self._is_linked() and not self.aborted:
            HERE.judge.violate("loss not seen", f"{self.process.name} goes on without {sorted(self.gone)}")

    def is_reset(self, one: str, other: str) -> None:
        for member in self.others:
            if {self.host, member.host} == {one, other}:
                self.loses(member.rank)


class Work:
    """A sum under way."""

    def __init__(self, among: Communicator, number: int, tensor: Any, timeout_s: float) -> None:
        self._among, self._number, self._tensor, self._timeout_s = among, number, tensor, timeout_s

    def wait(self) -> None:
        """Wait for the sum. Raises RuntimeError if a peer is gone, or the sum is not complete in time."""
        among, number, scheduler = self._among, self._number, HERE.scheduler

        def whole() -> bool:
            return len(among.parts[number]) == among.size

        def ends() -> bool:  # or a part that the sum needs is lost for good
            return whole() or among.aborted or not among.gone.issubset(among.parts[number])

        in_time = scheduler.wait(among.changed, ends, self._timeout_s)
        if not whole() or among.aborted:
            raise RuntimeError("a peer is gone" if in_time else "no answer in time")
        # All parts have arrived. The last message may still be lost, because its sender died or by itself.
        scheduler.pause(0.0002, HERE.tail_s())
        lost, among.process.lose_next = among.process.lose_next, False
        if lost or among.aborted or (among.gone and scheduler.random.random() < 0.5):
            raise RuntimeError("the end of the sum did not come")
        gathered = among.parts.pop(number)
        ordered = [gathered[rank] for rank in range(among.size)]
        if len({_form(part) for part in ordered}) > 1:
            HERE.judge.violate("sums paired", f"{among.process.name}: {[_form(part) for part in ordered]}")
            raise RuntimeError("parts of different sums")
        if isinstance(self._tensor, torch.Tensor):
            self._tensor.numpy()[...] = np.sum(ordered, axis=0)
        else:
            self._tensor.take(ordered)


def _form(part: Any) -> tuple[Any, ...]:
    return (type(part), part.dtype, part.shape) if isinstance(part, np.ndarray) else (type(part),)
