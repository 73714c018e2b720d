"""Processes that die with their parent, by the kernel: also when stopped, busy in C or holding the GIL.

`PR_SET_PDEATHSIG` follows the parent *thread*: whoever starts a process that uses it must do so from its
main thread.
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
    """From now on this process is killed when `parent_pid` dies. Ends at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
