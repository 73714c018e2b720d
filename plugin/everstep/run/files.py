"""Small files of a run's state: written atomically, locked, and read without trust in what they hold.

Only regular files are opened: other users may have put a pipe there, which blocks a reader, or a link elsewhere. Links
are followed only where the user named the file.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from everstep.run import typed

T = TypeVar("T")
LARGEST = 16 << 20
"""Most bytes of a JSON file."""
LOCK_S, POLL_S = 2.0, 0.005
"""Seconds to wait for a lock, and between two attempts. A holder only reads and writes a small file."""
_NO_LOCK = "no lock ({0.strerror}); Lustre needs the mount option flock"


def make_folder(path: Path) -> None:
    """Make a folder of the run's state, and missing ones above it, that only its owner can write to, whatever the umask
    and a default ACL allow."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


def write_json(path: Path, value: dict, *, mode: int = 0o644) -> None:
    """Replace a file with `value` as JSON, atomically."""
    write_whole(path, typed.dumps(value), mode=mode)


def write_whole(path: Path, *data: bytes | memoryview, mode: int = 0o644) -> None:
    """Replace a file atomically. If `path` is a link, the link is replaced; its target is not written to."""
    with _draft(path, data, mode) as draft:
        draft.replace(path)


def write_first(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file atomically if there is none yet; an existing file or link stays. It is on disk on return, since it
    is never written again."""
    if path.exists():
        return
    with _draft(path, [data], mode) as draft:
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces a file that another process wrote meanwhile.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)


@contextlib.contextmanager
def _draft(path: Path, data: Iterable[bytes | memoryview], mode: int) -> Iterator[Path]:
    """Make a temporary file beside `path` that holds `data`. It is removed afterwards unless the body renamed it."""
    make_folder(path.parent)
    # With a random name and O_EXCL, no other user can have put a link there.
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(data)
        yield draft
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


@contextlib.contextmanager
def locked(path: Path, timeout_s: float = LOCK_S) -> Iterator[None]:
    """Hold the lock of `path` (a file beside it, with the suffix .lock) during the body. Raises TimeoutError
    if another process keeps it, and another OSError if the file system gives none."""
    end, path = time.monotonic() + timeout_s, path.with_suffix(".lock")
    with os.fdopen(open_own(path), "r+b", buffering=0) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has held {path} for {timeout_s:g} s") from None
            except OSError as error:
                raise OSError(error.errno, _NO_LOCK.format(error), str(path)) from None
            time.sleep(POLL_S)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a process forked meanwhile has a copy of it


def read_json(path: Path) -> dict:
    """Return what `write_json` wrote; {} if the file is missing, cannot be read, or holds no JSON object."""
    try:
        found = typed.loads(read_regular(path, LARGEST))
    except (OSError, typed.UnfitError):
        return {}
    return found if isinstance(found, dict) else {}


def read_typed(kind: type[T], path: Path) -> T | None:
    """Return what `write_json` wrote, as the dataclass `kind`; None if there is none, or it does not fit."""
    try:
        return typed.parse(kind, typed.loads(read_regular(path, LARGEST)))
    except (OSError, typed.UnfitError):
        return None


def open_own(path: Path, flags: int = 0) -> int:
    """Open a file of the run's state to read and write in place, and return the descriptor. The file is made if it is
    missing. A link or a pipe of that name is replaced by a file, not followed. flags: further ones of `os.open`."""
    make_folder(path.parent)
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o644)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
    path.unlink()
    return os.open(path, flags | os.O_EXCL, 0o644)


def file_system_now(folder: Path) -> float:
    """Return the current time in seconds by the clock of `folder`'s file system, from a file touched there. Compare it
    only with times of other files there. Raises OSError if `folder` cannot be written to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(folder / ".now", flags, 0o644)
    try:
        os.utime(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


_held: set[tuple[int, int, int]] = set()
"""Pid, device and inode of each lock that `lock_for_life` took, also before a fork."""


def lock_for_life(path: Path) -> bool:
    """Lock a file for this process. Return True if this process holds the lock now, False if another live process holds
    it. The lock ends with this process, or once it closes any descriptor of this file, so do not open the file again. A
    process that this one forks does not hold the lock. Raises OSError if the file system gives none."""
    with contextlib.suppress(FileNotFoundError):
        there = os.lstat(path)
        if (os.getpid(), there.st_dev, there.st_ino) in _held:  # each call would keep one more descriptor
            return True
    fd = open_own(path)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):  # it is held
            return False
        raise OSError(error.errno, _NO_LOCK.format(error), str(path)) from None
    locked_file = os.fstat(fd)
    _held.add((os.getpid(), locked_file.st_dev, locked_file.st_ino))
    return True


_FLOCK = "hhqqi4x"
"""`struct` format of fcntl(2)'s `struct flock` on 64 bits: type, whence, start, length, pid."""


def lock_holder(path: Path) -> int | None:
    """Return the pid of another process that holds a file by `lock_for_life`; 0 if that process is on another machine
    or outside of this container; None if there is none, or the file or the lock cannot be read. This process must not
    hold the file itself."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with open_regular(path, links=False) as file:
            kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    return None if kind == fcntl.F_UNLCK else max(0, pid)


class NotRegularError(OSError):
    """The path is a pipe, device, socket or too large a file, or it is a link and links are not followed."""


def open_regular(path: Path, *, links: bool = True, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        links: whether the last component of `path` may be a symbolic link. In a run directory it may not.
        limit: largest allowed size in bytes.

    Raises:
        IsADirectoryError: it is a directory.
        NotRegularError: it is another kind of file, or is larger than `limit`.
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
    """Return the contents of a file of a run directory, or its first limit + 1 bytes if it grew beyond `limit`
    meanwhile. Raises like `open_regular` with `links=False`."""
    with open_regular(path, links=False, limit=limit) as file:
        return file.read(limit + 1)


def is_own_directory(path: Path) -> bool:
    """Return whether `path` is a directory of this user's, and not a link to one. Raises OSError."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
