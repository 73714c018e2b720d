"""A host's free memory, and the claims of one user's processes on it. A process claims memory before it makes a large
copy, so that several processes do not see the same free bytes and take them at once. The control group of a container
or a Slurm job may have less memory than the host."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from everstep.run.files import is_own_directory, locked

CLAIMS = Path(f"/dev/shm/everstep-{os.geteuid()}.claims")
"""Folder with one file for each claim. The file is as long as the claim, and locked as long as its process lives."""
FACTOR = 1.5
"""Free memory that a copy needs beside the claims of others, as a multiple of its size."""
TURN_S = 2.0
"""Seconds to wait for another process that counts the claims."""
PROC, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CGROUPS = {
    "": ("", "memory.max", "memory.current", "file", "shmem"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
}
"""Controller ("" in version 2 of control groups) -> its folder below MOUNT, its files, and its keys of memory.stat."""


def free_memory() -> tuple[int, str]:
    """Return the bytes of free memory, and in words where: on the host, or under the tightest control group limit of
    this process if that is less. Page cache counts as free, because the kernel can drop it; pages of tmpfs do not."""
    found = [(psutil.virtual_memory().available, "of free host memory")]
    with contextlib.suppress(OSError):
        for controller, own in control_groups():
            limited = [_left_in(each, *_CGROUPS[controller][1:]) for each in (own, *own.parents)]
            found += [(left, "left under the limit of this control group") for left in limited if left is not None]
    return min(found)


def control_groups() -> Iterator[tuple[str, Path]]:
    """Yield the control groups of this process that count memory, as controller ("" in version 2) and folder. In a
    container only folders above that one may be visible. Raises OSError."""
    for line in PROC.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        for controller in _CGROUPS.keys() & controllers.split(","):
            yield controller, MOUNT / _CGROUPS[controller][0] / name.lstrip("/")


def _left_in(folder: Path, limit_file: str, usage_file: str, cache: str, shared: str) -> int | None:
    try:
        limit, used = int((folder / limit_file).read_text()), int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        free = limit - used + max(int(stat[cache]) - int(stat[shared]), 0)
        return free if limit < 1 << 60 else None  # version 1 says "no limit" with a number near 2^63
    except (OSError, ValueError, KeyError):
        return None  # the limit is "max", or this is the root group or a folder above it, without these files


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[bool]:
    """Claim memory for a copy of `nbytes`, and yield whether this host has room for it (FACTOR); if not, nothing is
    claimed. Make the copy in the body: at its end the claim is dropped, and the copy itself lowers the free memory.
    Yields False if another process keeps the lock on the claims for TURN_S."""
    with contextlib.ExitStack() as claim:
        try:
            has_room = claim.enter_context(_claim(nbytes))
        except TimeoutError:
            has_room = False
        except OSError:  # no claim can be written: judge by the free memory alone
            has_room = _fits(nbytes, 0)
        yield has_room


def _fits(nbytes: int, taken: int) -> bool:
    return free_memory()[0] - taken > FACTOR * nbytes


@contextlib.contextmanager
def _claim(nbytes: int) -> Iterator[bool]:
    CLAIMS.mkdir(mode=0o700, exist_ok=True)
    if not is_own_directory(CLAIMS):
        raise PermissionError(f"{CLAIMS} is another user's")
    path = CLAIMS / uuid.uuid4().hex
    with contextlib.ExitStack() as claim:
        with locked(CLAIMS / "turn", TURN_S):
            mine = claim.enter_context(open(path, "w"))  # under the lock: no process sees the file unlocked
            fcntl.flock(mine, fcntl.LOCK_EX)
            has_room = _fits(nbytes, sum(map(_claimed, CLAIMS.iterdir())))
            if has_room:
                mine.truncate(nbytes)
        try:
            yield has_room
        finally:
            path.unlink(missing_ok=True)


def _claimed(path: Path) -> int:
    """Return the bytes of a claim. A claim whose process has ended is removed and counts as 0."""
    with contextlib.suppress(FileNotFoundError), open(path) as claim:  # it may be dropped meanwhile
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.fstat(claim.fileno()).st_size
        path.unlink()
    return 0
