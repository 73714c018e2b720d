"""What the system has none of for a while: room on a disk, processes, descriptors, memory. A launcher that runs waits
for it."""

import errno

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
