"""The child processes of a launcher: forked, watched, reaped and killed."""

import contextlib
import os
import secrets
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep.launch import orphans
from everstep.launch.forking import Main, fork

KILL_GRACE_S = 10.0
PAUSE_S = 3.0
"""Seconds between two waits from which on the launcher itself must have been stopped or blocked."""


@dataclass(eq=False)
class Child:
    """A process that a launcher forked."""

    pid: int
    rank: int = 0
    """The rank, if it is a worker."""
    exitcode: int | None = None
    """The exit status, or minus the number of the signal that killed it; None while it lives."""
    ended_mono: float = 0.0

    @property
    def alive(self) -> bool:
        return self.exitcode is None

    def signal(self, signum: signal.Signals) -> None:
        """Send a signal, unless the process has been reaped: its pid may then belong to another process."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Children:
    """The processes that a launcher forks, and a guard (`orphans.fork_guard`). If the launcher is killed, the guard
    kills the processes that workers had started themselves."""

    def __init__(self) -> None:
        os.environ[orphans.RUN_MARK] = self._mark = secrets.token_hex(8)
        self._guard = Child(0, exitcode=0)  # a dead one: the first `start` forks the guard
        self._alive: dict[int, Child] = {}
        self.awake_mono = self.looked_mono = time.monotonic()
        """Monotonic seconds. `looked_mono`: the end of the last wait, as of which silence is judged, because the
        launcher may be stopped between a wait and the check after it. `awake_mono`: silence before it does not count.
        If a batch system suspends a whole job, the launcher stops together with its workers, and must not take them
        for hung afterwards."""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the signal would not end a wait

    def kill_left_behind(self) -> bool:
        """Kill the processes that dead workers left behind, and return whether there were any."""
        left = orphans.left_behind(self._alive)
        orphans.kill(left)
        return bool(left)

    def start(self, main: Main, log: Path, env: Mapping[str, str] | None = None, rank: int = 0) -> Child:
        """Fork a process (see `forking.fork`). Raises OSError if the system has no room for another."""
        if not self._guard.alive:
            self._guard = self._register(orphans.fork_guard(self._mark, self._wake_r))
        return self._register(fork(main, log, env or {}), rank)

    def _register(self, pid: int, rank: int = 0) -> Child:
        self._alive[pid] = Child(pid, rank)
        return self._alive[pid]

    def wait(self, timeout_s: float) -> None:
        """Wait until a child ends or a signal comes, for `timeout_s` at most. Reaps the children that have ended."""
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
        """Kill all processes that were started here, and those that they started, except keepers and the teller."""
        self._alive = {self._guard.pid: self._guard}
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline and self.kill_left_behind():
            self._reap()
            time.sleep(0.005)
        if self._guard.alive:
            os.kill(self._guard.pid, signal.SIGKILL)
            os.waitpid(self._guard.pid, 0)  # else a zombie stays in a container whose first process reaps none
