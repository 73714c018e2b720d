"""The child processes of a launcher: forked, watched, reaped and killed.

The launcher adopts the orphans that dead workers leave behind: processes of a dataloader, plain subprocesses. It
recognizes them by their session, which is not that of a live worker. Keepers of snapshots are meant to stay.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

import psutil

from everstep.launch.forking import ForkRequest, fork
from everstep.report import live

KILL_GRACE_S = 10.0
PAUSE_S = 3.0
"""Seconds between two waits from which on the launcher itself must have been stopped or blocked."""
KEPT = ("everstep.snapshot.keeper", live.__name__)
"""Modules of processes that are not killed here: keepers of snapshots wait for the next start of the run, and the
teller ends by itself when the launcher closes its stdin."""


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
    """The processes that a launcher forks."""

    def __init__(self) -> None:
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
        left = left_behind(self._alive)
        kill(left)
        return bool(left)

    def start(self, request: ForkRequest, rank: int = 0) -> Child:
        """Fork a process. Raises OSError if the system has no room for another."""
        child = Child(fork(request), rank)
        self._alive[child.pid] = child
        return child

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
        self._alive = {}
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline and self.kill_left_behind():
            self._reap()
            time.sleep(0.005)


def left_behind(known: Collection[int]) -> list[psutil.Process]:
    """Return the orphans of dead processes, with all their descendants. This process is a subreaper, so orphans are its
    children.

    `known`: pids of the live processes that this one forked itself, each of which leads a session.
    """
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if child.pid not in known and os.getsid(child.pid) not in known and not is_kept(child):
                found |= {one.pid: one for one in (child, *child.children(recursive=True)) if not is_kept(one)}
    return list(found.values())


def kill(processes: Collection[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signal.SIGKILL)  # psutil first checks that the pid is still of this process


def is_kept(process: psutil.Process) -> bool:
    """Return whether a process runs one of the KEPT modules and should not be killed."""
    try:
        return any(module in process.cmdline() for module in KEPT)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
