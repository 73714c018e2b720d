"""Faults of memory and disk."""

import contextlib
import errno
import os
import random
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.undo import Undo
from everstep.chaos.view import View
from everstep.run import typed
from everstep.run.token import read_token
from everstep.snapshot.buffer import HEADER_BYTES
from everstep.snapshot.peers import Place, read_places
from everstep.snapshot.room import lock_file
from everstep.snapshot.segment import BUFFERS, Segment, run_id

LEFT_BYTES = 64 << 10
"""A file system with less room than this is full."""
FILLED_BYTES = 16 << 30
"""The largest file system that is filled: a larger one is hardly one that was made for a trial."""
FILLER = ".everstep-filler"
SYSTEM_MOUNTS = frozenset(map(Path, ("/", "/dev/shm", "/home", "/run", "/tmp", "/var", "/var/tmp")))


class CorruptSnapshot(Fault):
    name = "corrupt-snapshot"
    breaks = "One bit of a published snapshot in memory flips."
    undone = "The slot is written again two snapshots later."
    expected = (
        "Training notices nothing. A keeper or a restore that reads it sees that its checksum does not match: that \
part is decoded from parity, or the step passed over."
    )
    on = frozenset({"local"})

    def never(self, run: View) -> str | None:
        return None if run.takes_snapshots else "it takes no snapshots (snapshot.enable)"

    def why_not(self, run: View) -> str | None:
        return None if _slots(run.run_dir) else "no snapshot is in this machine's memory yet"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        group, file, size = choose.choice(_slots(target.run_dir))
        at, bit = HEADER_BYTES + choose.randrange(size), 1 << choose.randrange(8)

        def strike() -> None:
            with open(file, "r+b", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as slot:
                slot.seek(at)
                byte = slot.read(1)
                slot.seek(at)
                slot.write(bytes([byte[0] ^ bit]))

        return Injection(strike=strike, fields={"of_group": group, "file": str(file), "at_byte": at})


def _slots(run_dir: Path) -> list[tuple[int, Path, int]]:
    """Published data slots on this machine: group, file, payload bytes."""
    found = []
    for segment in own_segments(run_dir, read_places(run_dir)):
        for rank in segment.ranks():
            for index, header in zip(range(BUFFERS), segment.headers("data", rank), strict=True):
                if header is not None:
                    found.append((segment.group, segment.file("data", rank, index), header.payload_bytes))
    return found


@dataclass(kw_only=True)
class _Filled(Fault):
    """Takes all that is left of a file system of the run's own; nobody else's is touched."""

    undone = "The filler is removed after duration_s."
    on = frozenset({"local"})

    duration_s: float = 6.0

    def place(self, run: View) -> Path | None:
        """A folder on the file system in question, once there is one."""
        raise NotImplementedError

    def prefixes(self, run: View) -> tuple[str, ...]:
        """What the names of the run's own entries in `place` begin with."""
        return ("",)

    def never(self, run: View) -> str | None:
        place = self.place(run)
        return None if place is None else why_shared(place, self.prefixes(run))

    def why_not(self, run: View) -> str | None:
        return None if self.place(run) else "nothing is there yet"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        place = self.place(target.run)
        assert place is not None
        filler = place / FILLER

        def strike() -> None:
            fd = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _fill(fd, shutil.disk_usage(place).free)
            finally:
                os.close(fd)

        undo = Undo("remove-filler", {"path": str(filler)})
        return Injection(strike=strike, fields={"folder": str(place)}, undo=undo)


def _fill(fd: int, free: int) -> None:
    """Let an open file take what is left of its file system, `free` bytes or, as others write to it, fewer."""
    size, piece = 0, free
    while piece >= LEFT_BYTES:
        try:
            os.posix_fallocate(fd, size, piece)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2
        else:
            size += piece


class FullSharedMemory(_Filled):
    name = "full-tmpfs"
    breaks = "The tmpfs of the snapshots is full. Only if snapshot.segment_dir is one of the run's own."
    expected = "Snapshots that need more room fail with a sentence; training goes on."

    def place(self, run: View) -> Path | None:
        return next((Path(place.segment).parent for place in read_places(run.run_dir)), None)

    def prefixes(self, run: View) -> tuple[str, ...]:
        return f"everstep-{run_id(read_token(run.run_dir))}-", lock_file(Path()).name


class FullDisk(_Filled):
    name = "full-disk"
    breaks = "The file system of the checkpoints is full. Only if checkpoint.folder is a mount of the run's own."
    expected = "The checkpoint fails with a sentence; training goes on; the checkpoint before stays."

    def place(self, run: View) -> Path | None:
        section = run.section("checkpoint")
        folder = run.run_dir / str(section.get("folder", "checkpoint"))
        return folder if section.get("enable") and folder.is_dir() else None


def why_shared(place: Path, prefixes: tuple[str, ...] = ("",)) -> str | None:
    """Why filling the file system of `place` could harm others than the run; None: nothing else is on it.

    prefixes: what the names of the run's own entries in `place` begin with.
    """
    above, folder, own = [place], place, {FILLER, "lost+found"}
    while not folder.is_mount():
        own.add(folder.name)
        folder = folder.parent
        above.append(folder)
    for directory in above:
        for name in os.listdir(directory):
            if name not in own and not (directory == place and name.startswith(prefixes)):
                return f"{folder} is a file system that others use as well: {directory / name} is on it"
    device = os.stat(folder).st_dev
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    roots = [row[3] for row in rows if row[2] == f"{os.major(device)}:{os.minor(device)}"]
    if folder in SYSTEM_MOUNTS or roots != ["/"]:
        return f"{folder} is a file system that others use as well"
    if (size := shutil.disk_usage(folder).total) > FILLED_BYTES:
        return (
            f"the file system {folder} has {size >> 30} GiB, and none of more than {FILLED_BYTES >> 30} GiB is filled"
        )
    return None


def own_segments(run_dir: Path, places: Iterable[Place]) -> list[Segment]:
    """The segments of this run's keepers. A path that a keeper's file names is believed only if it is the one that
    follows from the run's token, a folder, and this user's."""
    found = []
    for place in places:
        segment = Segment(Path(place.segment).parent, run_id(read_token(run_dir)), place.group)
        with contextlib.suppress(OSError):
            there = os.lstat(segment.path)
            if segment.path == Path(place.segment) and stat.S_ISDIR(there.st_mode) and there.st_uid == os.geteuid():
                found.append(segment)
    return found


@dataclass(frozen=True)
class _Filling:
    path: str


def undo(args: dict[str, Any]) -> None:
    """The filler goes, if it is there. Raises UnfitError for any other file."""
    path = Path(typed.parse(_Filling, args).path)
    if path.name != FILLER or not path.is_absolute():
        raise typed.UnfitError(f"{ascii(str(path))[:200]} is no filler of a fault")
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise typed.UnfitError(f"{path} is no filler of a fault of this user")
        path.unlink()


KINDS: tuple[type[Fault], ...] = (CorruptSnapshot, FullSharedMemory, FullDisk)
