"""The facts and rules by which a launcher decides what to try again, and when: workers that died, and whatever met a
shortage of disk space, processes, descriptors or memory, which may pass."""

import contextlib
import errno
import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.memory import control_groups

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
"""Signals that kill a process because of an error of its own."""
WINDOW_S = 3600.0
"""Seconds after which failures, and deaths on a node, no longer count."""
STEPS_MEANWHILE = 3
HOPELESS = {
    USAGE_EXIT: "its configuration is not valid",
    HOPELESS_EXIT: "its trainer decided that another start would end the same way; its log says why",
    UNFIT_EXIT: "its trainer found this machine's results or data wrong, with no other machine; its log says why",
}
"""Exit status after which workers are never restarted, whatever other groups do -> the reason."""
OOM_COUNTS = {"": "memory.events", "memory": "memory.oom_control"}
"""Controller ("" in version 2 of control groups) -> the file that counts out-of-memory kills."""
SHORTAGES = frozenset((
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS,
    errno.ESTALE,
))  # fmt: skip
OUTAGES = frozenset((
    errno.EIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO, errno.ECOMM, errno.ENODEV,
    errno.ENOLCK, errno.EACCES, errno.EKEYEXPIRED,
))  # fmt: skip
"""What clients of shared file systems report while a server is away, also one of locks, or of users and their keys."""
LONGEST_BACKOFF_S = 30.0


@dataclass(frozen=True)
class Death:
    """The end of one incarnation of a group's workers. `exitcode` is negative if a signal killed the first worker."""

    mono: float
    """Time of the death in monotonic seconds."""
    exitcode: int
    committed: bool
    """Whether the incarnation had committed a step."""
    reason: str
    error: str
    """The exception that ended the first worker, in one line; "" if there was none."""
    run_step: int
    """The newest step that any group of the run had committed then."""
    step_s: float
    """Seconds that this step took."""
    by_itself: bool
    """Whether an error, a stall or lack of memory ended the workers, and not a signal from outside or the kill of a
    rank on another machine: a restart may well end the same way."""


def in_a_row(deaths: Sequence[Death]) -> list[Death]:
    """Return the newest deaths `by_itself`, the newest first, up to the first other one and no older than WINDOW_S."""
    recent = (death for death in reversed(deaths) if death.mono > deaths[-1].mono - WINDOW_S)
    return list(itertools.takewhile(lambda death: death.by_itself, recent))


def failures(deaths: Sequence[Death], run_step: int) -> int:
    """Return how many of the deaths `in_a_row` came after the run's newest step, `run_step`, and without a commit of
    their own. If all of these came within the time of STEPS_MEANWHILE steps, they count as one, because other groups
    may just not have had the time to commit a step."""
    same = [death for death in in_a_row(deaths) if death.run_step == run_step and not death.committed]
    if same and same[0].mono - same[-1].mono < STEPS_MEANWHILE * same[0].step_s:
        return 1
    return len(same)


def describe_exit(exitcode: int) -> str:
    """Return an exit code in words."""
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def oom_kills() -> int:
    """Return the number of out-of-memory kills in this process's control groups so far; 0 if there is no counter."""
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for controller, own in control_groups():
            files = [folder / OOM_COUNTS[controller] for folder in (own, *own.parents)]
            text = next((file.read_text() for file in files if file.exists()), "")
            found += int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
    return found


def is_shortage(error: OSError) -> bool:
    """Return whether `error` is a shortage, so that a later retry may succeed."""
    return error.errno in SHORTAGES


def may_pass(error: OSError) -> bool:
    """Return whether a later retry may succeed: after a shortage, an outage, or a wait for another process's lock."""
    return is_shortage(error) or error.errno in OUTAGES or isinstance(error, TimeoutError)


def backoff_s(failures: int, longest_s: float = LONGEST_BACKOFF_S) -> float:
    """Return the seconds to wait after `failures` in a row: 0 for none, 0.5 for one, then doubled up to `longest_s`."""
    return 0.0 if failures < 1 else min(longest_s, 0.5 * 2.0 ** min(failures - 1, 60))
