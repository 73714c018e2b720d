"""A device that works late: a stand-in for an accelerator, on a CPU.

It has streams, and does what they were given in their order, but whatever else is allowed: a stream that was made later
goes first, nothing runs while the device is held, and a stream can be held alone. In-place copies, zeros, additions and
products under it are queued on the calling thread's stream instead of done. Sums are works of several kinds.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

QUEUED = {
    torch.ops.aten.copy_.default: lambda to, of, non_blocking=False: to.copy_(of),
    torch.ops.aten.zero_.default: lambda to: to.zero_(),
    torch.ops.aten.mul_.Tensor: lambda to, by: to.mul_(by),
    torch.ops.aten.add_.Tensor: lambda to, by: to.add_(by),
    torch.ops.aten.add.out: lambda one, other, out: torch.add(one, other, out=out),
}
MAIN, SUMS = "main", "sums"


class LateEvent:
    def __init__(self, device: "LateDevice") -> None:
        self._device, self.reached = device, threading.Event()

    def synchronize(self) -> None:
        self._device.blocked.add(threading.get_ident())
        self.reached.wait()


class LateDevice(TorchDispatchMode):
    """Implements `everstep.step.streams.Streams`. `blocked`: the threads that ever waited for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked: set[int] = set()
        self._lock = threading.Condition()
        self._streams: dict[str, deque[Callable[[], object] | LateEvent]] = {MAIN: deque()}
        self._mine = threading.local()
        self._held: set[str] = set()
        self._closed = False
        threading.Thread(target=self._work, daemon=True).start()

    # Streams

    def current(self) -> str:
        return getattr(self._mine, "stream", MAIN)

    def record(self) -> LateEvent:
        event = LateEvent(self)
        self.give(event.reached.set)
        return event

    def wait(self, event: LateEvent | None) -> None:
        if event is not None:
            self.give(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """What is queued keeps it."""

    def of_sums(self):
        return self.on(SUMS)

    # The device

    @contextlib.contextmanager
    def on(self, stream: str):
        """Makes a stream the calling thread's."""
        before, self._mine.stream = self.current(), stream
        try:
            yield
        finally:
            self._mine.stream = before

    def give(self, task: Callable[[], object] | LateEvent) -> None:
        with self._lock:
            self._streams.setdefault(self.current(), deque()).append(task)
            self._lock.notify_all()

    def hold(self, *streams: str) -> None:
        with self._lock:
            self._held |= set(streams)

    def go_on(self) -> None:
        with self._lock:
            self._held.clear()
            self._lock.notify_all()

    def idle(self) -> None:
        """Wait until all that may run has run."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._next() is None, 60)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _next(self) -> str | None:
        """The stream whose turn it is: the newest that may."""
        for name in reversed(self._streams):
            tasks = self._streams[name]
            if not tasks or name in self._held:
                continue
            if isinstance(tasks[0], LateEvent) and not tasks[0].reached.is_set():
                continue
            return name
        return None

    def _work(self) -> None:
        with self._lock:
            while not self._closed:
                name = self._next()
                if name is None:
                    self._lock.wait()
                    continue
                task = self._streams[name][0]
                if not isinstance(task, LateEvent):
                    task()
                self._streams[name].popleft()
                self._lock.notify_all()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in QUEUED:
            return func(*args, **(kwargs or {}))
        given = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in (*args, *(kwargs or {}).values())]
        self.give(lambda: QUEUED[func](*given))
        return (kwargs or {}).get("out", args[0])
