"""Host memory is not ours alone: what a snapshot needs, what is left, and reserving it between ranks."""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from everstep.run.regular import read_regular
from everstep.snapshot.buffer import SnapshotError, reserved_bytes
from everstep.snapshot.stripes import Code

LOCK_S = 1.0
"""Longest wait for another process that looks for room; it takes a millisecond."""
BUFFERS = 2
"""Of a rank, and as many of parity: the newest coded snapshot, and the one that is being written."""
BLOCK_BYTES = 1 << 20
"""What coding and decoding hold of each shard at a time: a chunk of the checksum tables."""
COVER_BYTES = 2048
"""Of parity, for the header of each payload that it is over."""


def memory_needed(payload_bytes: int, members: int, parity: int) -> int:
    """Bytes for one rank: its two buffers and two parity buffers, in tmpfs, and the blocks that coding holds.
    `members`: of its parity group."""
    data = BUFFERS * reserved_bytes(payload_bytes)
    if parity <= 0:
        return data
    shard = Code(tuple(range(members)), parity).shard_bytes([payload_bytes])
    covers = members * COVER_BYTES
    return data + BUFFERS * reserved_bytes(parity * shard + covers) + members * min(BLOCK_BYTES, shard)


def make_room(note: Path, total_bytes: int, held_bytes: int, reserve_bytes: int) -> None:
    """Reserve `total_bytes` for a rank, of which it holds `held_bytes`; ranks that ask at the same moment are served
    one after the other, and each counts what those before it have reserved and not taken yet. `note`: a file of the
    rank in its segment, whose name ends in .room and begins as those of its buffers do.

    Raises SnapshotError, with bytes needed and found, when they are not there.
    """
    directory = note.parent.parent
    with _lock(directory):
        promised = sum(max(0, wanted - held) for other, wanted, held in _reservations(directory) if other != note)
        check_room(directory, total_bytes - held_bytes, reserve_bytes, promised)
        try:
            note.write_text(str(max(total_bytes, _number(note))))
        except OSError as error:
            raise SnapshotError(f"{note} cannot be written: {error.strerror} (snapshot.segment_dir)") from error


def _reservations(directory: Path) -> Iterator[tuple[Path, int, int]]:
    """Of every rank in every segment: its note, what it reserved, and what it has taken."""
    for segment in directory.glob("everstep-*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            # Others may have put theirs beside ours, with notes that say or are anything.
            if is_own_directory(segment):
                for note in segment.glob("*.room"):
                    yield note, _number(note), _held(note.parent, note.name.removesuffix(".room"))


def is_own_directory(path: Path) -> bool:
    """Whether it is this user's directory, and not a link to one. Raises OSError."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _number(note: Path) -> int:
    try:
        return int(read_regular(note, 4096))
    except (OSError, ValueError):  # removed, or being written
        return 0


def _held(segment: Path, column: str) -> int:
    total = 0
    for file in (*segment.glob(f"{column}.buffer-*"), *segment.glob(f"{column}.parity-*")):
        with contextlib.suppress(OSError):  # gone meanwhile
            total += file.stat().st_size
    return total


def lock_within(fd: int, wait_s: float) -> bool:
    """Lock an open file for this process alone. False if another has held it for `wait_s`: it may be stopped."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def lock_file(directory: Path) -> Path:
    """What all of this user's processes lock while they look for room and take it; it stays."""
    return directory / f"everstep-room-{os.geteuid()}.lock"


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """One at a time among this user's processes on this host."""
    path = lock_file(directory)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be used: {error.strerror} (snapshot.segment_dir)") from error
    try:
        # Another user could hold the lock of a file of theirs for ever.
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
            raise SnapshotError(f"{path} is open to other users: remove it or set snapshot.segment_dir")
        if not lock_within(fd, LOCK_S):
            raise SnapshotError(f"{path} is held by another process for longer than {LOCK_S:g} s")
        yield
    finally:
        os.close(fd)


def check_room(directory: Path, bytes_needed: int, reserve_bytes: int, promised_bytes: int = 0) -> None:
    """Raises SnapshotError, with bytes needed and found, when `bytes_needed` more in `directory` would not fit: in the
    tmpfs, in the host's free memory or in this control group's limit, less what is to stay free and what others have
    been promised."""
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise SnapshotError(f"{directory} cannot be used: {error.strerror} (snapshot.segment_dir)") from error
    found = {
        f"free in {directory} (snapshot.segment_dir; Docker: --shm-size)": status.f_bavail * status.f_frsize,
        "of free host memory": psutil.virtual_memory().available - reserve_bytes,
    }
    limit = cgroup_free_bytes()
    if limit is not None:
        found["left under the memory limit of this control group"] = limit - reserve_bytes
    where, least = min(found.items(), key=lambda item: item[1])
    least -= promised_bytes
    if bytes_needed > least:
        others = f", {promised_bytes} promised to other ranks" if promised_bytes else ""
        raise SnapshotError(f"snapshots need {bytes_needed} bytes more, and there are {max(least, 0)} {where}{others}")


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
