"""Opening files that others may have put there: only files, never what makes a reader wait or a writer go elsewhere."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegularError(OSError):
    """The name is one of a pipe, a device, a folder, a socket, or where links are not followed of a link."""


def open_regular(path: Path, *, links: bool = True, limit: int | None = None) -> BinaryIO:
    """A file opened for reading.

    Args:
        links: whether its last component may be a symbolic link. In a run directory it may not.
        limit: the largest size that can be meant, in bytes.

    Raises:
        NotRegularError: it is something else than a file, or larger than `limit`.
        OSError: it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) and not links:
            raise NotRegularError(error.errno, "is a link or no file", str(path)) from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or (limit is not None and found.st_size > limit):
        os.close(fd)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        what = "is no regular file" + (f" of at most {limit} bytes" if limit is not None else "")
        raise NotRegularError(errno.EINVAL, what, str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, limit: int = 64 << 20) -> bytes:
    """All of a file of a run directory. Raises as `open_regular` without links."""
    with open_regular(path, links=False, limit=limit) as file:
        return file.read(limit + 1)


def is_own_directory(path: Path) -> bool:
    """Whether it is this user's directory, and not a link to one. Raises OSError."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
