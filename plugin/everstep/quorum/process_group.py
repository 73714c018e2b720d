"""Process groups that span replica groups: rank r of every group, connected anew when the members of the quorum change.

The protocol's own exchanges go over Gloo on the CPU, gradients over the backend of their device. If that is Gloo too,
both use one communicator (`everstep.quorum.communicator`). Every member watches the others (`everstep.quorum.watch`):
one that dies or leaves breaks the process group on all members at once, also while it is being built. It is built in a
thread that can be abandoned, because Gloo sometimes waits forever for a peer that was killed while both connected.
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
from everstep.quorum.in_flight import Sum, SumQueue, first_line
from everstep.quorum.reachability import Reachability
from everstep.quorum.streams import Streams
from everstep.quorum.watch import PeerLost, PeerWatch

CONNECT_POLL_S = 0.01
UNHEARD = 3
"""Connect timeouts after which a member whose host is silent is lost."""
PROTOCOL, GRADIENTS = 0, -1
"""Indices into a column's queues."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank needs to connect with the other ranks of its column. A member's place is its rank among them.

    Attributes:
        key: name of the process group; never used before.
        store: `host:port` of a TCPStore that all members can connect to.
        host: place of the member that runs the store.
        rank: this rank's place.
        peers: by place, `RankColumn.address` of each member.
    """

    key: str
    store: str
    host: int
    rank: int
    peers: tuple[str, ...]

    @property
    def others(self) -> dict[int, str]:
        """Place of each other member → its address, beginning after this rank: else all would connect to the first
        member at once, and its door would take those that wait for strangers."""
        return {place: self.peers[place] for place in (*range(self.rank + 1, len(self.peers)), *range(self.rank))}


class RankColumn:
    """Collectives between rank r of every group of a quorum (a rank column).

    Args:
        backend: backend of the gradients' sums, "gloo" or "nccl".
        column: r.
        host: address under which the other members reach this rank.
        connect_timeout: of each stage of building the process groups; `connect` gives up after two, or four with NCCL.
        token: the run's token, with which members prove to each other who they are and sign their notes.
        streams: streams of the gradients' device.
        make: creates a communicator.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        *,
        column: int,
        host: str,
        connect_timeout: timedelta,
        token: bytes,
        streams: Streams | None = None,
        make: Callable[..., Communicator] = Communicator,
    ) -> None:
        self._backend, self._column = backend, column
        self._streams, self._make = streams or Streams(), make
        self._connect_timeout = connect_timeout
        self._queues: list[SumQueue] = []
        """The queue of the protocol's exchanges, then that of the gradients; one queue if both use Gloo."""
        self._stores: dict[str, dist.TCPStore | None] = {}
        """`host:port` of the last quorum's store → open connection to it. For a new one, both ends look up the name of
        an address, and the store answers nobody meanwhile: with a slow name server, for longer than a quorum takes."""
        self._lock = threading.Lock()
        self.watch = PeerWatch(host, self._on_loss, token, UNHEARD * connect_timeout)
        """Knows which ranks of the column have died."""
        self.address = self.watch.address
        """`host:port` under which the other members of the column reach this rank."""
        self.reachability = Reachability(token, connect_timeout)
        """Knows which ranks of the column lately could not be connected to."""
        self._key = b""
        self._rank = 0
        self._token, self._place = token, b""
        self._gathered = 0
        self.payload_bytes = 0
        """Bytes that this rank has put into sums so far."""
        self.size = 0
        """Number of connected members, this rank included; 0 if the process group is broken."""

    def connect(self, place: Place, timeout: timedelta | None = None) -> None:
        """Build new process groups. Raises SumsBroken if a member left meanwhile or did not connect in time."""
        self.abort()
        timeout = timeout or self._connect_timeout
        place = replace(place, key=f"everstep/{place.key}/{self._column}")
        # Removed from `_stores`: if the thread is abandoned, its connection must not be used again.
        store = self._stores.pop(place.store, None)
        building = _Building(place, self._new_queues, self.watch, timeout, store)
        self._key = building.key
        building.start()
        # The timeout may pass once until all members have come, once for each queue, and once for a device's first sum.
        count = 1 if self._backend == "gloo" else 2
        give_up = time.monotonic() + 2 * count * timeout.total_seconds()
        while building.is_alive() and self._key and time.monotonic() < give_up:
            building.join(CONNECT_POLL_S)
        queues, error = building.take()
        if queues:
            self._stores = {place.store: building.store}
            self.reachability.note_reached(place.others.values())
            with self._lock:
                self._queues, self._rank, self.size = queues, place.rank, len(place.peers)
            self._place, self._gathered = building.key, 0
        lost = not self._key
        if lost or not queues:
            self.abort()
            if not lost:  # that a member left says nothing about which ones can be reached
                self.reachability.note_failed(place.peers[peer] for peer in building.unreached)
            reason = "a member left while the groups connected"
            raise SumsBroken(reason if lost else f"could not connect to the other groups: {error}")

    def warm(self, store: str, timeout: timedelta) -> None:
        """Make a first sum with this rank as the only member, so that the gradients' backend loads its kernels, which
        takes NCCL up to a minute. To be called before the other groups wait for this one.

        Args:
            store: `host:port` of any TCPStore.
            timeout: of everything that this does.

        Raises:
            SumsBroken: the backend does not work here.
        """
        if self._backend != "gloo":
            self.connect(Place(os.urandom(16).hex(), store, 0, 0, (self.address,)), timeout)
            self.abort()
            self._stores.clear()  # its connection has this long timeout, which must not be used in quorums

    def start(self, tensor: torch.Tensor, timeout: timedelta, which: int = GRADIENTS) -> Sum:
        """Begin to sum `tensor` in place, after the work that is on the current stream so far. `which`: the queue to
        use, PROTOCOL or GRADIENTS. Raises SumsBroken."""
        with self._lock:
            queues = self._queues
        if not queues:
            raise SumsBroken("not connected to the other groups")
        self.payload_bytes += tensor.nbytes
        try:
            return queues[which].start(tensor, timeout)
        except Exception as error:
            self.abort()
            raise SumsBroken(first_line(error)) from error

    def finish(self, one: Sum) -> None:
        """Wait for a started sum. If it raises SumsBroken, the process groups are broken, and the tensors of sums that
        have not `ended` must not be used again."""
        try:
            one.queue.finish(one)
        except SumsBroken:
            self.abort()
            raise

    def total(self, values: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        """Return the sum of a float64 or int64 CPU tensor over the groups. Raises SumsBroken."""
        total = values.clone()
        self.finish(self.start(total, timeout, PROTOCOL))
        return total

    def gather(self, mine: bytes, timeout: timedelta) -> list[bytes]:
        """Return every member's note, by place; empty if it was damaged or a stranger wrote it. Raises SumsBroken."""
        self._gathered += 1
        members, place = self.size, self._place + self._gathered.to_bytes(8, "little")
        places = [place + rank.to_bytes(8, "little") for rank in range(members)]
        if not places:  # the watch may notice a loss at any moment
            raise SumsBroken("not connected to the other groups")

        def exchange(some: bytes, size: int) -> list[bytes]:
            row = -(-size // 8) * 8
            rows = (some.ljust(row, b"\0") if rank == self._rank else bytes(row) for rank in range(members))
            # Each row is non-zero on one member only, so the sum is that row unchanged.
            total = self.total(torch.frombuffer(bytearray().join(rows), dtype=torch.int64), timeout).numpy().tobytes()
            return [total[begin : begin + row] for begin in range(0, len(total), row)]

        said = notes.gather(notes.seal_note(self._token, places[self._rank], mine), exchange)
        return [notes.open_note(self._token, place, part) for place, part in zip(places, said, strict=True)]

    def abort(self) -> None:
        """Break the process groups: every pending sum fails at once, here and on the peers."""
        self.size = 0
        key, self._key = self._key, b""
        if key:
            self.watch.end(key)
        with self._lock:
            broken, self._queues = self._queues, []
        for queue in broken:  # its communicator lives until its sums have ended, in the thread that waits for them
            queue.end()

    def _new_queues(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> list[SumQueue]:
        """Create the column's queues, whose communicators are not connected yet."""

        def queue(backend: str, streams: Streams) -> SumQueue:
            return SumQueue(self._make(backend, dist.PrefixStore(backend, store), rank, size, timeout), streams)

        if self._backend == "gloo":
            return [queue("gloo", self._streams)]
        return [queue("gloo", Streams()), queue(self._backend, self._streams)]

    def _on_loss(self, key: bytes) -> None:
        if key == self._key:
            self.abort()


def connect_store(address: str, timeout: timedelta) -> dist.TCPStore:
    """Connect to the store at `address`, `host:port`. Raises RuntimeError."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)


class _Building(threading.Thread):
    """Connects communicators, in a thread that its caller may abandon (`take`). Then it breaks what it connected."""

    def __init__(
        self,
        place: Place,
        make: Callable[[dist.Store, int, int, timedelta], list[SumQueue]],
        watch: PeerWatch,
        timeout: timedelta,
        store: dist.TCPStore | None,
    ) -> None:
        super().__init__(name="connect", daemon=True)
        self._place, self._make, self._watch, self._timeout = place, make, watch, timeout
        self.key = hashlib.blake2b(place.key.encode(), digest_size=32).digest()
        self.store = store
        self.unreached: frozenset[int] = frozenset()
        """Places of the members that could not be reached, or have not been so far."""
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._lock = threading.Lock()
        self._queues: list[SumQueue] = []
        self._left_behind = False
        self._built = False
        self._error = "no answer in time"

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)  # the current device is a thread's own
            self._connect()
        except Exception as error:  # noqa: BLE001 - torch raises many types here
            self._error = first_line(error)
            return
        with self._lock:
            self._built = True
            if self._left_behind:
                for queue in self._queues:
                    queue.end()

    def _connect(self) -> None:
        place = self._place
        try:
            self._watch.begin(self.key, place.others, self._timeout)
        except PeerLost as lost:
            self.unreached = lost.places
            raise
        if self.store is None:
            # Set beforehand, as torch's client may try for longer than the timeout and be abandoned.
            self.unreached = frozenset({place.host} - {place.rank})
            self.store = connect_store(place.store, self._timeout)
            self.unreached = frozenset()
        board = dist.PrefixStore(place.key, self.store)
        self._queues = self._make(board, place.rank, len(place.peers), self._timeout)
        for number, queue in enumerate(self._queues):
            try:
                queue.communicator.connect(self.key + bytes([number]))
                if queue.communicator.on_device:  # or the first gradient's hook would wait for the slowest group
                    queue.warm(self._timeout)
            except Exception:
                self.unreached = queue.communicator.unreached() - {place.rank}
                raise

    def take(self) -> tuple[list[SumQueue], str]:
        """Return the queues, connected, or none and the reason. A thread that is not done by now is abandoned."""
        with self._lock:
            self._left_behind = True
            if not self._built:
                for queue in self._queues:
                    queue.end()  # ends what still waits for a peer that is gone
            return (self._queues if self._built else []), self._error
