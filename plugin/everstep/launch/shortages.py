"""Shortages that may pass: of disk space, processes, descriptors or memory. A launcher retries after a backoff."""

import errno

ERRNOS = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ESTALE)
)
LONGEST_PAUSE_S = 5.0
"""Longest backoff in seconds after shortages. It is short, because a group is not watched during its backoff."""
LONGEST_BACKOFF_S = 30.0


def is_shortage(error: OSError) -> bool:
    """Return whether `error` is a shortage, so that a later retry may succeed."""
    return error.errno in ERRNOS


def backoff_s(failures: int, longest_s: float = LONGEST_BACKOFF_S) -> float:
    """Return the seconds to wait after `failures` in a row: 0 for none, 0.5 for one, then doubled up to `longest_s`."""
    return 0.0 if failures < 1 else min(longest_s, 0.5 * 2.0 ** min(failures - 1, 60))
