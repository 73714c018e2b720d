"""Orphan processes that dead workers leave behind: processes of a dataloader, plain subprocesses.

The launcher adopts orphans. It recognizes them by their session, which is not that of a live worker. Keepers of
snapshots are meant to stay. If the launcher is killed, the kernel kills its workers, and a guard process kills the
processes that these had started.
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
"""Environment variable of all programs that are executed below a launcher; its value identifies the launcher."""
LOOK_S = 0.5
KEPT = ("everstep.snapshot.keeper", live.__name__)
"""Modules of processes that are not killed here: keepers of snapshots wait for the next start of the run, and the
teller ends by itself when the launcher closes its stdin."""


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


def fork_guard(mark: str, fd: int) -> int:
    """Fork a guard and return its pid. When this process dies, the guard kills all processes below it but KEPT.

    It recognizes a program that was executed below this process by `mark` in RUN_MARK, and a fork by the inherited
    descriptor `fd`. Raises OSError if the system has no room for another process."""
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
    for other in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, fd}:  # such as the socket of a group's store
        with contextlib.suppress(OSError):
            os.close(other)
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
    except (psutil.Error, OSError):  # the process has ended, is another user's, or has no such descriptor
        return False
