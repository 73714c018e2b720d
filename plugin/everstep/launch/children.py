"""The processes of a launcher: forked by it, and reaped here."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from everstep.launch import offspring
from everstep.launch.forking import Request, fork

KILL_GRACE_S = 10.0


@dataclass(eq=False)
class Child:
    """A process of a launcher."""

    index: int
    """Which of its kind: a rank's."""
    on_end: Callable[["Child"], None]
    """Called when it has ended."""
    pid: int = 0
    """0 until it is started."""
    exitcode: int | None = None
    """Negative for a signal."""
    ended_mono: float = 0.0

    @property
    def alive(self) -> bool:
        return self.pid > 0 and self.exitcode is None

    def signal(self, signum: signal.Signals) -> None:
        """To a process that has not been reaped, so that nobody else can have its pid."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Children:
    """All processes below a launcher but those that workers start themselves. With them comes a guard (`offspring`),
    which kills what those leave behind if the launcher is killed."""

    def __init__(self) -> None:
        self._guard = offspring.Guard()
        self._alive: dict[int, Child] = {}
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._old_handler = signal.signal(signal.SIGCHLD, lambda *_: None)

    def left_behind(self) -> list[psutil.Process]:
        """What processes that have ended had started, and what is left of it."""
        return offspring.left_behind({*self._alive, self._guard.pid})

    def start(self, child: Child, request: Request) -> None:
        """Fork it. Raises OSError if there is no room for it."""
        child.pid = fork(request)
        self._alive[child.pid] = child
        self._guard.watch(child.pid)

    def wait(self, timeout_s: float) -> None:
        """Until a child has ended, a signal has come, or for so long; call back what has ended."""
        select.select([self._wake_r], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, exitcode = found[0], os.waitstatus_to_exitcode(found[1])
                if child := self._alive.pop(pid, None):
                    self._guard.forget(pid)
                    child.exitcode, child.ended_mono = exitcode, time.monotonic()
                    child.on_end(child)

    def kill_everything(self) -> None:
        """Nothing that was started here outlives this call, but for the keepers of snapshots, and for the process that
        tells of the run."""
        self._alive.clear()
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline:
            below = psutil.Process().children(recursive=True)
            left = [one for one in below if one.pid != self._guard.pid and not offspring.is_kept(one)]
            if not left:
                return
            offspring.kill(left)
            self._reap()
            time.sleep(0.005)

    def close(self) -> None:
        """Give the signal back that this object takes, and let the guard go."""
        self._guard.close()
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGCHLD, self._old_handler)
        os.close(self._wake_r)
        os.close(self._wake_w)
