"""A host's free memory, shared by all processes of a user on it: one that makes a copy claims what that needs, so that
not all of them see the same free bytes and take them at once. A control group, of a container or a Slurm job, may have
less than the host."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from everstep.run.files import locked
from everstep.run.regular import is_own_directory

CLAIMS = Path(f"/dev/shm/everstep-{os.geteuid()}.claims")
"""A file for each claim, as long as what is claimed, and locked by its process until that ends."""
FACTOR = 1.5
"""Free host memory, in sizes of what is to be copied, that a copy needs."""
TURN_S = 2.0
"""Longest wait for another process that counts the claims."""
PROC, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_CGROUPS = {
    "": ("", "memory.max", "memory.current", "file", "shmem"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
}
"""By controller, of control groups of version 2 and 1: where they are mounted, and their files and keys."""


def free_memory() -> tuple[int, str]:
    """Bytes of free memory, and whose: the host's, or those under the tightest control group limit of this process.

    Page cache that the kernel can drop is counted as free; tmpfs pages, which it cannot, are not.
    """
    found = [(psutil.virtual_memory().available, "of free host memory")]
    with contextlib.suppress(OSError):
        for controller, own in control_groups():
            limited = [_left_in(each, *_CGROUPS[controller][1:]) for each in (own, *own.parents)]
            found += [(left, "left under the limit of this control group") for left in limited if left is not None]
    return min(found)


def control_groups() -> Iterator[tuple[str, Path]]:
    """The control groups of this process that count memory: the controller, "" in version 2, and the folder, which a
    container may not see, but those above it. Raises OSError."""
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
        return None  # "max", or the root group, or what is above it, which has no such files


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[bool]:
    """Whether this host has memory for a copy of so many bytes, besides what others have claimed; no, if a process that
    counts the claims stands still. The copy is made in the context, at whose end it shows in the free memory."""
    with contextlib.ExitStack() as claim:
        try:
            has_room = claim.enter_context(_claim(nbytes))
        except TimeoutError:
            has_room = False
        except OSError:  # nothing can be written there, so nobody claims anything
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
            mine = claim.enter_context(open(path, "w"))  # in its turn: nobody sees it before it is locked
            fcntl.flock(mine, fcntl.LOCK_EX)
            has_room = _fits(nbytes, sum(map(_claimed, CLAIMS.iterdir())))
            if has_room:
                mine.truncate(nbytes)
        try:
            yield has_room
        finally:
            path.unlink(missing_ok=True)


def _claimed(path: Path) -> int:
    """What a claim says; one whose process has ended is removed."""
    with contextlib.suppress(FileNotFoundError), open(path) as claim:  # given back meanwhile
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.fstat(claim.fileno()).st_size
        path.unlink()
    return 0
