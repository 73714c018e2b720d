"""Host memory is not ours alone: what is left of it, and taking it."""

import errno
import os
import stat
from pathlib import Path

import psutil

BUFFERS = 2
"""Of a rank, and as many of parity: the newest coded snapshot, and the one that is being written."""
BLOCK_BYTES = 1 << 20
"""What coding and decoding hold of each shard at a time: a chunk of the checksum tables."""
STEP_BYTES = 64 << 20
ENLARGE = "snapshot.segment_dir; Docker: --shm-size"


class SnapshotError(RuntimeError):
    """A buffer that cannot be made, written or believed; the message says which file and why."""


def allocate(fd: int, path: Path, size: int, reserve_bytes: int) -> None:
    """Give a file on tmpfs memory up to this size, step by step, and look before each whether there is room for what
    is left. So processes that do so at the same moment take a step each too much at most, which the reserve has.

    Raises SnapshotError, with bytes needed and found, or OSError; the file is then as large as it was.
    """
    had, at = os.fstat(fd).st_size, 0
    try:
        for at in range(had, size, STEP_BYTES):
            check_room(path.parent, size - at, reserve_bytes)
            # Without it a full tmpfs would be SIGBUS in the middle of a copy.
            os.posix_fallocate(fd, at, min(STEP_BYTES, size - at))
    except BaseException as error:
        os.ftruncate(fd, had)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # another process took it meanwhile
            raise SnapshotError(
                f"snapshots need {size - at} bytes more, and {path.parent} is full ({ENLARGE})"
            ) from error
        raise


def is_own_directory(path: Path) -> bool:
    """Whether it is this user's directory, and not a link to one. Raises OSError."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def check_room(directory: Path, bytes_needed: int, reserve_bytes: int) -> None:
    """Raises SnapshotError, with bytes needed and found, when `bytes_needed` more in `directory` would not fit: in the
    tmpfs, in the host's free memory or in this control group's limit, less what is to stay free."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise SnapshotError(f"{directory} cannot be used: {error.strerror} (snapshot.segment_dir)") from error
    found = {
        f"free in {directory} ({ENLARGE})": status.f_bavail * status.f_frsize,
        "of free host memory": psutil.virtual_memory().available - reserve_bytes,
    }
    limit = cgroup_free_bytes()
    if limit is not None:
        found["left under the memory limit of this control group"] = limit - reserve_bytes
    where, least = min(found.items(), key=lambda item: item[1])
    if bytes_needed > least:
        raise SnapshotError(f"snapshots need {bytes_needed} bytes more, and there are {max(least, 0)} {where}")


def cgroup_free_bytes(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory left under the tightest control group limit of this process, version 1 or 2; None without a limit.

    Page cache that the kernel can drop is counted as free; tmpfs pages, which it cannot, are not.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    left = None
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top = mount / "unified" if (mount / "unified").is_dir() else mount
            files = ("memory.max", "memory.current", ("file", "shmem"))
        elif "memory" in controllers.split(","):
            top = mount / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache", "total_shmem"))
        else:
            continue
        folder = top / name.lstrip("/")
        while True:
            here = _left_in(folder, *files)
            if here is not None:
                left = here if left is None else min(left, here)
            if folder in (top, folder.parent):
                break
            folder = folder.parent
    return left


def _left_in(folder: Path, limit_file: str, usage_file: str, cache: tuple[str, str]) -> int | None:
    try:
        limit, used = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        if limit == "max" or int(limit) >= 1 << 60:  # version 1 says "no limit" with a number near 2^63
            return None
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - used + max(int(stat[cache[0]]) - int(stat[cache[1]]), 0)
    except (OSError, ValueError, KeyError):
        return None  # the root group, or a kernel without this controller, has no such files: no limit there
