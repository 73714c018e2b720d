"""The segment: one keeper's directory on tmpfs, with the buffers of a run's groups on this host.

everstep-RUN/                       everstep-RUN-group-K if snapshot.failure_domain is "group"
    lock                            held by the keeper (flock)
    group-K.rank-R.buffer-0, -1     the newest snapshots of a rank, written by its trainer
    group-K.rank-R.parity-0, -1     the newest parities coded by the keeper
    bell                            a pipe: trainers write to it at each publication, which wakes the keeper
    group-K.rank-R.notes            what the keeper reports to the trainer about the rank's newest snapshot
    group-K.rank-R.left             the group left: others here remove the rank's files once no snapshot needs them
    worker-W.rank-R.round-N.HASH    a worker's own state (`worker_states`), in semi-synchronous runs only
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from everstep.run.files import NotRegularError, is_own_directory, read_regular
from everstep.snapshot.buffer import BUFFERS, BufferReader, SnapshotError
from everstep.snapshot.header import KINDS, Header, Kind
from everstep.snapshot.section import Snapshot

NOTES_BYTES = 4096
KEEPER_SILENT_S = 5.0
REASON_BYTES = 500
"""Longest reason in the notes: it fits into NOTES_BYTES, however JSON escapes it."""
READ_TRIES = 100
_FILE_WORD: dict[Kind, str] = {"data": "buffer", "parity": "parity"}
_COLUMN = re.compile(r"group-(\d{1,9})\.rank-(\d{1,9})\.(\S+)")


def run_id(token: bytes) -> str:
    """Return a run's public name, made from its secret token: 16 hexadecimal digits."""
    return hashlib.sha256(b"everstep run " + token).hexdigest()[:16]


@dataclass(frozen=True)
class Notes:
    """What a keeper reports about one rank's newest snapshot to the trainer on the same host."""

    heartbeat: float = 0.0
    """time.monotonic() when the keeper last wrote notes."""
    sequence: int = -1
    """`Header.sequence` of the newest snapshot that the keeper has begun to verify and code."""
    coded: bool = False
    """Whether parity over the others' verified parts is published here; else whether its part is verified."""
    settled: bool = False
    """Whether the keeper's work on it is over."""
    reason: str = ""
    """Why it is settled and not coded."""
    blamed_group: int = -1
    """The group because of which it is not coded; -1 for none."""

    @property
    def is_silent(self) -> bool:
        """Whether the keeper has written no notes for KEEPER_SILENT_S seconds."""
        return time.monotonic() - self.heartbeat > KEEPER_SILENT_S


