"""In place of NCCL between groups: `process_group = "nccl"` gives a column whose sums run on the device's streams, the
caller's current one. As with NCCL, a communicator connects to its peers in its first collective, where the host waits
until all of them have come. A collective that fails, or `abort`, revokes it."""

import os
import threading
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from late.collectives import give, inside, work_of


def note_rings(size: int) -> None:
    """Write the thread that a communicator's first collective was made in to rings-PID.txt, if there is a log."""
    if size > 1 and (folder := os.environ.get("EVERSTEP_TEST_DEVICE_LOG")):
        with open(f"{folder}/rings-{os.getpid()}.txt", "a") as file:
            file.write(threading.current_thread().name + "\n")


class Column:
    """What `everstep.quorum.communicator` makes for "nccl"."""

    def __init__(self, module: ModuleType, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._module, self._size = module, size
        before = module._listening()
        self._gloo = module.c10d.ProcessGroupGloo(store, rank, size, timeout, enable_reconfigure=True)
        made = module._listening() - before
        self._listens = made.pop() if len(made) == 1 else ("", 0)
        self._peers: list[tuple[str, int]] = []
        self._options: Any = None
        self._connecting = threading.Lock()
        self._revoked = False

    def get_reconfigure_handle(self) -> str:
        return f"{self._listens[0]} {self._listens[1]} {self._gloo.get_reconfigure_handle()}"

    def reconfigure(self, options: Any) -> "Column":
        said = [handle.split(" ", 2) for handle in options.handles]
        self._peers = [(host, int(port)) for host, port, _ in said]
        options.handles = [handle for _, _, handle in said]
        self._options = options
        return self

    def wait(self) -> None:
        """Of `reconfigure`: nothing is under way."""

    def _connect(self) -> None:
        with self._connecting:
            if self._revoked:
                raise RuntimeError("the communicator was revoked")
            if self._options is not None:
                note_rings(self._size)
                self._gloo.reconfigure(self._options).wait()
                self._options = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._connect()
        [own] = inside(tensors)
        options.asyncOp = True
        return self._give("column sum", [], tensors, lambda: self._gloo.allreduce([own], options).wait())

    def allgather(self, parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> Any:
        self._connect()
        own, into = inside(tensors), inside(parts[0])
        options.asyncOp = True
        return self._give("column gather", tensors, parts[0], lambda: self._gloo.allgather([into], own, options).wait())

    def _give(self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor], call: Any) -> Any:
        def carry_out() -> None:
            try:
                if not self._revoked:
                    call()
            except RuntimeError:
                self._revoked = True

        give(what, reads, writes, carry_out)
        return work_of([*reads, *writes])

    def get_error(self) -> Any:
        kinds = self._module.torch._C._distributed_c10d.ErrorType
        return kinds.COMM_ERROR if self._revoked else kinds.SUCCESS

    def abort(self) -> None:
        self._revoked = True
        self._module._shut_down(self._listens, self._peers)


def replace(module: ModuleType) -> None:
    """Have everstep.quorum.communicator make columns of these for "nccl", and find no fault with it."""
    module._nccl = lambda *given: Column(module, *given)
    before = module.why_not
    module.why_not = lambda backend, *rest, **others: "" if backend == "nccl" else before(backend, *rest, **others)
