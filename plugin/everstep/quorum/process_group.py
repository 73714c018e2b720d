"""The process group that spans replica groups: one rank column, rebuilt for every quorum whose members changed.

torchft's reconfigurable process groups do the connecting and aborting. Two things are added: connecting has a
timeout of its own, since a group that dies while it joins would otherwise hold the others for a whole collective
timeout; and every member watches the others (`everstep.quorum.watch`), so that one that dies or gives up breaks the
process group on all of them at once.
"""

import hashlib
import time
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
import torchft
from torch.distributed.distributed_c10d import AllreduceOptions, Work
from torchft.process_group import create_store_client

from everstep.quorum.watch import PeerLost, PeerWatch

SHORTEST_POLL_S, LONGEST_POLL_S = 0.0001, 0.001


class CrossGroupError(RuntimeError):
    """A collective between groups did not complete: a member died, hung or could not be reached."""


class CrossGroup:
    """Sums over rank r of every group of a quorum.

    Args:
        backend: "gloo" or "nccl".
        host: address that the other members reach this rank under.
        connect_timeout: for building the process group.
        reduce_timeout: for one sum, unless the call says otherwise.
    """

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        *,
        host: str,
        connect_timeout: timedelta,
        reduce_timeout: timedelta,
    ) -> None:
        self._connect_timeout, self._reduce_timeout = connect_timeout, reduce_timeout
        if backend == "nccl":
            self._group = torchft.ProcessGroupNCCL(timeout=reduce_timeout)
        else:
            # Gloo takes one timeout for connecting; sums carry theirs in their options.
            self._group = torchft.ProcessGroupGloo(timeout=connect_timeout)
        self._watch = PeerWatch(host, self._on_loss)
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
        key = hashlib.blake2b(store.partition("/")[2].encode(), digest_size=32).digest()
        try:
            board = create_store_client(store, timeout=self._connect_timeout)
            board.set(f"watch/{rank}", self._watch.address)
            others = [board.get(f"watch/{peer}").decode() for peer in range(size) if peer != rank]
            self._key = key
            self._watch.begin(key, others, self._connect_timeout)
            self._group.configure(store, name, rank, size)
        except PeerLost as error:
            self.abort()
            raise CrossGroupError(f"could not connect to the other groups: {error}") from error
        except Exception as error:  # torch and torchft raise what they like here
            self.abort()
            raise CrossGroupError(f"could not connect to the other groups: {_first_line(error)}") from error
        self.size = size
        if not self._key:
            # A member was lost between the watch and here.
            self.abort()
            raise CrossGroupError("a member left while the groups connected")

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
        try:
            return self._group.allreduce([tensor], options)
        except Exception as error:
            raise self._broken(error) from error

    def finish(self, work: Work) -> None:
        """Wait for a started sum. Raises CrossGroupError, after which the process group is broken.

        Polls: Gloo now and then leaves a receive waiting for its timeout although its connections were closed. The
        caller then goes on without it; it must not use the tensors of unfinished sums again.
        """
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

    def _on_loss(self, key: bytes) -> None:
        if key == self._key:
            self._key = b""
            self.size = 0
            self._break()

    def _break(self) -> None:
        """Close the connections, but keep the object until its sums have ended: its destructor waits for them."""
        now = time.monotonic()
        self._broken_groups = [(t, group) for t, group in self._broken_groups if now - t < self._patience_s]
        self._broken_groups.append((now, self._group._pg))
        self._group.abort(errored=False)

    def _broken(self, error: Exception) -> CrossGroupError:
        self.abort()
        return CrossGroupError(_first_line(error))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
