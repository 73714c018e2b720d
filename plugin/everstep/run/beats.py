"""Signs of life ("beats"): each rank, agent, launcher and the lighthouse overwrites one small file.

A launcher reads the beats of its own workers and lighthouse. Other processes read beats to find out whether the agent
that holds a group's claim, a node of a group, or a group with a state to offer is still alive.

`RUN_DIR/state/group-K.rank-R.beat` holds one fixed-size record, written with a single `pwrite` to a page-cached file.
This takes about a microsecond, so a rank beats at every phase and every slot. Times are `time.monotonic()`, which a
writer and a reader on the same host share. The writer's pid tells a worker's beat from one that a dead worker left.

A reader on another host compares the file's modification time with that of a probe file that it writes now. Both times
are then the file server's, and no host's wall clock matters. Over NFS a write stays in the writer's page cache for up
to half a minute, and a reader's view of a file may be as old. So the agent pushes its own beats and those of rank 0 to
the server twice a second, and readers open a file before they ask for its time. SHARED_LAG_S covers the rest.
"""

import contextlib
import functools
import math
import os
import struct
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from everstep.run.files import NotRegularError, file_system_now, open_own, open_regular, read_regular

STARTUP = "startup"
DONE = "done"
"""Phases. STARTUP: the group has no state to offer yet, and `startup_timeout_s` is the limit for its silence. DONE: the
last beat of a process. A worker that ends without it has died, even if its exit status is 0."""

SHARED_LAG_S = 10.0
"""Seconds by which a pushed beat may look older to another host than it is."""

_RECORD = struct.Struct("<4s16sqdq28sq")  # mark, boot, pid, monotonic seconds, step, phase, slot
_MARK = b"bea2"


@functools.cache
def this_boot() -> bytes:
    """Return the id of this boot of this machine (16 bytes). Processes with the same id share a monotonic clock."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a process: its pid, the time (`time.monotonic()` seconds), step and phase, and the slot
    that it computes (-1: none)."""

    pid: int
    mono: float
    step: int
    phase: str
    slot: int = -1
    boot: bytes = b""
    """`this_boot()` of the writer."""


def beat_path(run_dir: Path, group: int, rank: int) -> Path:
    """Return the path of the beats of rank `rank` of group `group`."""
    return Path(run_dir) / "state" / f"group-{group}.rank-{rank}.beat"


def agent_beat_path(run_dir: Path, group: int, node: int = 0) -> Path:
    """Return the path of the beats of the agent of group `group` on the group's node `node`."""
    return Path(run_dir) / "state" / (f"agent-{group}.node-{node}.beat" if node else f"agent-{group}.beat")


def lighthouse_beat_path(run_dir: Path) -> Path:
    """Return the path of the lighthouse's beats."""
    return Path(run_dir) / "state" / "lighthouse.beat"


def launcher_beat_path(run_dir: Path, log: str) -> Path:
    """Return the path of the beats of the launcher whose log has this name. Nobody reads them: a launcher that cannot
    write them knows that its children cannot write theirs."""
    return Path(run_dir) / "state" / f"launcher.{log}.beat"


class BeatFile:
    """Writes beats to one file."""

    def __init__(self, path: Path):
        self._fd = open_own(path)
        if os.fstat(self._fd).st_size > _RECORD.size:
            os.ftruncate(self._fd, 0)  # it is no beat, and readers refuse a file longer than one

    def beat(self, phase: str, step: int = 0, slot: int = -1) -> bool:
        """Write that this process is alive, in `phase` (cut to 28 bytes) of step `step`, at slot `slot` (-1: none).
        Return whether it was written: if the file system is away or read-only, the beat is missed."""
        record = _RECORD.pack(_MARK, this_boot(), os.getpid(), time.monotonic(), step, phase.encode()[:28], slot)
        try:  # without a look at the file, which a file server that is away would not answer
            return os.pwrite(self._fd, record, 0) == len(record)
        except OSError:
            return False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1  # the number may soon be another file's, which a late write must not reach


def read_beat(path: Path) -> Beat | None:
    """Return the last beat in a file; None if it holds none yet. Raises OSError if it cannot be read now."""
    try:
        record = read_regular(path, _RECORD.size)
    except (FileNotFoundError, NotRegularError):
        return None
    if len(record) != _RECORD.size:
        return None
    mark, boot, pid, mono, step, phase, slot = _RECORD.unpack(record)
    if mark != _MARK or pid < 2 or not math.isfinite(mono):
        return None
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Beat(pid, mono, step, "".join(c if c.isprintable() else "?" for c in name), slot, boot)


def push_to_server(paths: list[Path]) -> None:
    """Send the newest beats of this host to the file server, so that other hosts see them."""
    for path in paths:
        with contextlib.suppress(OSError):  # no such file yet, or a shortage: the next push is soon
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)


def age_s(path: Path) -> float | None:
    """Return the seconds since a beat file was written, or fewer if that is uncertain; None if it holds no beat.

    The age of a beat of this host is measured by the monotonic clock. For a beat of another host it is the time between
    the file and a probe file, less SHARED_LAG_S. If the file cannot be read now, the age is 0, so that no process
    counts as dead for it.
    """
    try:
        beat = read_beat(path)
        if beat is None:
            return None
        if beat.boot == this_boot():
            return max(0.0, time.monotonic() - beat.mono)
        with open_regular(path, links=False) as file:  # opening makes NFS ask the server for the time
            since = os.fstat(file.fileno()).st_mtime
        return max(0.0, file_system_now(path.parent) - since - SHARED_LAG_S)
    except OSError:  # no free descriptor, a full disk, or another user's run directory
        return 0.0


def beats_of_groups(run_dir: Path) -> list[tuple[int, Beat, float]]:
    """Return the last beat of each group's rank 0 that can be read now: group id, beat, and its `age_s`."""
    found = []
    for path in sorted((Path(run_dir) / "state").glob("group-*.rank-0.beat")):
        group = path.name.removeprefix("group-").partition(".")[0]
        with contextlib.suppress(OSError):
            beat, age = read_beat(path), age_s(path)
            if beat is not None and age is not None and group.isdecimal():
                found.append((int(group), beat, age))
    return found


def forget_beats(run_dir: Path) -> None:
    """Remove the beats of an earlier start of the run, of which no process lives."""
    for path in (Path(run_dir) / "state").glob("*.beat"):
        path.unlink(missing_ok=True)