class Segment:
    """One group's files in a keeper's directory, and the directory itself."""

    def __init__(self, run: str, group: int, path: Path) -> None:
        self.run, self.group, self.path = run, group, path

    @classmethod
    def of(cls, settings: Snapshot, run: str, group: int) -> "Segment":
        """Return the segment of a group under these settings."""
        own = f"-group-{group}" if settings.failure_domain == "group" else ""
        return cls(run, group, Path(settings.segment_dir) / f"everstep-{run}{own}")

    def beside(self, group: int) -> "Segment":
        """Return another group's segment in the same directory."""
        return Segment(self.run, group, self.path)

    def create(self) -> None:
        """Make the directory. Raises SnapshotError, which names it, if it cannot be made or is another user's."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"{self.path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error
        # Another user who made this directory or a link first could replace files under our mappings.
        if not is_own_directory(self.path):
            raise SnapshotError(f"{self.path} belongs to another user: remove it or set snapshot.segment_dir")

    def remove(self) -> None:
        """Delete the directory. The memory of a file that a process has mapped is freed when that mapping ends."""
        shutil.rmtree(self.path, ignore_errors=True)

    def is_empty(self) -> bool:
        """Whether the directory can be read and no group has a snapshot or worker's state in it."""
        with contextlib.suppress(OSError):
            return not any(file.stat().st_size for file in self.path.iterdir() if file.suffix != ".notes")
        return False

    def drop(self, rank: int) -> None:
        """Delete all files of a rank. Their memory is freed once the trainer and the keeper end their mappings."""
        for path in self.path.glob(f"group-{self.group}.rank-{rank}.*"):
            path.unlink(missing_ok=True)

    def files(self, kind: Kind, rank: int) -> list[Path]:
        """Return the paths of the rank's buffers, which need not exist."""
        return [self._own(rank, f"{_FILE_WORD[kind]}-{index}") for index in range(BUFFERS)]

    def columns(self, word: str = "buffer-0") -> list[tuple[int, int]]:
        """Return the (group, rank) pairs with a data buffer in this directory, which may still be empty (`claim`), or
        with another file of this last `word`. Raises OSError if the directory cannot be read."""
        found = []
        with contextlib.suppress(FileNotFoundError):  # the directory was removed: there are none
            found = [match for name in os.listdir(self.path) if (match := _COLUMN.fullmatch(name))]
        return sorted((int(match[1]), int(match[2])) for match in found if match[3] == word)

    def headers(self, kind: Kind, rank: int) -> list[Header | None]:
        """Return the header of each of the rank's buffers; None for a buffer that is missing, no regular file, another
        user's, or holds nothing of this run and rank. Raises OSError if one cannot be read for another reason."""
        return [self._header(kind, rank, path) for path in self.files(kind, rank)]

    def held(self, kind: Kind, rank: int) -> list[tuple[Path, Header]]:
        """Return path and header of the rank's buffers that hold a snapshot. Raises OSError."""
        both = zip(self.files(kind, rank), self.headers(kind, rank), strict=True)
        return [(path, header) for path, header in both if header is not None]

    def inventory(self) -> list[Header]:
        """Return the header of every buffer in this directory, of all groups. Raises OSError."""
        columns = [(self.beside(group), rank) for group, rank in self.columns()]
        held = [segment.held(kind, rank) for kind in KINDS for segment, rank in columns]
        return [header for _, header in itertools.chain(*held)]

    def _header(self, kind: Kind, rank: int, path: Path) -> Header | None:
        try:
            reader = BufferReader(path)
        except (FileNotFoundError, PermissionError, NotRegularError, IsADirectoryError):
            return None
        with contextlib.closing(reader):
            header = reader.header()
        # A file's name proves nothing: somebody may have copied it here.
        wanted = (self.run, kind, self.group, rank)
        return header if header and (header.run, header.kind, header.group, header.rank) == wanted else None

    def leave(self, rank: int) -> None:
        """Have other groups here remove this rank's files once no snapshot needs them (`remove_left`)."""
        with contextlib.suppress(OSError):  # nothing can be written there, or there is nothing
            self._own(rank, "left").touch(0o600)

    def remove_left(self, rank: int, members: Collection[int]) -> None:
        """Remove this rank's files of groups that left, as a snapshot that others, `members`, share is coded now."""
        with contextlib.suppress(OSError):  # such as no free file descriptor: the next time
            for group in [group for group, other in self.columns("left") if other == rank and group not in members]:
                self.beside(group).drop(rank)

    def claim(self, rank: int) -> None:
        """Have the keeper look after this rank, also if it has left or not published yet. Raises SnapshotError."""
        path = self.files("data", rank)[0]
        try:
            self._own(rank, "left").unlink(missing_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise SnapshotError(f"{path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error

    def bell(self) -> int:
        """Open the keeper's end of the bell: a pipe that is readable after a `ring`. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.path / "bell", 0o600)
        return os.open(self.path / "bell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """Wake the keeper, if one is running: there is something new, or the keeper is still needed."""
        with contextlib.suppress(OSError):
            os.utime(self.path / "bell")  # `keepers.sweep` goes by this time
            fd = os.open(self.path / "bell", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"\0")
            finally:
                os.close(fd)

    def _own(self, rank: int, word: str) -> Path:
        return self.path / f"group-{self.group}.rank-{rank}.{word}"

    def write_notes(self, rank: int, notes: Notes) -> None:
        """Write a rank's notes in place, so that a keeper can still report if the tmpfs is full. Raises OSError."""
        reason = notes.reason.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore")
        body = json.dumps(replace(notes, reason=reason).__dict__).encode()
        record = xxhash.xxh3_64_hexdigest(body).encode() + body
        fd = os.open(self._own(rank, "notes"), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, record.ljust(NOTES_BYTES), 0)
        finally:
            os.close(fd)

    def read_notes(self, rank: int) -> Notes:
        """Return the keeper's last notes on a rank, or empty notes if there are none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            for _ in range(READ_TRIES):  # notes that are just being written are half old and half new
                record = read_regular(self._own(rank, "notes"), NOTES_BYTES)
                digest, body = record[:16], record[16:].rstrip()
                if xxhash.xxh3_64_hexdigest(body).encode() == digest:
                    return Notes(**json.loads(body))
        return Notes()
