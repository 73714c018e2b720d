"""What a launcher decides after the death of a group's workers: is another start worth it, and when."""

import contextlib
import itertools
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.memory import control_groups

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
"""Signals that a process brings upon itself."""
WINDOW_S = 3600.0
"""In which failures and deaths on a node count."""
STEPS_MEANWHILE = 3
HOPELESS = {
    USAGE_EXIT: "its configuration is not valid",
    HOPELESS_EXIT: "its trainer found that going on is no use; its log says why",
    UNFIT_EXIT: "its trainer found this machine unfit, and there is no other to go to; its log says why",
}
"""Exit statuses after which workers are not started again, whatever other groups do, and why."""
OOM_COUNTS = {"": "memory.events", "memory": "memory.oom_control"}
"""By controller, of control groups of version 2 and 1: the file that counts kills for memory."""


@dataclass(frozen=True)
class Death:
    """One end of a group's workers: when (monotonic seconds), how, and what this incarnation had done.

    `exitcode` as multiprocessing gives it: negative for a signal.
    """

    mono: float
    exitcode: int
    committed: bool
    """Whether it had committed a step."""
    reason: str
    error: str
    """The exception that its first rank ended with, in one line; "": there is none."""
    run_step: int
    """The newest step that any group of the run had committed then."""
    step_s: float
    """How long that took."""
    crashed: bool
    """Whether the workers ended of their own doing."""
    by_itself: bool
    """Whether another start may well end the same way."""


def in_a_row(deaths: Sequence[Death]) -> list[Death]:
    """The newest deaths that were of the workers' own doing, the newest first. Those of long ago are forgotten."""
    recent = (death for death in reversed(deaths) if death.mono > deaths[-1].mono - WINDOW_S)
    return list(itertools.takewhile(lambda death: death.by_itself, recent))


def failures(deaths: Sequence[Death], run_step: int) -> int:
    """How many of those `in_a_row` came since a group of the run committed `run_step`, its newest step: the next ones
    would do so as well. While groups make steps, something may be wrong with this machine that passes: several within
    the time of STEPS_MEANWHILE steps are one."""
    same = [death for death in in_a_row(deaths) if death.run_step == run_step and not death.committed]
    if same and same[0].mono - same[-1].mono < STEPS_MEANWHILE * same[0].step_s:
        return 1
    return len(same)


def describe_exit(exitcode: int) -> str:
    """An exit code in words."""
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"


def oom_kills() -> int:
    """Kills for memory in this process's control groups so far; 0 where nobody counts."""
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for controller, own in control_groups():
            files = [folder / OOM_COUNTS[controller] for folder in (own, *own.parents)]
            text = next((file.read_text() for file in files if file.exists()), "")
            found += int(dict(line.split() for line in text.splitlines()).get("oom_kill", 0))
    return found
