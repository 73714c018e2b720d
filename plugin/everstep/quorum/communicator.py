"""A communicator between the members of a rank column, with the same interface over Gloo and NCCL.

It wraps torch's reconfigurable communicators. These are created without peers, and then connected to the peers whose
handles they are given. Over NCCL, a communicator whose sum fails or takes too long is revoked, instead of ending the
process. This interface of torch is experimental; only this file and `private.py` use it.

Gloo has no abort: torch's does nothing, and a sum that can never complete keeps its thread, its connections and its
memory for its whole timeout. So a communicator over Gloo finds out where it listens, learns where its peers listen, and
shuts down the connections that begin or end at one of these addresses.
"""

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from everstep.quorum import private

Address = tuple[str, int]

_MAKING = threading.Lock()

NCCL_NEEDED = (2, 28)
"""First version that can revoke a communicator, which is how sums with a lost member end."""


def why_not(backend: str) -> str:
    """Return why gradients cannot be summed over `backend` in this process; empty if they can. To be asked first, as
    creating an NCCL communicator without a GPU ends the process."""
    if backend != "nccl":
        return ""
    if not torch.cuda.is_available():
        return "needs a GPU, and there is none here"
    if torch.cuda.nccl.version() < NCCL_NEEDED:
        found, needed = (".".join(map(str, version)) for version in (torch.cuda.nccl.version(), NCCL_NEEDED))
        return f"needs NCCL {needed} or later, and this is {found}"
    return ""


class Communicator:
    """Sums tensors between a fixed set of members. After a failure, create a new one.

    Args:
        backend: "gloo", or "nccl" for tensors on CUDA devices.
        store: prefix of this communicator alone in a TCPStore that every member reaches under the same address.
        rank, size: this member's rank, and the number of members.
        timeout: to connect, and to probe peers (`unreached`). A sum has its own timeout.
    """

    def __init__(
        self, backend: Literal["gloo", "nccl"], store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.on_device = backend == "nccl"
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        with _MAKING:
            before = _listening()
            if self.on_device:
                self._backend: Any = _nccl(store, rank, size, timeout)
            else:
                self._backend = c10d.ProcessGroupGloo(store, rank, size, timeout, enable_reconfigure=True)
            made = _listening() - before
        # If there are two new ones, other code began to listen meanwhile, and it is unknown which one is Gloo's.
        self._listens = made.pop() if len(made) == 1 else ("", 0)
        self._peers: dict[int, Address] = {}
        """Rank → where that other member listens, with an empty host if it does not know that."""

    def connect(self, key: bytes) -> None:
        """Connect to the other members, all of which have to call this.

        Args:
            key: name of this connection, the same on all members and never used before.

        Raises:
            RuntimeError: a member did not connect in time.
        """
        host, port = self._listens
        self._store.set(f"member/{self._rank}", f"{host} {port} {self._backend.get_reconfigure_handle()}")
        said = [self._store.get(f"member/{rank}").decode().split(" ", 2) for rank in range(self._size)]
        self._peers = {rank: (host, int(port)) for rank, (host, port, _) in enumerate(said) if rank != self._rank}
        options = c10d.ReconfigureOptions()
        options.uuid = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
        options.handles = [handle for _, _, handle in said]
        options.timeout = self._timeout
        self._backend.reconfigure(options).wait()

    def unreached(self) -> frozenset[int]:
        """Return the ranks of the members that accept no connections at their address. If no addresses are known yet,
        return the members that have not published theirs, perhaps because their link is too slow."""
        if self._peers:
            return frozenset(rank for rank, at in self._peers.items() if at[0] and not self._takes_connections(at))
        return frozenset(rank for rank in range(self._size) if not self._store.check([f"member/{rank}"]))

    def _takes_connections(self, place: Address) -> bool:
        try:
            socket.create_connection(place, self._timeout.total_seconds() / len(self._peers)).close()
        except OSError:
            return False
        return True

    def allreduce(self, tensor: torch.Tensor, timeout: timedelta) -> Any:
        """Begin to sum `tensor` in place over the members; return torch's work object. On a device, the sum is enqueued
        on the current stream; the first one blocks until the members have connected. Raises RuntimeError if broken."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timeout
        options.asyncOp = not self.on_device
        return self._backend.allreduce([tensor], options)

    def error(self) -> str:
        """Return why sums must not be used though they ended without an error; empty if no reason is known."""
        if not self.on_device:
            return ""  # with Gloo, waiting for a failed sum raises
        error = self._backend.get_error()
        return f"the communicator was revoked: {error.name}" if private.revoked(error) else ""

    def abort(self) -> None:
        """Fail the sums that are under way, here and on the peers. Does not block."""
        if self.on_device:
            # In a thread, as the abort may wait for a kernel of another communicator.
            threading.Thread(target=self._backend.abort, name="abort", daemon=True).start()
        else:
            _shut_down(self._listens, self._peers.values())


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a communicator over NCCL. The tests' stand-in device replaces this function."""
    return c10d.ProcessGroupNCCL2(store, rank, size, private.nccl_options(timeout))


def _own_sockets() -> Iterator[socket.socket]:
    """Yield this process's TCP sockets. They include Gloo's, which are not accessible otherwise. Each is a duplicate
    that is closed before the next one is yielded."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield copy


def _listening() -> set[Address]:
    """Return the addresses on which this process listens."""
    return {one.getsockname()[:2] for one in _own_sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)}


def _shut_down(listens: Address, peers: Collection[Address]) -> None:
    """Shut down the connections that a communicator accepted at `listens`, and those that it made to its peers."""
    for copy in _own_sockets():
        with contextlib.suppress(OSError):  # a listening socket, or not connected any more
            if copy.getpeername()[:2] in peers or copy.getsockname()[:2] == listens:
                copy.shutdown(socket.SHUT_RDWR)
