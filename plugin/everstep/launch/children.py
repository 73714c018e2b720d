"""The processes of a launcher: forked by it, and reaped here."""

import contextlib
import os
import secrets
import select
import signal
import time
from dataclasses import dataclass

from everstep.launch import offspring
from everstep.launch.forking import Request, fork

KILL_GRACE_S = 10.0
PAUSE_S = 3.0
"""A launcher waits for its children more often than that, or it did not run."""


@dataclass(eq=False)
class Child:
    """A process of a launcher."""

    pid: int
    rank: int = 0
    """Of a worker."""
    exitcode: int | None = None
    """Negative for a signal; None while it lives."""
    ended_mono: float = 0.0

    @property
    def alive(self) -> bool:
        return self.exitcode is None

    def signal(self, signum: signal.Signals) -> None:
        """To a process that has not been reaped, so that nobody else can have its pid."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Children:
    """All processes below a launcher but those that workers start themselves. With them comes a guard (`offspring`),
    which kills what those leave behind if the launcher is killed."""

    def __init__(self) -> None:
        os.environ[offspring.RUN_MARK] = self._mark = secrets.token_hex(8)
        self._guard = Child(0, exitcode=0)  # the first one is still to come
        self._alive: dict[int, Child] = {}
        self.awake_mono = self.looked_mono = time.monotonic()
        """`looked_mono`: when the last wait ended, in monotonic seconds; `awake_mono`: from when on silence counts. A
        launcher that was stopped together with what it watches, by a batch system that suspends whole jobs for
        instance, must not take that for hung. As it may be stopped between a wait and what follows, silence is judged
        as of the wait's end."""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler it would wake nobody

    def kill_left_behind(self) -> bool:
        """Kill what processes that have ended had started; whether any of it was left."""
        left = offspring.left_behind(self._alive)
        offspring.kill(left)
        return bool(left)

    def start(self, request: Request, rank: int = 0) -> Child:
        """Fork a process. Raises OSError if there is no room for it."""
        if not self._guard.alive:
            self._guard = self._known(offspring.fork_guard(self._mark, self._wake_r))
        return self._known(fork(request), rank)

    def _known(self, pid: int, rank: int = 0) -> Child:
        self._alive[pid] = Child(pid, rank)
        return self._alive[pid]

    def wait(self, timeout_s: float) -> None:
        """Until a child has ended, a signal has come, or for so long."""
        select.select([self._wake_r], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        self._reap()
        now = time.monotonic()
        if now - self.looked_mono > PAUSE_S:
            self.awake_mono = now
        self.looked_mono = now

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, exitcode = found[0], os.waitstatus_to_exitcode(found[1])
                if child := self._alive.pop(pid, None):
                    child.exitcode, child.ended_mono = exitcode, time.monotonic()

    def kill_everything(self) -> None:
        """Nothing that was started here outlives this call, but for the keepers of snapshots, and for the process that
        tells of the run."""
        self._alive = {self._guard.pid: self._guard}
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline and self.kill_left_behind():
            self._reap()
            time.sleep(0.005)
        if self._guard.alive:
            os.kill(self._guard.pid, signal.SIGKILL)
            os.waitpid(self._guard.pid, 0)  # or a container whose first process reaps nobody keeps it
