"""Collectives on the device: "lateccl", torch.distributed's backend for "late". Each process group has a stream of its
own, like NCCL's. A collective comes after what its caller's stream was given, and Gloo carries it out on its own
stream's thread, late like everything. `Work.wait` has the current stream wait, and not the host. What fails ends the
process, as NCCL's watchdog does."""

import ctypes
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

Call = Callable[[], object]
_calls: dict[int, Call] = {}
"""That streams were given and have not come to yet."""
_numbers = itertools.count()


@ctypes.CFUNCTYPE(None, ctypes.c_int64)
def _make_call(number: int) -> None:
    _calls.pop(number)()


_ADDRESS = ctypes.cast(_make_call, ctypes.c_void_p).value


def give(what: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], call: Call) -> None:
    """Have the current stream make a call of Python's when its turn comes; `reads`, `writes`: what it touches."""
    number = next(_numbers)
    _calls[number] = call
    torch.ops.late.give(_ADDRESS, number, what, list(reads), list(writes))


def inside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory, as a stream's thread may use it."""
    return [torch.ops.late.inside(tensor.detach()) for tensor in tensors]


def here() -> torch.Event:
    """What the current stream was given so far."""
    event = torch.Event(device="late")
    event.record(torch.accelerator.current_stream())
    return event


def register() -> None:
    from torch import distributed as dist

    dist.Backend.register_backend("lateccl", LateBackend, devices=["late"])


def work_of(tensors: Sequence[torch.Tensor], *, host: bool = False) -> Any:
    """torch.distributed's Work, without a future. `tensors` are kept until somebody waits; `host`: so does the host."""
    return LateWork(list(tensors), host)


class LateWork(c10d.Work):
    def __init__(self, tensors: list[torch.Tensor], host: bool) -> None:
        super().__init__()
        self._event, self._kept, self._host = here(), tensors, host

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        if self._host:
            self._event.synchronize()
        self._kept.clear()
        return True


def plain_sum(op: Any) -> tuple[Any, float]:
    """The reduction that Gloo knows, and what its result is multiplied by."""
    kind, factor = op.__getstate__() if isinstance(op, c10d.ReduceOp) else (op, None)
    if kind == c10d.ReduceOp.PREMUL_SUM:
        return c10d.ReduceOp.SUM, float(factor)
    return kind, 1.0


class LateBackend(c10d.Backend):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._size, self._timeout = size, timeout
        self._stream: torch.Stream | None = None
        self.supports_splitting_ = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "lateccl"

    name = getBackendName

    @property
    def options(self) -> Any:
        return c10d.Backend.Options("lateccl", self._timeout)

    def _run(self, what, reads, writes, call, *, host: bool = False) -> Any:
        """`call`: of the tensors of `reads` and of those of `writes`, each as a list; gives Gloo's Work or None."""
        ready, before = here(), torch.accelerator.current_stream()
        self._stream = self._stream or torch.Stream(device="late")
        torch.accelerator.set_stream(self._stream)
        try:
            torch.accelerator.current_stream().wait_event(ready)
            arrived, left = inside(reads), inside(writes)

            def carry_out() -> None:
                try:
                    if (work := call(arrived, left)) is not None:
                        work.wait()
                except BaseException:  # noqa: BLE001 - what a stream has begun it cannot take back
                    print(f"lateccl: {what} failed", file=sys.stderr)
                    traceback.print_exc()
                    sys.stderr.flush()
                    os.kill(os.getpid(), signal.SIGABRT)

            give(what, reads, writes, carry_out)
            return work_of([*reads, *writes], host=host)
        finally:
            torch.accelerator.set_stream(before)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        op, factor = plain_sum(opts.reduceOp)

        def call(_: Any, own: list[torch.Tensor]) -> Any:
            opts.reduceOp, opts.asyncOp = op, True
            for one in own:
                self._gloo.allreduce([one], opts).wait()
                if factor != 1.0:
                    one.mul_(factor)

        return self._run("allreduce", [], tensors, call)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self._run("broadcast", [], tensors, lambda _, own: self._gloo.broadcast(own, opts))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Any:
        options = opts or c10d.AllgatherOptions()
        call = lambda own, parts: self._gloo.allgather([parts], own, options)  # noqa: E731
        return self._run("allgather", inputs, outputs[0], call)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        call = lambda own, parts: self._gloo.gather([parts] if outputs else [], own, opts)  # noqa: E731
        return self._run("gather", inputs, outputs[0] if outputs else [], call)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Any:
        call = lambda parts, own: self._gloo.scatter(own, [parts] if inputs else [], opts)  # noqa: E731
        return self._run("scatter", inputs[0] if inputs else [], outputs, call)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        def call(mine: list[torch.Tensor], whole: list[torch.Tensor]) -> Any:
            parts = list(whole[0].view(-1).chunk(self._size))
            return self._gloo.allgather([parts], [mine[0].reshape(-1)], opts or c10d.AllgatherOptions())

        return self._run("all_gather_single", [own], [output], call)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Its Work is the last one's."""
        return [self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        op, factor = plain_sum(opts.reduceOp)

        def call(whole: list[torch.Tensor], mine: list[torch.Tensor]) -> Any:
            options = c10d.AllreduceOptions()
            options.reduceOp = op
            total = whole[0].clone().reshape(-1)
            self._gloo.allreduce([total], options).wait()
            part = total.chunk(self._size)[self.rank()]
            mine[0].view(-1).copy_(part if factor == 1.0 else part * factor)

        return self._run("reduce_scatter_single", [own], [output], call)

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        return self._run("barrier", [], [], lambda *_: self._gloo.barrier(), host=True)

    def abort(self) -> None:
        pass

    shutdown = abort

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._gloo.set_timeout(timeout)

    _set_default_timeout = set_timeout
