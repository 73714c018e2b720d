"""What workers start themselves and leave behind: processes of a dataloader, plain subprocesses.

The launcher adopts them, and they are known by not being in the session of a worker that lives. Keepers of snapshots
are meant to stay. If the launcher is killed, the kernel kills the workers, and a guard what they had started.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection

import psutil

from everstep.report import live
from everstep.run.stops import STOPS

RUN_MARK = "EVERSTEP_LAUNCHER"
"""In the environment of everything that is executed below a launcher."""
LOOK_S = 0.5
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


def fork_guard(mark: str, fd: int) -> int:
    """Fork a process that outlives this one for a moment, and then kills what was started below it; its pid. What was
    executed has `mark` as RUN_MARK in its environment; what was forked alone has this process's descriptor `fd`. Raises
    OSError if the system has no room for another process."""
    launcher_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _guard(launcher_pid, mark, fd)
        finally:
            os._exit(0)
    return pid


def _guard(launcher_pid: int, mark: str, fd: int) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in STOPS:
        signal.signal(signum, signal.SIG_IGN)
    while os.getppid() == launcher_pid:
        time.sleep(LOOK_S)
    held = os.readlink(f"/proc/self/fd/{fd}")
    while found := [one for one in psutil.process_iter() if _belongs(one, mark, fd, held) and not is_kept(one)]:
        kill(found)
        psutil.wait_procs(found, timeout=1.0)


def _belongs(process: psutil.Process, mark: str, fd: int, held: str) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get(RUN_MARK) == mark or os.readlink(f"/proc/{process.pid}/fd/{fd}") == held
    except (psutil.Error, OSError):  # it has ended, is another user's, or has no such descriptor
        return False
