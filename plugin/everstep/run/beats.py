"""Signs of life: one small file per rank that its trainer overwrites and its agent's watchdog reads.

`RUN_DIR/state/group-K.rank-R.beat` holds one fixed-size record, written with a single `pwrite` of a
page-cached file (about a microsecond), so a beat belongs at every phase and every slot. Times are
`time.monotonic()`: writer and reader share a host. The writer's pid tells a beat of this incarnation from
one that a dead worker left.

Other hosts go by the file's time. Over NFS a write stays in the writer's page cache for up to half a minute, and what a
reader knows of a file may be as old: the agent pushes its beats to the server once a second (`push`), readers open a
file before they ask for its time, and `shared_lag_s` is what remains.
"""

import contextlib
import functools
import math
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.run.regular import read_regular

STARTUP = "startup"
DONE = "done"
"""Phases of a worker that does not train yet, or no more."""

SHARED_LAG_S = 10.0
"""How much older than it is a pushed beat may look to another host."""

LOCAL_FILES = frozenset({"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"})
"""File systems that hosts do not share, so that nobody reads a beat late."""

_RECORD = struct.Struct("<4sqdq28sq")  # mark, pid, monotonic seconds, step, phase, slot
_MARK = b"beat"


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a process: who, when (`time.monotonic()` seconds), at which step and phase; while it
    computes, at which slot."""

    pid: int
    mono: float
    step: int
    phase: str
    slot: int = -1


def beat_path(run_dir: Path, group: int, rank: int) -> Path:
    """Where rank `rank` of group `group` leaves its beats."""
    return Path(run_dir) / "state" / f"group-{group}.rank-{rank}.beat"


def agent_beat_path(run_dir: Path, group: int) -> Path:
    """Where the agent of group `group` leaves its own beats, for its supervisor."""
    return Path(run_dir) / "state" / f"agent-{group}.beat"


class BeatFile:
    """Writes beats to one file."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    def beat(self, phase: str, step: int = 0, slot: int = -1) -> None:
        """I am alive, in `phase` (at most 28 bytes are kept) of step `step`, at slot `slot` if any."""
        record = _RECORD.pack(_MARK, os.getpid(), time.monotonic(), step, phase.encode()[:28], slot)
        os.pwrite(self._fd, record, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Heartbeat(BeatFile):
    """A worker's beats. Phase "startup" may last `startup_timeout_s`, every other phase `stall_timeout_s`."""

    def __init__(self, run_dir: Path, group: int, rank: int):
        super().__init__(beat_path(run_dir, group, rank))


def read_beat(path: Path) -> Beat | None:
    """The last beat in a file; None when there is none yet, or something else."""
    try:
        record = read_regular(path, _RECORD.size)
    except OSError:
        return None
    if len(record) != _RECORD.size:
        return None
    mark, pid, mono, step, phase, slot = _RECORD.unpack(record)
    if mark != _MARK or pid < 2 or not math.isfinite(mono):
        return None
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Beat(pid, mono, step, "".join(c if c.isprintable() else "?" for c in name), slot)


def push(paths: list[Path]) -> None:
    """Hand the newest beats of this host to the file server, where other hosts see them."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)


def written(path: Path) -> float | None:
    """When a beat file was last written, by its server's clock; None: never. Opening it is what makes NFS ask."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


@functools.cache
def shared_lag_s(run_dir: Path) -> float:
    """How much older than they are beats in this run directory may look: SHARED_LAG_S where hosts can share it, else
    0."""
    folder = Path(run_dir).resolve()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    over = [(mount[1], mount[2]) for mount in mounts if folder.is_relative_to(mount[1])]
    _, kind = max(over, key=lambda mount: len(mount[0]), default=("/", ""))
    return 0.0 if kind in LOCAL_FILES else SHARED_LAG_S


def beats_of_groups(run_dir: Path) -> list[tuple[int, Beat, float]]:
    """The last beat of each group's rank 0: group id, beat, and its age in seconds, by the file's clock, which groups
    on several hosts share, and no more than it surely is: less `shared_lag_s`."""
    found = []
    for path in sorted((Path(run_dir) / "state").glob("group-*.rank-0.beat")):
        since, beat = written(path), read_beat(path)
        if beat is not None and since is not None:
            with contextlib.suppress(ValueError):  # none of ours
                group = int(path.name.removeprefix("group-").partition(".")[0])
                found.append((group, beat, max(0.0, time.time() - since - shared_lag_s(Path(run_dir)))))
    return found


def forget_beats(run_dir: Path) -> None:
    """Remove the beats of an earlier start of the run: nobody who left them lives."""
    for path in (Path(run_dir) / "state").glob("*.beat"):
        path.unlink(missing_ok=True)
