"""The process group that spans replica groups: one rank column, rebuilt for every quorum whose members changed.

torchft's reconfigurable process groups do the connecting and aborting. Two things are added: every member watches the
others (`everstep.quorum.watch`), so that one that dies or gives up breaks the process group on all of them at once,
also while it is being built; and building happens in a thread that can be left behind, since Gloo now and then waits
without end for a peer that was killed while the two connected.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import torchft
from torch.distributed.distributed_c10d import AllreduceOptions, Work
from torchft.process_group import ProcessGroupWrapper, create_store_client

from everstep.quorum.identity import StrangerError, open_note, seal_note
from everstep.quorum.watch import PeerWatch
from everstep.step.interfaces import SumsBroken

SHORTEST_POLL_S, LONGEST_POLL_S = 0.0001, 0.001
CONNECT_POLL_S = 0.01

logger = logging.getLogger(__name__)


class RankColumn:
    """Implements `everstep.step.interfaces.Sums` for rank r of every group of a quorum.

    What the protocol exchanges always goes over Gloo on the CPU; gradients over the backend of their device. The
    process groups of both are broken together.

    Args:
        backend: of the gradients, "gloo" or "nccl".
        column: r.
        host: address that the other members reach this rank under.
        connect_timeout: for building the process groups.
        reduce_timeout: for one sum, unless the call says otherwise.
        token: of the run; admits members to each other's watch, and tells their notes from others'.
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
    ) -> None:
        self._backend, self._column = backend, column
        self._connect_timeout, self._reduce_timeout = connect_timeout, reduce_timeout
        self._groups: list[ProcessGroupWrapper] = []
        self._watch = PeerWatch(host, self._on_loss, token)
        self._key = b""
        self._broken_groups: list[tuple[float, object]] = []
        self._patience_s = 2 * reduce_timeout.total_seconds()
        self._rank = 0
        self._token, self._place = token, b""
        self._gathered = 0
        self.size = 0

    @property
    def connected(self) -> bool:
        return self.size > 0

    def connect(self, *, key: str, store: str, rank: int, size: int) -> None:
        """Build the process groups anew.

        Args:
            key: of the quorum; never used before.
            store: `host:port` of a TCPStore that all members reach.
            rank: place of this group in the quorum.
            size: groups in the quorum.

        Raises:
            SumsBroken: some member did not arrive in time.
        """
        self.abort()
        place = f"{store}/everstep/{key}/{self._column}"
        building = _Building(self._new_groups(), self._watch, self._connect_timeout, place, rank, size)
        self._key = building.key
        building.start()
        # Members may use up the timeout once while they wait for each other, and once while they connect.
        give_up = time.monotonic() + 2 * self._connect_timeout.total_seconds()
        while building.is_alive() and self._key and time.monotonic() < give_up:
            building.join(CONNECT_POLL_S)
        groups, error = building.take()
        if groups:
            self._groups, self._rank, self.size = groups, rank, size
            self._place, self._gathered = building.key, 0
        lost = not self._key
        if lost or not groups:
            self.abort()
            reason = "a member left while the groups connected"
            raise SumsBroken(reason if lost else f"could not connect to the other groups: {error}")

    def start(self, tensor: torch.Tensor, timeout: timedelta) -> Work:
        """Start to sum `tensor` in place over the groups, over the gradients' backend.

        Raises:
            SumsBroken: the process group is broken already.
        """
        return self._start(-1, tensor, timeout)

    def _start(self, which: int, tensor: torch.Tensor, timeout: timedelta) -> Work:
        if not self.connected:
            raise SumsBroken("not connected")
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timeout
        try:
            return self._groups[which].allreduce([tensor], options)
        except Exception as error:
            raise self._broken(error) from error

    def finish(self, work: Work) -> None:
        """Wait for a started sum. Raises SumsBroken, after which the process groups are broken.

        Polls: Gloo now and then leaves a receive waiting for its timeout although its connections were closed. The
        caller then goes on without it; it must not use the tensors of unfinished sums again.
        """
        pause_s = SHORTEST_POLL_S
        while not work.is_completed():
            if not self.connected:
                raise SumsBroken("a member of the quorum was lost")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        try:
            work.wait()
            errors = [error for group in self._groups if (error := group.errored()) is not None]
        except Exception as raised:
            raise self._broken(raised) from raised
        if errors:
            raise self._broken(errors[0]) from errors[0]

    def total(self, values: torch.Tensor, timeout: timedelta) -> torch.Tensor:
        """See `Sums.total`."""
        total = values.clone()
        self.finish(self._start(0, total, timeout))
        return total

    def gather(self, words: Sequence[int]) -> list[list[int]]:
        """See `Sums.gather`."""
        matrix = torch.zeros(self._members(), len(words), dtype=torch.int64)
        matrix[self._rank] = torch.tensor(words, dtype=torch.int64)
        return self.total(matrix, self._reduce_timeout).tolist()

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """See `Sums.gather_bytes`; empty for a group in whose place somebody else gave something."""
        self._gathered += 1
        members, place = self._members(), self._place + self._gathered.to_bytes(8, "little")
        places = [place + rank.to_bytes(8, "little") for rank in range(members)]
        mine = seal_note(self._token, places[self._rank], mine)
        sizes = [size for [size] in self.gather([len(mine)])]
        begin, everything = sum(sizes[: self._rank]), torch.zeros(sum(sizes), dtype=torch.uint8)
        if not sum(sizes):
            return [b""] * members
        if mine:
            everything[begin : begin + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        parts = self.total(everything, self._reduce_timeout).split(sizes)
        return [self._open(place, part.numpy().tobytes()) for place, part in zip(places, parts, strict=True)]

    def _members(self) -> int:
        """How many there are; the watch may notice a loss at any moment. Raises SumsBroken after one."""
        size = self.size
        if not size:
            raise SumsBroken("not connected")
        return size

    def _open(self, place: bytes, sealed: bytes) -> bytes:
        try:
            return open_note(self._token, place, sealed)
        except StrangerError as error:
            logger.warning("%s", error)
            return b""

    def abort(self) -> None:
        """Break the process group: every pending sum fails, here and at once on the peers."""
        self.size = 0
        key, self._key = self._key, b""
        if key:
            self._watch.end(key)
        self._break()

    def close(self) -> None:
        """Break the process group and stop listening for peers."""
        self.abort()
        self._watch.close()

    def _new_groups(self) -> list[ProcessGroupWrapper]:
        """For what the protocol exchanges, and for gradients: the same one where both go over Gloo."""
        # Gloo takes one timeout for connecting; sums carry theirs in their options.
        groups: list[ProcessGroupWrapper] = [torchft.ProcessGroupGloo(timeout=self._connect_timeout)]
        if self._backend == "nccl":
            groups.append(torchft.ProcessGroupNCCL(timeout=self._reduce_timeout))
        return groups

    def _on_loss(self, key: bytes) -> None:
        if key == self._key:
            self._key = b""
            self.size = 0
            self._break()

    def _break(self) -> None:
        """Close the connections, but keep the object until its sums have ended: its destructor waits for them."""
        now = time.monotonic()
        self._broken_groups = [(t, group) for t, group in self._broken_groups if now - t < self._patience_s]
        for group in self._groups:
            self._broken_groups.append((now, group._pg))
            group.abort(errored=False)

    def _broken(self, error: Exception) -> SumsBroken:
        self.abort()
        return SumsBroken(_first_line(error))


class _Building(threading.Thread):
    """Connects a process group. Whoever started it may go on without it: what it has built by then is broken again."""

    def __init__(
        self,
        groups: list[ProcessGroupWrapper],
        watch: PeerWatch,
        timeout: timedelta,
        store: str,
        rank: int,
        size: int,
    ) -> None:
        super().__init__(name="connect", daemon=True)
        self.key = hashlib.blake2b(store.partition("/")[2].encode(), digest_size=32).digest()
        self._groups, self._watch, self._timeout = groups, watch, timeout
        self._store, self._rank, self._size = store, rank, size
        self._device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._lock = threading.Lock()
        self._left_behind = False
        self._built = False
        self._error = "no answer in time"

    def run(self) -> None:
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)  # each thread has its own
            board = create_store_client(self._store, timeout=self._timeout)
            board.set(f"watch/{self._rank}", self._watch.address)
            others = [board.get(f"watch/{peer}").decode() for peer in range(self._size) if peer != self._rank]
            self._watch.begin(self.key, others, self._timeout)
            for number, group in enumerate(self._groups):
                group.configure(f"{self._store}/{number}", f"member-{self._rank}", self._rank, self._size)
        except Exception as error:  # noqa: BLE001 - torch and torchft raise what they like here
            self._error = _first_line(error)
            return
        with self._lock:
            self._built = True
            if self._left_behind:
                for group in self._groups:
                    group.abort(errored=False)

    def take(self) -> tuple[list[ProcessGroupWrapper], str]:
        """The process groups, or none and why; from here on nothing is built any more."""
        with self._lock:
            self._left_behind = True
            return (self._groups if self._built else []), self._error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
