"""Small files of a run's state: written whole or not at all."""

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
from typing import TypeVar

from everstep.run import typed
from everstep.run.regular import open_regular, read_regular

T = TypeVar("T")
LARGEST = 16 << 20
LOCK_S, POLL_S = 2.0, 0.005
"""Longest wait for a lock, and between two looks at it. Who holds one reads and writes a small file."""


def write_json(path: Path, value: dict) -> None:
    """Replace a small file of the run's state, whole or not at all."""
    write_whole(path, typed.dumps(value))


def write_whole(path: Path, *data: bytes | memoryview) -> None:
    """Replace a file, whole or not at all; what stood there is let go, not written to, also where it was a link."""
    with _draft(path, data, 0o644) as draft:
        draft.replace(path)


def write_first(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file that nobody has written yet; what stands there stays."""
    if path.exists():
        return
    with _draft(path, [data], mode) as draft:
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        # Unlike a rename, a link never replaces what another process wrote meanwhile.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)


@contextlib.contextmanager
def _draft(path: Path, data: Iterable[bytes | memoryview], mode: int) -> Iterator[Path]:
    """A file beside `path` that holds `data`, and is gone afterwards unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name that nobody can have guessed, and that is nobody's link.
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
    """While nobody else is in here for a file beside this lock. Raises TimeoutError."""
    end, path = time.monotonic() + timeout_s, path.with_suffix(".lock")
    with os.fdopen(open_own(path), "r+b", buffering=0) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"another process has held {path} for {timeout_s:g} s") from None
            time.sleep(POLL_S)
        yield


def read_json(path: Path) -> dict:
    """What `write_json` wrote; {} if there is nothing, or something that it cannot have written."""
    try:
        found = typed.loads(read_regular(path, LARGEST))
    except (OSError, typed.UnfitError):
        return {}
    return found if isinstance(found, dict) else {}


def read_typed(kind: type[T], path: Path) -> T | None:
    """What `write_json` wrote of a dataclass; None if there is nothing, or something else."""
    try:
        return typed.parse(kind, read_json(path))
    except typed.UnfitError:
        return None


def open_own(path: Path, flags: int = 0) -> int:
    """A descriptor of a file of the run's state to be read and written in place, which is made if it is not there. A
    link or a pipe in its place is let go, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
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
    """The time that a file gets which is written in `folder` now, in seconds: its file system's clock, to be compared
    with times of other files there and with nothing else. Raises OSError if nothing can be written."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(folder / ".now", flags, 0o644)
    try:
        os.utime(fd)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def hold_alone(path: Path) -> bool:
    """Whether no other process that lives has been answered so for this file. Its lock is a process's own, which none
    that it forks holds as well, and goes with it."""
    fd = open_own(path)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        return error.errno not in (errno.EAGAIN, errno.EACCES)  # where there are no such locks, nobody can tell
    return True


_FLOCK = "hhqqi4x"
"""`struct flock` of fcntl(2), on 64 bits: type, whence, start, length, pid."""


def holder(path: Path) -> int:
    """The other process that holds a file alone; 0: none. Raises OSError."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    with open_regular(path, links=False) as file:
        kind, *_, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return 0 if kind == fcntl.F_UNLCK else pid
