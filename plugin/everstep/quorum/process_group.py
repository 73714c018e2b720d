"""The process groups that span replica groups: one rank column, connected anew for every quorum whose members changed.

What the protocol exchanges goes over Gloo on the CPU, gradients over the backend of their device; where both are Gloo,
over one and the same (`everstep.quorum.communicator`). Every member watches the others (`everstep.quorum.watch`), so
that one that dies or gives up breaks all of it on all of them at once, also while it is being connected; and connecting
happens in a thread that can be left behind, since Gloo now and then waits without end for a peer that was killed while
the two connected.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from everstep.quorum import notes
from everstep.quorum.communicator import Communicator
from everstep.quorum.errors import SumsBroken
from everstep.quorum.in_flight import Line, Sum, first_line
from everstep.quorum.reach import Reach
from everstep.quorum.streams import Streams
from everstep.quorum.watch import PeerLost, PeerWatch

CONNECT_POLL_S = 0.01
UNHEARD = 3
"""Connect timeouts after which a member whose host says nothing any more is lost."""
STORES_KEPT = 4
PROTOCOL, GRADIENTS = 0, -1
"""Which line of a column."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank connects with those of its column.

    Attributes:
        key: of their process group; never used before.
        store: `host:port` of a TCPStore that all of them reach.
        host: place of the member whose store it is.
        rank: this rank's place.
        peers: by place, the `RankColumn.address` of each.
    """

    key: str
    store: str
    host: int
    rank: int
    peers: tuple[str, ...]

    @property
    def others(self) -> dict[int, str]:
        """The other members' addresses, by their places."""
        return {place: address for place, address in enumerate(self.peers) if place != self.rank}


