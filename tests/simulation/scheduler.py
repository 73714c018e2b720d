"""Virtual time: greenlets, one heap of events and one seeded generator, so that a seed always gives the same run."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from greenlet import getcurrent, greenlet

FOR_EVER_S = 1e8
TICK_S = 1e-6
"""Seconds of the shortest wait. A clock of floats might not move by less."""
LATENCY_S = 0.0004
"""Seconds until a waiting task notices an event, at most. The time is random, so tasks go on in any order."""


class Killed(BaseException):
    """Thrown into the tasks of a process that was killed. What they do while they unwind has no effect."""


class Process:
    """A process. All of its tasks are killed and stopped together. `clock_s`: seconds by which its monotonic clock is
    ahead of virtual time. `stopped_until`: until when nothing in it runs (SIGSTOP). `stops`: when it was stopped."""

    def __init__(self, scheduler: "Scheduler", name: str, host: str = "") -> None:
        self.scheduler, self.name, self.host = scheduler, name, host
        self.clock_s = 1000.0 * scheduler.random.random()
        self.alive = True
        self.inner: Any = None
        """For the process of a lighthouse, its `simulation.services.Inner`."""
        self.lose_next = False
        """Whether the next sum that completes on its peers does not complete here."""
        self.stopped_until = -1.0
        self.stops: list[float] = []
        self.tasks: list[Task] = []
        self.on_death: list[Callable[[], None]] = []
        self.die_after: int | None = None
        """Number of further waits after which it dies, or None."""

    @property
    def stopped(self) -> bool:
        return self.stopped_until > self.scheduler.now

    def stop(self, seconds: float) -> None:
        self.stopped_until = max(self.stopped_until, self.scheduler.now + seconds)
        self.stops.append(self.scheduler.now)

    def kill(self) -> None:
        """Kill the process (SIGKILL). To be called from outside of its own tasks."""
        if not self.alive:
            return
        self.alive = False
        for task in list(self.tasks):
            task.end()
        for tell in self.on_death:
            tell()


class Task:
    def __init__(self, process: Process, run: Callable[[], None]) -> None:
        self.process = process
        self.token = 0
        self.waits: tuple[Signal, Callable[[], bool], float] | None = None
        """While it waits: the signal, the condition, and the deadline."""
        self.done = False
        self.thread: Any = None
        self.greenlet = greenlet(self._main, parent=process.scheduler.hub)
        self._run = run

    def _main(self, _: Any = None) -> None:
        try:
            if self.process.alive:
                self._run()
        except Killed:
            pass
        finally:
            self.done = True
            self.process.tasks.remove(self)

    def end(self) -> None:
        if self.done:
            return
        if not self.greenlet:  # it never began
            self.done = True
            self.process.tasks.remove(self)
            return
        scheduler = self.process.scheduler
        before, scheduler.current = scheduler.current, self
        self.greenlet.throw(Killed)
        scheduler.current = before


class Signal:
    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[tuple[Task, int]] = []

    def fire(self, scheduler: "Scheduler") -> None:
        waiters, self.waiters = self.waiters, []
        for task, token in waiters:
            latency_s = scheduler.random.random() * LATENCY_S
            if token == task.token:  # else it has stopped waiting
                scheduler.call_in(latency_s, scheduler._resume, task, token)


class Scheduler:
    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.hub = getcurrent()
        self.current: Task | None = None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def call_at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Schedule a call, outside of all tasks, at a time."""
        self._count += 1
        heappush(self._heap, (when if when > self.now else self.now, self._count, call, args))

    def call_in(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heappush(self._heap, (self.now + seconds, self._count, call, args))

    def spawn(self, process: Process, run: Callable[[], None]) -> Task:
        task = Task(process, run)
        process.tasks.append(task)
        self.call_in(0.0, self._resume, task, 0)
        return task

    def run(self, most: int = 10**9) -> bool:
        """Run until no event is left. Return whether that took `most` events or fewer."""
        heap = self._heap
        for _ in range(most):
            if not heap:
                return True
            self.now, _, call, args = heappop(heap)
            call(*args)
        return False

    def end(self) -> None:
        """Drop all future events."""
        self._heap.clear()

    def _resume(self, task: Task, token: int) -> None:
        process = task.process
        if token != task.token or task.done or not process.alive:
            return
        if process.stopped_until > self.now:
            self.call_at(process.stopped_until, self._resume, task, token)
            return
        self.current = task
        if task.waits is not None:
            signal, holds, deadline = task.waits
            if self.now < deadline and not holds():  # asking here saves the switch to the task and back
                signal.waiters.append((task, token))
                self.current = None
                return
        task.greenlet.switch()
        self.current = None

    def _block(self) -> None:
        """Suspend the running task until it is resumed with its current token."""
        process = self.check()
        if process.die_after is not None:
            process.die_after -= 1
            if process.die_after <= 0:
                process.die_after = None
                self.call_in(0.0, process.kill)
        self.hub.switch()
        self.check()

    def check(self) -> Process:
        """Return the process whose task runs. Raises Killed if it is dead, so that its tasks have no further effect."""
        assert self.current is not None
        process = self.current.process
        if not process.alive:
            raise Killed
        return process

    def sleep(self, seconds: float) -> None:
        self.check()
        task: Any = self.current
        task.token += 1
        self.call_in(seconds, self._resume, task, task.token)
        self._block()

    def pause(self, low: float, high: float) -> None:
        self.sleep(low + (high - low) * self.random.random())

    def wait(self, signal: Signal, holds: Callable[[], bool], timeout: float) -> bool:
        """Wait for `holds`, called whenever `signal` fires. Return whether it was true within `timeout` seconds."""
        held, task = holds(), self.current
        self.check()
        if held or timeout <= 0:
            return held
        assert task is not None
        deadline = self.now + (timeout if timeout > TICK_S else TICK_S)
        task.token += 1
        if timeout < FOR_EVER_S:
            self.call_at(deadline, self._resume, task, task.token)
        signal.waiters.append((task, task.token))
        task.waits = signal, holds, deadline
        try:
            self._block()
        finally:
            task.waits = None
        return holds()
