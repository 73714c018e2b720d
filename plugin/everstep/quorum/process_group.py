"""The process group that spans replica groups: one rank column, rebuilt for every quorum whose members changed.

torchft's reconfigurable process groups do the connecting and aborting. Two things are added: every member watches the
others (`everstep.quorum.watch`), so that one that dies or gives up breaks the process group on all of them at once,
also while it is being built; and building happens in a thread that can be left behind, since Gloo now and then waits
without end for a peer that was killed while the two connected.
"""

import hashlib
import threading
import time
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import torchft
from torch.distributed.distributed_c10d import AllreduceOptions, Work
from torchft.process_group import ProcessGroupWrapper, create_store_client

from everstep.quorum.watch import PeerWatch

SHORTEST_POLL_S, LONGEST_POLL_S = 0.0001, 0.001
CONNECT_POLL_S = 0.01


class CrossGroupError(RuntimeError):
    """A collective between groups did not complete: a member died, hung or could not be reached."""


class CrossGroup:
    """Sums over rank r of every group of a quorum.

    Args:
        backend: "gloo" or "nccl".
        host: address that the other members reach this rank under.
        connect_timeout: for building the process group.
        reduce_timeout: for one sum, unless the call says otherwise.
        token: of the run; admits members to each other's watch.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        *,
        host: str,
        connect_timeout: timedelta,
        reduce_timeout: timedelta,
        token: bytes,
    ) -> None:
        self._backend = backend
        self._connect_timeout, self._reduce_timeout = connect_timeout, reduce_timeout
        self._group: ProcessGroupWrapper | None = None
        self._watch = PeerWatch(host, self._on_loss, token)
        self._key = b""
        self._broken_groups: list[tuple[float, object]] = []
        self._patience_s = 2 * reduce_timeout.total_seconds()
        self.size = 0

    @property
    def connected(self) -> bool:
        return self.size > 0

    def connect(self, store: str, *, rank: int, size: int, name: str) -> None:
        """Build the process group anew.

        Args:
            store: `host:port/prefix` of a TCPStore that all members reach; the prefix never used before.
            rank: place of this group in the quorum.
            size: groups in the quorum.
            name: this group's name, for logs.

        Raises:
            CrossGroupError: some member did not arrive in time.
        """
        self.abort()
        building = _Building(self._new_group(), self._watch, self._connect_timeout, store, rank, size, name)
        self._key = building.key
        building.start()
        # Members may use up the timeout once while they wait for each other, and once while they connect.
        give_up = time.monotonic() + 2 * self._connect_timeout.total_seconds()
        while building.is_alive() and self._key and time.monotonic() < give_up:
            building.join(CONNECT_POLL_S)
        group, error = building.take()
        if group is not None:
            self._group, self.size = group, size
        lost = not self._key
        if lost or group is None:
            self.abort()
            reason = "a member left while the groups connected"
            raise CrossGroupError(reason if lost else f"could not connect to the other groups: {error}")

    def sum_async(self, tensor: torch.Tensor, timeout: timedelta | None = None) -> Work:
        """Start to sum `tensor` in place over the groups; any dtype and device the backend takes.

        Raises:
            CrossGroupError: the process group is broken already.
        """
        if not self.connected:
            raise CrossGroupError("not connected")
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timeout or self._reduce_timeout
        assert self._group is not None, "connected"
        try:
            return self._group.allreduce([tensor], options)
        except Exception as error:
            raise self._broken(error) from error

    def finish(self, work: Work) -> None:
        """Wait for a started sum. Raises CrossGroupError, after which the process group is broken.

        Polls: Gloo now and then leaves a receive waiting for its timeout although its connections were closed. The
        caller then goes on without it; it must not use the tensors of unfinished sums again.
        """
        assert self._group is not None, "a sum was started"
        pause_s = SHORTEST_POLL_S
        while not work.is_completed():
            if not self.connected:
                raise CrossGroupError("a member of the quorum was lost")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        try:
            work.wait()
            error = self._group.errored()
        except Exception as raised:
            raise self._broken(raised) from raised
        if error is not None:
            raise self._broken(error) from error

    def sum(self, tensor: torch.Tensor, timeout: timedelta | None = None) -> torch.Tensor:
        """Sum `tensor` in place over the groups and wait for it. Raises CrossGroupError."""
        self.finish(self.sum_async(tensor, timeout))
        return tensor

    def gather_bytes(self, mine: bytes, *, rank: int, device: torch.device) -> list[bytes]:
        """What every group gave, in rank order. Raises CrossGroupError."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=device)
        lengths[rank] = len(mine)
        sizes = self.sum(lengths).tolist()
        begin, everything = sum(sizes[:rank]), torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        if not sum(sizes):
            return [b""] * self.size
        if mine:
            everything[begin : begin + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        parts = self.sum(everything).cpu().split(sizes)
        return [part.numpy().tobytes() for part in parts]

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

    def _new_group(self) -> ProcessGroupWrapper:
        if self._backend == "nccl":
            return torchft.ProcessGroupNCCL(timeout=self._reduce_timeout)
        # Gloo takes one timeout for connecting; sums carry theirs in their options.
        return torchft.ProcessGroupGloo(timeout=self._connect_timeout)

    def _on_loss(self, key: bytes) -> None:
        if key == self._key:
            self._key = b""
            self.size = 0
            self._break()

    def _break(self) -> None:
        """Close the connections, but keep the object until its sums have ended: its destructor waits for them."""
        now = time.monotonic()
        self._broken_groups = [(t, group) for t, group in self._broken_groups if now - t < self._patience_s]
        if self._group is not None:
            self._broken_groups.append((now, self._group._pg))
            self._group.abort(errored=False)

    def _broken(self, error: Exception) -> CrossGroupError:
        self.abort()
        return CrossGroupError(_first_line(error))


class _Building(threading.Thread):
    """Connects a process group. Whoever started it may go on without it: what it has built by then is broken again."""

    def __init__(
        self,
        group: ProcessGroupWrapper,
        watch: PeerWatch,
        timeout: timedelta,
        store: str,
        rank: int,
        size: int,
        name: str,
    ) -> None:
        super().__init__(name="connect", daemon=True)
        self.key = hashlib.blake2b(store.partition("/")[2].encode(), digest_size=32).digest()
        self._group, self._watch, self._timeout = group, watch, timeout
        self._store, self._rank, self._size, self._group_name = store, rank, size, name
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
            self._group.configure(self._store, self._group_name, self._rank, self._size)
        except Exception as error:  # noqa: BLE001 - torch and torchft raise what they like here
            self._error = _first_line(error)
            return
        with self._lock:
            self._built = True
            if self._left_behind:
                self._group.abort(errored=False)

    def take(self) -> tuple[ProcessGroupWrapper | None, str]:
        """The process group, or None and why; from here on nothing is built any more."""
        with self._lock:
            self._left_behind = True
            return (self._group if self._built else None), self._error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
