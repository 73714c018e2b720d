"""What workers start themselves and leave behind: processes of a dataloader, plain subprocesses.

The launcher adopts them, and they are known by not being in the session of a worker that lives. Keepers of snapshots
are meant to stay. If the launcher is killed, the kernel kills the workers, and the guard what they had started: it is
known by the session that a worker led, or by a variable that was in its environment when it was executed.
"""

import contextlib
import mmap
import os
import secrets
import signal
import time
from collections.abc import Collection, Set

import psutil

from everstep.report import live
from everstep.run.stops import STOPS

RUN_MARK = "EVERSTEP_LAUNCHER"
"""In the environment of everything that is executed below a launcher."""
LOOK_S, MOST = 0.5, 8192
KEPT = ("everstep.snapshot.keeper", live.__name__)
"""Modules of processes that end otherwise: keepers of snapshots wait for the next start, the page's writer for its
server."""


def left_behind(known: Collection[int]) -> list[psutil.Process]:
    """The orphans of processes that have ended, with all below them. This process is a subreaper: they are its
    children.

    `known` are those that it has started itself and that live, each of which leads a session.
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
            process.send_signal(signal.SIGKILL)  # psutil looks first whether the pid is another's by now


def is_kept(process: psutil.Process) -> bool:
    """Whether it is to be left alone."""
    try:
        return any(module in process.cmdline() for module in KEPT)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


class Guard:
    """A process that outlives this one for a moment, and then kills what this one's children have started.

    Both have a table of those that live.
    """

    def __init__(self) -> None:
        launcher_pid, mark = os.getpid(), secrets.token_hex(8)
        os.environ[RUN_MARK] = mark
        self._children = memoryview(mmap.mmap(-1, 8 * MOST)).cast("q")
        self.pid = os.fork()
        if not self.pid:
            try:
                _guard(launcher_pid, mark, self._children)
            finally:
                os._exit(0)

    def watch(self, pid: int) -> None:
        """A child was started."""
        self._children[self._children.tolist().index(0)] = pid

    def forget(self, pid: int) -> None:
        """A child has ended."""
        self._children[self._children.tolist().index(pid)] = 0

    def close(self) -> None:
        """There is nothing to guard any more."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _guard(launcher_pid: int, mark: str, children: memoryview) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    while os.getppid() == launcher_pid:
        time.sleep(LOOK_S)
    sessions = set(children) - {0}
    while found := [one for one in psutil.process_iter() if _belongs(one, sessions, mark) and not is_kept(one)]:
        kill(found)
        psutil.wait_procs(found, timeout=1.0)


def _belongs(process: psutil.Process, sessions: Set[int], mark: str) -> bool:
    try:
        if process.uids().real != os.geteuid():
            return False
        started_here = os.getsid(process.pid) in sessions or process.environ().get(RUN_MARK) == mark
        return started_here and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # it has ended
        return False
