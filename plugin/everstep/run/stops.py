"""What ends a process: the signals that ask it to stop, and the kernel, which kills it when its parent dies, even if it
is stopped, busy in C or holding the GIL.

`PR_SET_PDEATHSIG` follows the parent *thread*, so a process that uses it must be started from its parent's main thread.
"""

import ctypes
import os
import signal
import time

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.3
"""Seconds within which further signals belong to the same request. A terminal sends Ctrl-C to all its processes, and
`timeout`, `uv run` and the like then pass it on once more."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def collect_stops() -> list[float]:
    """Catch STOPS from now on, and return the list to which each request to stop is added: its time, by
    `time.monotonic()`. These signals no longer end the process. Under nohup SIGHUP stays ignored."""
    stops: list[float] = []

    def note(*_: object) -> None:
        now = time.monotonic()
        if not stops or now - stops[-1] > SAME_S:
            stops.append(now)

    for signum in STOPS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, note)
    return stops


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent_pid: int) -> None:
    """Have this process killed when its parent `parent_pid` dies. Ends it at once if the parent is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
