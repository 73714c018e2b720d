"""Have the kernel kill a process when its parent dies, even if it is stopped, busy in C or holding the GIL.

`PR_SET_PDEATHSIG` follows the parent *thread*, so a process that uses it must be started from its parent's main thread.
"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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
