"""What the system has none of for a while: room on a disk, processes, descriptors, memory. A launcher waits for it."""

import errno
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.1

ERRNOS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ESTALE)
)
LONGEST_S = 5.0
"""Until something is tried again for which there was no room: meanwhile nobody looks after a group."""
LONGEST_BACKOFF_S = 30.0


def is_scarce(error: OSError) -> bool:
    """Whether trying again later may help."""
    return error.errno in ERRNOS


def backoff_s(failures: int, longest_s: float = LONGEST_BACKOFF_S) -> float:
    """How long to wait after so many failures in a row: 0 for none, half a second, and twice as long each time."""
    return 0.0 if failures < 1 else min(longest_s, 0.5 * 2.0 ** min(failures - 1, 60))


def patiently(what: str, action: Callable[[], T], stopping: Callable[[], bool]) -> T | None:
    """What `action` returns, tried again for as long as there is no room for it; None if asked to stop meanwhile. Each
    failure is said on stdout. Raises what `action` raises for another reason."""
    for failures in itertools.count(1):
        try:
            return action()
        except OSError as error:
            if not is_scarce(error):
                raise
            wait_s = backoff_s(failures, LONGEST_S)
            print(f"{what}: {error.strerror}; it is tried again in {wait_s:g} s", flush=True)
        again_mono = time.monotonic() + wait_s
        while time.monotonic() < again_mono:
            if stopping():
                return None
            time.sleep(POLL_S)
    return None
