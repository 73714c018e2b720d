"""Signs of life: one small file per rank that its trainer overwrites and its agent's watchdog reads.

`RUN_DIR/state/group-K.rank-R.beat` holds one fixed-size record, written with a single `pwrite` of a
page-cached file (about a microsecond), so a beat belongs at every phase and every slot. Times are
`time.monotonic()`: writer and reader share a host. The writer's pid tells a beat of this incarnation from
one that a dead worker left.
"""

import contextlib
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

_RECORD = struct.Struct("<4sqdq28s")  # mark, pid, monotonic seconds, step, phase
_MARK = b"beat"


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a process: who, when (`time.monotonic()` seconds), at which step and phase."""

    pid: int
    mono: float
    step: int
    phase: str


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

    def beat(self, phase: str, step: int = 0) -> None:
        """I am alive, in `phase` (at most 28 bytes are kept) of step `step`."""
        record = _RECORD.pack(_MARK, os.getpid(), time.monotonic(), step, phase.encode()[:28])
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
    mark, pid, mono, step, phase = _RECORD.unpack(record)
    if mark != _MARK or pid < 2 or not math.isfinite(mono):
        return None
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Beat(pid, mono, step, "".join(c if c.isprintable() else "?" for c in name))


def beats_of_groups(run_dir: Path) -> list[tuple[int, Beat, float]]:
    """The last beat of each group's rank 0: group id, beat, and its age in seconds by the file's clock, which groups
    on several hosts share."""
    found = []
    for path in sorted((Path(run_dir) / "state").glob("group-*.rank-0.beat")):
        beat = read_beat(path)
        if beat is not None:
            with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or none of ours
                group = int(path.name.removeprefix("group-").partition(".")[0])
                found.append((group, beat, time.time() - path.stat().st_mtime))
    return found


def forget_beats(run_dir: Path) -> None:
    """Remove the beats of an earlier start of the run: nobody who left them lives."""
    for path in (Path(run_dir) / "state").glob("*.beat"):
        path.unlink(missing_ok=True)
