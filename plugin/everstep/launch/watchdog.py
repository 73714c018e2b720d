"""What an agent decides about its workers: have they stalled, and is another restart worth it."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.run.beats import DONE, STARTUP, Beat
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT


@dataclass(frozen=True)
class Stall:
    """A rank that shows no progress: its last phase and how long ago it began (seconds)."""

    rank: int
    phase: str
    idle_s: float


def find_stall(
    pids: Mapping[int, int],
    beats: Mapping[int, Beat | None],
    started_mono: float,
    now_mono: float,
    stall_timeout_s: float,
    startup_timeout_s: float,
) -> Stall | None:
    """The rank that has been silent for too long, the longest silent first; None when all ranks move.

    `pids` are this incarnation's workers by rank; a beat of any other pid was left by an earlier one and
    counts as no beat, which is "startup" since `started_mono`. A rank whose phase is "done" waits for its
    group's other ranks.
    """
    stalls = []
    for rank, pid in pids.items():
        beat = beats.get(rank)
        if beat is None or beat.pid != pid:
            phase, since = STARTUP, started_mono
        else:
            phase, since = beat.phase, beat.mono
        limit_s = startup_timeout_s if phase == STARTUP else stall_timeout_s
        if phase != DONE and now_mono - since > limit_s:
            stalls.append(Stall(rank, phase, now_mono - since))
    return max(stalls, key=lambda stall: stall.idle_s, default=None)


@dataclass(frozen=True)
class Death:
    """One end of a group's workers: when (monotonic seconds), how, and whether this incarnation had begun a
    step.

    `exitcode` as multiprocessing gives it: negative for a signal.
    """

    mono: float
    exitcode: int
    had_trained: bool


@dataclass(frozen=True)
class RestartLimits:
    """`max_restarts` within `window_s` seconds; `startup_failures` in a row that never reached a step."""

    max_restarts: int
    window_s: float
    startup_failures: int = 3


def reason_to_give_up(deaths: Sequence[Death], limits: RestartLimits) -> str | None:
    """Why the workers should not be started again after the last of `deaths`; None: start them.

    Signals (a kill, a machine short of memory) are what restarts are for and count only towards
    `max_restarts`. Workers that end by themselves before their first step, several times in a row, would do
    so forever.
    """
    last = deaths[-1]
    if last.exitcode == USAGE_EXIT and not last.had_trained:
        return "its configuration is not valid"
    if last.exitcode == HOPELESS_EXIT:
        return "its trainer found that going on is no use; its log says why"
    if last.exitcode == UNFIT_EXIT:
        return "its trainer found this machine unfit, and there is no other to go to; its log says why"
    recent = [death for death in deaths if death.mono > last.mono - limits.window_s]
    if len(recent) > limits.max_restarts:
        return f"it died {len(recent)} times within {limits.window_s:g} s (fault_tolerance.max_restarts)"
    tail = deaths[-limits.startup_failures :]
    if len(tail) == limits.startup_failures and all(d.exitcode >= 0 and not d.had_trained for d in tail):
        return f"it failed {len(tail)} times in a row before its first step"
    return None


def describe_exit(exitcode: int) -> str:
    """An exit code in words."""
    if exitcode >= 0:
        return f"exited with status {exitcode}"
    try:
        return f"was killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was killed by signal {-exitcode}"
