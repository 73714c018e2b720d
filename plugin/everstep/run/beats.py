"""Signs of life: one small file for each rank, each agent and the lighthouse, which that process overwrites. An agent's
watchdog reads those of its ranks; who asks for a group's claim, its node or its state reads those of others.

`RUN_DIR/state/group-K.rank-R.beat` holds one fixed-size record, written with a single `pwrite` of a
page-cached file (about a microsecond), so a beat belongs at every phase and every slot. Times are
`time.monotonic()`: writer and reader share a host. The writer's pid tells a beat of this incarnation from
one that a dead worker left.

Other hosts compare the file's time with that of a probe file written now, so that both times are the file server's and
no host's wall clock matters. Over NFS a write stays in the writer's page cache for up to half a minute, and what a
reader knows of a file may be as old: the agent pushes its own beats and those of rank 0 to the server twice a second
(`push`), readers open a file before they ask for its time, and SHARED_LAG_S is what remains.
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

from everstep.run.files import file_system_now, open_own
from everstep.run.regular import NotRegularError, open_regular, read_regular

STARTUP = "startup"
DONE = "done"
"""STARTUP: `startup_timeout_s` counts, and the group has no state to offer. DONE is written last: a worker that ends
without it has died, with status 0 too."""

SHARED_LAG_S = 10.0
"""How much older than it is a pushed beat may look to another host."""

_RECORD = struct.Struct("<4s16sqdq28sq")  # mark, boot, pid, monotonic seconds, step, phase, slot
_MARK = b"bea2"


@functools.cache
def this_boot() -> bytes:
    """Which start of which machine this is (16 bytes): processes that agree on it share a monotonic clock."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a process: who, when (`time.monotonic()` seconds), at which step and phase; while it
    computes, at which slot."""

    pid: int
    mono: float
    step: int
    phase: str
    slot: int = -1
    boot: bytes = b""
    """The writer's `this_boot`."""


def beat_path(run_dir: Path, group: int, rank: int) -> Path:
    """Where rank `rank` of group `group` leaves its beats."""
    return Path(run_dir) / "state" / f"group-{group}.rank-{rank}.beat"


def agent_beat_path(run_dir: Path, group: int, node: int = 0) -> Path:
    """Where the agent of group `group` on its node `node` leaves its own beats."""
    return Path(run_dir) / "state" / (f"agent-{group}.node-{node}.beat" if node else f"agent-{group}.beat")


def lighthouse_beat_path(run_dir: Path) -> Path:
    """Where the lighthouse leaves its beats."""
    return Path(run_dir) / "state" / "lighthouse.beat"


class BeatFile:
    """Writes beats to one file."""

    def __init__(self, path: Path):
        self._fd = open_own(path)
        if os.fstat(self._fd).st_size > _RECORD.size:
            os.ftruncate(self._fd, 0)  # of something else, after which no beat would be read

    def beat(self, phase: str, step: int = 0, slot: int = -1) -> None:
        """I am alive, in `phase` (at most 28 bytes are kept) of step `step`, at slot `slot` if any."""
        record = _RECORD.pack(_MARK, this_boot(), os.getpid(), time.monotonic(), step, phase.encode()[:28], slot)
        os.pwrite(self._fd, record, 0)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_beat(path: Path) -> Beat | None:
    """The last beat in a file; None when there is none yet, or something else, or it cannot be read now."""
    try:
        return load_beat(path)
    except OSError:
        return None


def load_beat(path: Path) -> Beat | None:
    """The last beat in a file; None when there is none yet, or something else. Raises OSError if it cannot be read."""
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


def push(paths: list[Path]) -> None:
    """Hand the newest beats of this host to the file server, where other hosts see them."""
    for path in paths:
        with contextlib.suppress(OSError):  # there is none yet, or no room now: it is pushed again soon
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)


def age_s(path: Path) -> float | None:
    """How many seconds ago a beat file was written, or fewer; None: there is no beat.

    A beat of this host tells it by the monotonic clock. For one of another host it is the time between the file's and a
    probe file's, less SHARED_LAG_S. 0 if that cannot be known now: nobody is taken for dead for it.
    """
    try:
        beat = load_beat(path)
        if beat is None:
            return None
        if beat.boot == this_boot():
            return max(0.0, time.monotonic() - beat.mono)
        with open_regular(path, links=False) as file:  # to open it is what makes NFS ask
            since = os.fstat(file.fileno()).st_mtime
        return max(0.0, file_system_now(path.parent) - since - SHARED_LAG_S)
    except OSError:  # no descriptor, a full disk, or somebody else's run directory
        return 0.0


def beats_of_groups(run_dir: Path) -> list[tuple[int, Beat, float]]:
    """The last beat of each group's rank 0: group id, beat, and its `age_s`."""
    found = []
    for path in sorted((Path(run_dir) / "state").glob("group-*.rank-0.beat")):
        beat, age = read_beat(path), age_s(path)
        group = path.name.removeprefix("group-").partition(".")[0]
        if beat is not None and age is not None and group.isdecimal():
            found.append((int(group), beat, age))
    return found


def forget_beats(run_dir: Path) -> None:
    """Remove the beats of an earlier start of the run: nobody who left them lives."""
    for path in (Path(run_dir) / "state").glob("*.beat"):
        path.unlink(missing_ok=True)
