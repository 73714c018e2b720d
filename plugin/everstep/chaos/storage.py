"""Faults of memory and disk."""

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from everstep.chaos.fault import Fault, Injection
from everstep.chaos.target import Target
from everstep.chaos.undo import Undo
from everstep.chaos.view import View
from everstep.snapshot.arena import SLOTS, Arena, run_id
from everstep.snapshot.peers import read_places, read_token
from everstep.snapshot.slot import HEADER_BYTES

LEFT_BYTES = 64 << 10


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
            with file.open("r+b") as slot:
                slot.seek(at)
                byte = slot.read(1)
                slot.seek(at)
                slot.write(bytes([byte[0] ^ bit]))

        return Injection(strike=strike, fields={"of_group": group, "file": str(file), "at_byte": at})


def _slots(run_dir: Path) -> list[tuple[int, Path, int]]:
    """Published data slots on this machine: group, file, payload bytes."""
    found = []
    for place in read_places(run_dir):
        arena = Arena(Path(place.arena).parent, run_id(read_token(run_dir)), place.group)
        for rank in arena.ranks():
            for index, header in zip(range(SLOTS), arena.headers("data", rank), strict=True):
                if header is not None:
                    found.append((place.group, arena.file("data", rank, index), header.payload_bytes))
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

    def never(self, run: View) -> str | None:
        place = self.place(run)
        return None if place is None or _own_mount(place) else f"{place} is on a file system that others use as well"

    def why_not(self, run: View) -> str | None:
        return None if self.place(run) else "nothing is there yet"

    def plan(self, target: Target, choose: random.Random) -> Injection:
        place = self.place(target.run)
        assert place is not None
        filler = place / ".filler"

        def strike() -> None:
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(place).free - LEFT_BYTES))

        undo = Undo("everstep.chaos.storage:remove", {"path": str(filler)})
        return Injection(strike=strike, fields={"folder": str(place)}, undo=undo)


class FullSharedMemory(_Filled):
    name = "full-tmpfs"
    breaks = "The tmpfs of the snapshots is full. Only if snapshot.arena_dir is one of the run's own."
    expected = "Snapshots that need more room fail with a sentence; training goes on."

    def place(self, run: View) -> Path | None:
        return next((Path(place.arena).parent for place in read_places(run.run_dir)), None)


class FullDisk(_Filled):
    name = "full-disk"
    breaks = "The file system of the checkpoints is full. Only if checkpoint.folder is a mount of the run's own."
    expected = "The checkpoint fails with a sentence; training goes on; the checkpoint before stays."

    def place(self, run: View) -> Path | None:
        section = run.section("checkpoint")
        folder = run.run_dir / str(section.get("folder", "checkpoint"))
        return folder if section.get("enable") and folder.is_dir() else None


def _own_mount(place: Path) -> bool:
    """Whether a mount that is not the system's holds it."""
    while not place.is_mount():
        place = place.parent
    return place not in (Path("/"), Path("/dev/shm"), Path("/tmp"), Path("/home"))


def remove(path: str) -> None:
    """Undo: the file goes, if it is there."""
    Path(path).unlink(missing_ok=True)


KINDS: tuple[type[Fault], ...] = (CorruptSnapshot, FullSharedMemory, FullDisk)
