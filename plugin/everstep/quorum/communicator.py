"""One communicator between the members of a rank column, over Gloo or NCCL by the same calls.

torch's reconfigurable communicators: made without peers, connected to those whose handles they are given, within a
timeout of the call's own. With NCCL they live in the one implementation that torch's own process groups use, and one
whose sum fails or takes too long is revoked, instead of ending the process. The calls are experimental in torch;
nothing else of the plugin knows them.

Gloo has no abort: torch's is empty, and a sum that nobody will complete keeps its thread, its connections and its
memory for its whole timeout. So a communicator over Gloo knows where it listens, is told where its peers do, and
shuts these connections down.
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
"""The first that can revoke a communicator, which is how sums of a lost member end."""


def why_not(backend: str) -> str:
    """Why gradients cannot be summed over `backend` in this process, or nothing. Made without a GPU, a communicator
    over NCCL ends the process."""
    if backend != "nccl":
        return ""
    if not torch.cuda.is_available():
        return "needs a GPU, and there is none here"
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        return "needs a torch with NCCL"
    if torch.cuda.nccl.version() < NCCL_NEEDED:
        found, needed = (".".join(map(str, version)) for version in (torch.cuda.nccl.version(), NCCL_NEEDED))
        return f"needs NCCL {needed} or later, and this is {found}"
    return ""


class Communicator:
    """Sums tensors between members. Made for one set of members; what comes after a failure is another one.

    Args:
        backend: "gloo", or "nccl" for tensors on CUDA devices.
        store: of this communicator alone, on a TCPStore that every member reaches under the same address.
        rank, size: this member's place, and how many there are.
        timeout: for each message while members connect; a sum has its own.
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
        # Two at once: somebody else began to listen, and nobody knows which is which.
        self._listens = made.pop() if len(made) == 1 else ("", 0)
        self._peers: dict[int, Address] = {}
        """By rank, where the other members listen; without host where that is not known."""

    def connect(self, key: bytes) -> None:
        """Connect to the other members, which do the same.

        Args:
            key: of these members and this occasion; never used before.

        Raises:
            RuntimeError: some member did not come, or not in time.
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
        """Ranks of the members that do not take connections where they said that they listen, or have not said where
        yet: a link may be too slow for them to come in time."""
        if self._peers:
            return frozenset(
                rank for rank, place in self._peers.items() if place[0] and not self._takes_connections(place)
            )
        return frozenset(rank for rank in range(self._size) if not self._store.check([f"member/{rank}"]))

    def _takes_connections(self, place: Address) -> bool:
        try:
            socket.create_connection(place, self._timeout.total_seconds() / len(self._peers)).close()
        except OSError:
            return False
        return True

    def allreduce(self, tensor: torch.Tensor, timeout: timedelta) -> Any:
        """Begin to sum `tensor` in place over the members; the work. On a device the sum goes to the current stream,
        after what is there already. Raises RuntimeError if the communicator is broken."""
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        options.timeout = timeout
        options.asyncOp = not self.on_device
        return self._backend.allreduce([tensor], options)

    def error(self) -> str:
        """Why sums that ended are not to be believed; empty where nothing is known against them."""
        if not self.on_device:
            return ""  # a work of Gloo raises what went wrong with it
        error = self._backend.get_error()
        return f"the communicator was revoked: {error.name}" if private.revoked(error) else ""

    def abort(self) -> None:
        """Fail what is under way, here and on the peers. Waits for nothing."""
        if self.on_device:
            # It may wait behind a kernel of another communicator.
            threading.Thread(target=self._backend.abort, name="abort", daemon=True).start()
        else:
            _shut_down(self._listens, self._peers.values())


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A device's communicator; the stand-in device of the tests has another."""
    return c10d.ProcessGroupNCCL2(store, rank, size, private.nccl_options(timeout))


def _own_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, Gloo's among them, to which it gives no access. Each as a copy, which is closed again
    when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or none of a socket
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as copy:
                    if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                        yield copy


def _listening() -> set[Address]:
    """Where this process listens."""
    listens = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    return {copy.getsockname()[:2] for copy in _own_sockets() if copy.getsockopt(*listens)}


def _shut_down(listens: Address, peers: Collection[Address]) -> None:
    """End the connections that were accepted where a communicator listens, and those to where its peers do."""
    for copy in _own_sockets():
        with contextlib.suppress(OSError):  # listens, or is not connected any more
            if copy.getpeername()[:2] in peers or copy.getsockname()[:2] == listens:
                copy.shutdown(socket.SHUT_RDWR)
