"""What workers start themselves and leave behind: processes of a dataloader, plain subprocesses.

While the launcher lives it adopts them, and they are known by not being in the session of a worker that lives. The
guard of a launcher that was killed knows them by the session that their worker led, by a variable that was in its
environment when they were executed, or by descending from one that is known so. Keepers of snapshots are meant to stay.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from everstep.report import live
from everstep.run.lifeline import die_with_parent
from everstep.run.stops import STOPS

RUN_MARK = "EVERSTEP_LAUNCHER"
"""In the environment of everything that is executed below a launcher."""
KEPT = ("everstep.snapshot.keeper", live.__name__, "everstep.chaos.signals")
"""Modules of processes that end otherwise: keepers of snapshots wait for the next start, the page's writer for its
server, those that end a fault for their injector."""


def left_behind(known: Collection[int]) -> list[psutil.Process]:
    """The orphans of processes that have ended, with all below them. This process is a subreaper: they are its
    children.

    `known` are those that it has started itself and that live, each of which leads a session.
    """
    found: dict[int, psutil.Process] = {}
    for pid in _children() - set(known):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            child = psutil.Process(pid)
            if os.getsid(pid) not in known and not is_kept(child):
                found |= {one.pid: one for one in (child, *child.children(recursive=True)) if not is_kept(one)}
    return list(found.values())


def _children() -> set[int]:
    """Of this process, without a look at all others if the kernel can tell."""
    try:
        told = [(task / "children").read_text() for task in Path("/proc/self/task").iterdir()]
    except FileNotFoundError:
        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for line in told for pid in line.split()}


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
    """A process that outlives the launcher for a moment: it kills what the workers of a killed launcher have started.
    The kernel kills the workers.

    It is told their pids, each the name of a session, over a pipe that ends with the launcher."""

    def __init__(self) -> None:
        launcher_pid, mark = os.getpid(), f"{RUN_MARK}={os.environ[RUN_MARK]}"
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(told)
            return
        try:
            os.close(self._tell)
            os.setsid()
            signal.set_wakeup_fd(-1)
            for signum in STOPS:
                signal.signal(signum, signal.SIG_IGN)
            die_with_parent(launcher_pid, signal.SIGCONT)
            _guard(told, mark)
        finally:
            os._exit(0)

    def watch(self, pid: int) -> None:
        """A child was started."""
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Nothing is left of a child, nor of what it started."""
        self._say(f"-{pid}\n")

    def let_go(self) -> None:
        """It has died, or this is a child of the launcher, which must not hold its pipe."""
        os.close(self._tell)

    def close(self) -> None:
        """There is nothing to guard any more."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._tell)

    def _say(self, word: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: the next one is told anew
            os.write(self._tell, word.encode())


def _guard(told: int, mark: str) -> None:
    sessions: set[int] = set()
    with os.fdopen(told) as words:
        for word in words:
            (sessions.add if word[0] == "+" else sessions.discard)(int(word[1:]))
    while found := [one for one in _of_this_user() if _belongs(one.pid, sessions, mark) and not is_kept(one)]:
        kill(found)
        psutil.wait_procs(found, timeout=1.0)


def _of_this_user() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if process.pid != os.getpid() and process.uids().real == os.geteuid() and not ended:
                yield process


def _belongs(pid: int, sessions: Collection[int], mark: str) -> bool:
    try:
        return os.getsid(pid) in sessions or mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
