"""The processes of a launcher: forked on request by its warm process, and reaped here, whose children they are."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from everstep.launch import offspring
from everstep.launch.warm import Request, WarmProcess

KILL_GRACE_S = 10.0


@dataclass(eq=False)
class Child:
    """A process that was asked for. It ends with `on_end`; it never comes if it was refused."""

    kind: Literal["prepare", "lighthouse", "worker"]
    index: int
    """Which of its kind: a group's, a rank's."""
    on_end: Callable[["Child", int], None]
    """Called with the exit code: negative for a signal."""
    on_refusal: Callable[["Child", int], None] = field(default=lambda child, errno: None)
    """Called with an errno if there is no room for it, 0 if the warm process died over it."""
    pid: int = 0
    exitcode: int | None = None
    refusal: int | None = None
    """As `on_refusal` was told."""

    @property
    def alive(self) -> bool:
        return self.pid > 0 and self.exitcode is None

    def signal(self, signum: signal.Signals) -> None:
        """To a process that has not been reaped, so that nobody else can have its pid."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class Children:
    """All processes below a launcher but those that workers start themselves.

    `modules` and `log`: of the warm process.
    """

    def __init__(self, modules: Sequence[str], log: Path) -> None:
        self.warm: WarmProcess | None = None
        self.on_warm_end: Callable[[WarmProcess, int], None] = lambda warm, exitcode: None
        self._modules, self.warm_log = modules, log
        self._alive: dict[int, Child] = {}
        self._asked: dict[int, Child] = {}
        self._early: dict[int, int] = {}
        """Exit codes of children that ended before the answer that names them."""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        self._old_handler = signal.signal(signal.SIGCHLD, lambda *_: None)

    @property
    def pids(self) -> set[int]:
        """Of all that live, the warm process included."""
        return {*self._alive, *([self.warm.pid] if self.warm else [])}

    def start_warm(self) -> None:
        """Raises OSError if there is no room for it."""
        self.warm = WarmProcess(self._modules, self.warm_log)

    def ask(self, child: Child, request: Request, fd: int = -1) -> None:
        """Have `child` forked, with the descriptor `fd` for a first argument. There must be a warm process."""
        assert self.warm is not None
        self._asked[self.warm.fork(request, fd)] = child

    def wait(self, timeout_s: float) -> None:
        """Until a child has started or ended, a signal has come, or for so long; call back what has."""
        waiting = select.poll()
        waiting.register(self._wake_r, select.POLLIN)
        if self.warm is not None:
            waiting.register(self.warm, select.POLLIN)
        waiting.poll(timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
        self._take_answers()
        self._reap()

    def _take_answers(self) -> None:
        for answer in self.warm.answers() if self.warm is not None else ():
            if "id" not in answer:
                continue
            child = self._asked.pop(answer["id"])
            if "pid" not in answer:
                self._refuse(child, answer["errno"])
                continue
            child.pid = answer["pid"]
            self._alive[child.pid] = child
            if child.pid in self._early:
                self._ended(child.pid, self._early.pop(child.pid))
        if not self._asked:
            self._early.clear()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(found[0], os.waitstatus_to_exitcode(found[1]))

    def _ended(self, pid: int, exitcode: int) -> None:
        if self.warm is not None and pid == self.warm.pid:
            self._warm_ended(self.warm, exitcode)
        elif pid in self._alive:
            child = self._alive.pop(pid)
            child.exitcode = exitcode
            child.on_end(child, exitcode)
        elif self._asked:
            self._early[pid] = exitcode

    def _warm_ended(self, warm: WarmProcess, exitcode: int) -> None:
        self._take_answers()  # its last
        warm.close()
        self.warm = None
        refused, self._asked = list(self._asked.values()), {}
        if refused:
            self._kill_strangers()
        self._early.clear()
        for child in refused:
            self._refuse(child, 0)
        self.on_warm_end(warm, exitcode)

    def _refuse(self, child: Child, errno: int) -> None:
        child.refusal = errno
        child.on_refusal(child, errno)

    def _kill_strangers(self) -> None:
        """A warm process may die between a fork and its answer: nobody knows that child, or the one in between whose
        child it still is. Their sessions are those of no child that is known."""
        self._kill_but({os.getsid(0), *self.pids}, recursive=False)

    def kill_everything(self) -> None:
        """Nothing that was started here outlives this call, but for the keepers of snapshots."""
        if self.warm is not None:
            self.warm.close()
            self.warm = None
        self._alive.clear()
        self._asked.clear()
        self._kill_but({os.getsid(0)}, recursive=True)

    def _kill_but(self, sessions: Collection[int], *, recursive: bool) -> None:
        """Kill children, or all that is below, if they are in none of `sessions` and no keepers. What libraries have
        started in this process is in its own session."""
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline:
            below = psutil.Process().children(recursive=recursive)
            left = [one for one in below if _session(one) not in sessions and not offspring.is_kept(one)]
            if not left:
                return
            offspring.kill(left)
            self._reap()
            time.sleep(0.005)

    def close(self) -> None:
        """Give the signal back that this object takes."""
        signal.set_wakeup_fd(self._old_wakeup)
        signal.signal(signal.SIGCHLD, self._old_handler)
        os.close(self._wake_r)
        os.close(self._wake_w)


def _session(process: psutil.Process) -> int:
    """-1 for one that has ended."""
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1
