"""Opening only regular files: other users may have put a pipe there, which blocks a reader, or a link elsewhere."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """The path is a pipe, device, socket or too large a file, or it is a link and links are not followed."""


def open_regular(path: Path, *, links: bool = True, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        links: whether the last component of `path` may be a symbolic link. In a run directory it may not.
        limit: largest allowed size in bytes.

    Raises:
        NotRegularError: it is not a regular file, or is larger than `limit`.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) and not links:
            raise NotRegularError(error.errno, "is a link or not a file", str(path)) from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or (limit is not None and found.st_size > limit):
        os.close(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        what = "is not a regular file" + (f" of at most {limit} bytes" if limit is not None else "")
        raise NotRegularError(errno.EINVAL, what, str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, limit: int = 64 << 20) -> bytes:
    """Return the contents of a file of a run directory. Raises like `open_regular` with `links=False`."""
    with open_regular(path, links=False, limit=limit) as file:
        return file.read(limit + 1)


def is_own_directory(path: Path) -> bool:
    """Return whether `path` is a directory of this user's, and not a link to one. Raises OSError."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