class RankColumn:
    """Collectives between rank r of every group of a quorum (a rank column).

    Args:
        backend: of the gradients, "gloo" or "nccl".
        column: r.
        host: address that the other members reach this rank under.
        connect_timeout: for building the process groups.
        reduce_timeout: for one sum, unless the call says otherwise.
        token: of the run; admits members to each other's watch, and tells their notes from others'.
        streams: of the gradients' device.
        make: makes communicators.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        *,
        column: int,
        host: str,
        connect_timeout: timedelta,
        reduce_timeout: timedelta,
        token: bytes,
        streams: Streams | None = None,
        make: Callable[..., Communicator] = Communicator,
    ) -> None:
        self._backend, self._column = backend, column
        self._streams, self._make = streams or Streams(), make
        self._connect_timeout, self._reduce_timeout = connect_timeout, reduce_timeout
        self._lines: list[Line] = []
        """For what the protocol exchanges, and last for gradients; the same one where both go over Gloo."""
        self._stores: dict[str, dist.TCPStore] = {}
        """Connections to members' stores. A new one asks the name server for the name of an address, at both ends,
        and the store answers nobody meanwhile: with a slow name server that alone is longer than a quorum."""
        self._lock = threading.Lock()
        self.watch = PeerWatch(host, self._on_loss, token, UNHEARD * connect_timeout)
        """Knows which ranks have died."""
        self.address = self.watch.address
        """`host:port` that the other members of the column reach this rank under."""
        self.reach = Reach(token, connect_timeout)
        """Knows which ranks could not be connected to lately."""
        self._key = b""
        self._rank = 0
        self._token, self._place = token, b""
        self._gathered = 0
        self.payload_bytes = 0
        """What this rank gave into sums so far."""
        self.size = 0
        """How many members are connected."""

    def connect(self, place: Place, timeout: timedelta | None = None) -> None:
        """Build the process groups anew. Raises SumsBroken: some member did not come in time."""
        self.abort()
        timeout = timeout or self._connect_timeout
        place = replace(place, key=f"everstep/{place.key}/{self._column}")
        # Taken, so that one that a thread was left behind with is not used again.
        reached = self._stores.pop(place.store, None)
        building = _Building(place, self._new_lines, self.watch, timeout, reached)
        self._key = building.key
        building.start()
        # Members may use up the timeout once while they wait for each other, once for each line they connect, and once
        # for a device's first sum.
        count = 1 if self._backend == "gloo" else 2
        give_up = time.monotonic() + 2 * count * timeout.total_seconds()
        while building.is_alive() and self._key and time.monotonic() < give_up:
            building.join(CONNECT_POLL_S)
        lines, error = building.take()
        if lines:
            if building.reached is not None:
                self._stores[place.store] = building.reached
            if len(self._stores) > STORES_KEPT:
                del self._stores[next(iter(self._stores))]  # the one not used for longest
            self.reach.reached(place.others.values())
            with self._lock:
                self._lines, self._rank, self.size = lines, place.rank, len(place.peers)
            self._place, self._gathered = building.key, 0
        lost = not self._key
        if lost or not lines:
            self.abort()
            if not lost:  # a member that leaves knows better why
                self.reach.failed(place.peers[peer] for peer in building.unreached)
            reason = "a member left while the groups connected"
            raise SumsBroken(reason if lost else f"could not connect to the other groups: {error}")

    def warm(self, store: str, timeout: timedelta) -> None:
        """Load what the gradients' backend loads with its first sum, by a sum of one member: NCCL's kernels can take a
        minute. To be called before the other groups wait for this one.

        Args:
            store: `host:port` of any TCPStore.
            timeout: for all of it.

        Raises:
            SumsBroken: the backend does not work here.
        """
        if self._backend != "gloo":
            self.connect(Place(os.urandom(16).hex(), store, 0, 0, (self.address,)), timeout)
            self.abort()
            self._stores.clear()  # one that would wait for as long in each quorum

    def start(self, tensor: torch.Tensor, timeout: timedelta, which: int = GRADIENTS) -> Sum:
        """Begin to sum in place what is in `tensor` once the current stream has done what it was given so far. `which`:
        what it is a sum for, PROTOCOL or GRADIENTS. Raises SumsBroken."""
        with self._lock:
            lines = self._lines
        if not lines:
            raise SumsBroken("not connected")
        self.payload_bytes += tensor.nbytes
        try:
            return lines[which].start(tensor, timeout)
        except Exception as error:
            self.abort()
            raise SumsBroken(first_line(error)) from error

    def finish(self, one: Sum) -> None:
        """Wait for a started sum. Raises SumsBroken, after which the process groups are broken; tensors of sums that
        have not `ended` must not be used again."""
        try:
            one.line.finish(one)
        except SumsBroken:
            self.abort()
            raise

    def total(self, values: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        """Sum of a float64 or int64 tensor on CPU over the groups. Raises SumsBroken."""
        total = values.clone()
        self.finish(self.start(total, timeout, PROTOCOL))
        return total

    def gather(self, mine: bytes, timeout: timedelta | None = None) -> list[bytes]:
        """What every group gave, in rank order; empty if somebody else gave it. Raises SumsBroken."""
        self._gathered += 1
        members, place = self.size, self._place + self._gathered.to_bytes(8, "little")
        places = [place + rank.to_bytes(8, "little") for rank in range(members)]
        if not places:  # the watch may notice a loss at any moment
            raise SumsBroken("not connected")

        def exchange(some: bytes, size: int) -> list[bytes]:
            matrix = torch.zeros(members, -(-size // 8), dtype=torch.int64)
            matrix[self._rank].view(torch.uint8)[: len(some)] = torch.frombuffer(bytearray(some), dtype=torch.uint8)
            # Where one group has something all others have zeros: no sum carries.
            total = self.total(matrix, timeout or self._reduce_timeout).view(torch.uint8)
            return [row.numpy().tobytes() for row in total]

        said = notes.gather(notes.seal_note(self._token, places[self._rank], mine), exchange)
        return [notes.open_note(self._token, place, part) for place, part in zip(places, said, strict=True)]

    def abort(self) -> None:
        """Break the process groups: every pending sum fails, here and at once on the peers."""
        self.size = 0
        key, self._key = self._key, b""
        if key:
            self.watch.end(key)
        with self._lock:
            broken, self._lines = self._lines, []
        for line in broken:  # what its sums run on goes when they have ended, with the thread that waits for them
            line.end()

    def _new_lines(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> list[Line]:
        """Not connected yet."""

        def line(backend: str, streams: Streams) -> Line:
            made = self._make(backend, dist.PrefixStore(backend, store), rank, size, timeout)
            return Line(made, streams)

        if self._backend == "gloo":
            return [line("gloo", self._streams)]
        return [line("gloo", Streams()), line(self._backend, self._streams)]

    def _on_loss(self, key: bytes) -> None:
        if key == self._key:
            self.abort()


def reach(store: str, timeout: timedelta) -> dist.TCPStore:
    """A connection to the store at `host:port`; raises RuntimeError."""
    host, _, port = store.rpartition(":")
    return dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)


class _Building(threading.Thread):
    """Connects lines. Whoever started it may go on without it: what it has connected by then is broken again."""

    def __init__(
        self,
        place: Place,
        make: Callable[[dist.Store, int, int, timedelta], list[Line]],
        watch: PeerWatch,
        timeout: timedelta,
        reached: dist.TCPStore | None,
    ) -> None:
        super().__init__(name="connect", daemon=True)
        self._place, self._make, self._watch, self._timeout = place, make, watch, timeout
        self.key = hashlib.blake2b(place.key.encode(), digest_size=32).digest()
        self.reached = reached
        self.unreached: frozenset[int] = frozenset()
        """Places of the members that have not been reached so far, or were found not to be reachable."""
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._lock = threading.Lock()
        self._lines: list[Line] = []
        self._left_behind = False
        self._built = False
        self._error = "no answer in time"

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)  # each thread has its own
            self._connect()
        except Exception as error:  # noqa: BLE001 - torch raises what it likes here
            self._error = first_line(error)
            return
        with self._lock:
            self._built = True
            if self._left_behind:
                for line in self._lines:
                    line.end()

    def _connect(self) -> None:
        place = self._place
        try:
            self._watch.begin(self.key, place.others, self._timeout)
        except PeerLost as lost:
            self.unreached = lost.places
            raise
        if self.reached is None:
            # Said beforehand: torch's client may try for longer than the timeout, and is left behind then.
            self.unreached = frozenset({place.host} - {place.rank})
            self.reached = reach(place.store, self._timeout)
            self.unreached = frozenset()
        board = dist.PrefixStore(place.key, self.reached)
        self._lines = self._make(board, place.rank, len(place.peers), self._timeout)
        for number, line in enumerate(self._lines):
            try:
                line.communicator.connect(self.key + bytes([number]))
                if line.communicator.on_device:  # else the first gradient's hook would wait for the slowest group
                    line.warm(self._timeout)
            except Exception:
                self.unreached = line.communicator.unreached() - {place.rank}
                raise

    def take(self) -> tuple[list[Line], str]:
        """What is connected, or nothing and why; from here on nothing is connected any more."""
        with self._lock:
            self._left_behind = True
            if not self._built:
                for line in self._lines:
                    line.end()  # what waits for a peer that is gone
            return (self._lines if self._built else []), self._error
