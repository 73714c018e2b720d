"""The clocks and threads of a process, in virtual time, in place of the standard library's for real code that runs
unchanged (`real`). A thread is a task of the process that starts it. Each process has its own monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

from simulation.scheduler import Scheduler, Signal


class System:
    """The world that runs now. There is only one at a time."""

    def __init__(self) -> None:
        self.scheduler: Scheduler = Scheduler("none")
        self.network: Any = None
        self.judge: Any = None
        self.tail_s: Callable[[], float] = lambda: 0.0
        """Returns how many seconds the end of a sum takes."""
        self.wall_s: Callable[[], float] = lambda: 0.0
        """Returns the time on the wall clock of a lighthouse's host."""
        self.room: Callable[[int], bool] = bool
        """Returns whether a host has memory for so many bytes."""


HERE = System()


def monotonic() -> float:
    scheduler = HERE.scheduler
    return scheduler.now + scheduler.check().clock_s


def sleep(seconds: float) -> None:
    HERE.scheduler.sleep(seconds)


time = SimpleNamespace(monotonic=monotonic, sleep=sleep)
"""It has no wall clock, so code that reads one fails. torchft's lighthouse reads one and has `System.wall_s`."""


def _wait(signal: Signal, holds: Callable[[], bool], timeout: float | None) -> bool:
    return HERE.scheduler.wait(signal, holds, 1e9 if timeout is None else max(0.0, timeout))


class Thread:
    def __init__(
        self, *, target: Callable[..., Any] | None = None, name: str = "", args: Iterable[Any] = (), daemon: bool = True
    ) -> None:
        self._target, self._args = target, args
        self.ident, self._over = None, False
        self._ended = Signal()

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args)

    def start(self) -> None:
        self.ident = id(self)
        HERE.scheduler.spawn(HERE.scheduler.check(), self._run).thread = self

    def _run(self) -> None:
        self.run()
        self._over = True
        self._ended.fire(HERE.scheduler)

    def is_alive(self) -> bool:
        return self.ident is not None and not self._over

    def join(self, timeout: float | None = None) -> None:
        _wait(self._ended, lambda: self._over, timeout)


def current_thread() -> Thread | None:
    task = HERE.scheduler.current
    return task.thread if task is not None else None


class Lock:
    def __init__(self) -> None:
        self._held = False
        self._freed = Signal()

    def acquire(self) -> bool:
        if self._held:
            _wait(self._freed, lambda: not self._held, None)
        self._held = True
        return True

    def release(self, *raised: object) -> None:
        self._held = False
        if self._freed.waiters:
            self._freed.fire(HERE.scheduler)

    __enter__, __exit__ = acquire, release


class Condition(Lock):
    """`threading.Condition` with a lock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._told = 0
        self._news = Signal()

    def wait(self, timeout: float | None = None) -> bool:
        before = self._told
        self.release()
        came = _wait(self._news, lambda: self._told != before, timeout)
        self.acquire()
        return came

    def wait_for(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        until = HERE.scheduler.now + (1e9 if timeout is None else timeout)
        while not holds():
            if not self.wait(until - HERE.scheduler.now):
                return holds()
        return True

    def notify_all(self) -> None:
        self._told += 1
        self._news.fire(HERE.scheduler)


class Event:
    def __init__(self) -> None:
        self._flag = False
        self._news = Signal()

    def is_set(self) -> bool:
        return self._flag

    def set(self) -> None:
        self._flag = True
        self._news.fire(HERE.scheduler)

    def wait(self, timeout: float | None = None) -> bool:
        return _wait(self._news, self.is_set, timeout)


threading = SimpleNamespace(Thread=Thread, Lock=Lock, Condition=Condition, Event=Event, current_thread=current_thread)


class ThreadPoolExecutor(Executor):
    """`concurrent.futures.ThreadPoolExecutor` with `map` alone, for calls that do not raise."""

    def __init__(self, most: int) -> None: ...

    def map(self, call: Callable[[Any], Any], *arguments: Iterable[Any]) -> list[Any]:
        results: dict[int, Any] = {}

        def run(number: int, given: tuple[Any, ...]) -> None:
            results[number] = call(*given)

        threads = [Thread(target=run, args=numbered) for numbered in enumerate(zip(*arguments, strict=True))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[number] for number in range(len(threads))]


futures = SimpleNamespace(ThreadPoolExecutor=ThreadPoolExecutor)
