"""The segment: one keeper's directory on tmpfs, with the buffers of a run's groups on this host.

everstep-RUN/                       everstep-RUN-group-K where each group counts as a host of its own
    lock                            held by the keeper (flock)
    group-K.rank-R.buffer-0, -1     the newest snapshots of a rank, written by its trainer
    group-K.rank-R.parity-0, -1     the newest parities coded by the keeper
    bell                            a pipe: trainers write to it at every publication, which wakes the keeper
    group-K.rank-R.notes            what the keeper knows about the rank's newest snapshot, for the trainer
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from everstep.run.regular import NotRegularError, is_own_directory, read_regular
from everstep.snapshot.buffer import BUFFERS, BufferReader, SnapshotError
from everstep.snapshot.header import Header, Kind
from everstep.snapshot.section import Snapshot

NOTES_BYTES = 4096
KEEPER_SILENT_S = 5.0
REASON_BYTES = 500
"""Which fit, however JSON escapes them."""
READ_TRIES = 100
_FILE_WORD: dict[Kind, str] = {"data": "buffer", "parity": "parity"}
_COLUMN = re.compile(r"group-(\d{1,9})\.rank-(\d{1,9})\.buffer-0")


def run_id(token: bytes) -> str:
    """A run's public name, from its secret token: 16 hexadecimal digits."""
    return hashlib.sha256(b"everstep run " + token).hexdigest()[:16]


@dataclass(frozen=True)
class Notes:
    """A keeper's word on one rank's newest snapshot, written for the trainer beside it."""

    heartbeat: float = 0.0
    """time.monotonic() of the keeper's last word."""
    sequence: int = -1
    """The youngest buffer that the keeper has dealt with."""
    coded: bool = False
    """Parity over others' parts is published here, whose bytes match their checksums; without parity, its own do."""
    settled: bool = False
    """No work on it is under way or to come."""
    reason: str = ""
    """Why it is settled without being coded."""
    waits_for: int = -1
    """The group because of which; -1 for none."""

    @property
    def is_silent(self) -> bool:
        """Whether the keeper has said nothing for a while."""
        return time.monotonic() - self.heartbeat > KEEPER_SILENT_S


class Segment:
    """Paths and bookkeeping of one group's buffers on this host."""

    def __init__(self, directory: Path, run: str, group: int, path: Path) -> None:
        self.root, self.run, self.group, self.path = directory, run, group, path

    @classmethod
    def of(cls, settings: Snapshot, run: str, group: int) -> "Segment":
        """That of a group under these settings."""
        directory = Path(settings.segment_dir)
        own = f"-group-{group}" if settings.failure_domain == "group" else ""
        return cls(directory, run, group, directory / f"everstep-{run}{own}")

    def beside(self, group: int) -> "Segment":
        """Another group's in the same directory."""
        return Segment(self.root, self.run, group, self.path)

    def create(self) -> None:
        """Raises SnapshotError, naming the directory, when it cannot be made or is another user's."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise SnapshotError(f"{self.path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error
        # A directory that a stranger made first under our name could swap the files under a mapping; so could one
        # that owns a link under it.
        if not is_own_directory(self.path):
            raise SnapshotError(f"{self.path} belongs to another user: remove it or set snapshot.segment_dir")

    def remove(self) -> None:
        """Give all memory back. Mappings that processes still have live on until they drop them."""
        shutil.rmtree(self.path, ignore_errors=True)

    def drop(self, rank: int) -> None:
        """Give up what a rank holds, and give its memory back."""
        for path in self.path.glob(f"group-{self.group}.rank-{rank}.*"):
            path.unlink(missing_ok=True)

    def file(self, kind: Kind, rank: int, index: int) -> Path:
        return self.path / f"group-{self.group}.rank-{rank}.{_FILE_WORD[kind]}-{index}"

    def files(self, kind: Kind, rank: int) -> list[Path]:
        """The rank's buffers, of which not all need be there."""
        return [self.file(kind, rank, index) for index in range(BUFFERS)]

    def columns(self) -> list[tuple[int, int]]:
        """The groups and ranks that keep snapshots in this directory. Raises OSError when it cannot be read."""
        found = []
        with contextlib.suppress(FileNotFoundError):  # removed under us: none
            found = [match for name in os.listdir(self.path) if (match := _COLUMN.fullmatch(name))]
        return sorted((int(match.group(1)), int(match.group(2))) for match in found)

    def headers(self, kind: Kind, rank: int) -> list[Header | None]:
        """What each of the rank's buffers holds; None for one that holds nothing or is not of this run. Raises OSError
        when one is there and cannot be read."""
        return [self._header(kind, rank, path) for path in self.files(kind, rank)]

    def held(self, kind: Kind, rank: int) -> list[tuple[Path, Header]]:
        """Those that hold something. Raises OSError."""
        both = zip(self.files(kind, rank), self.headers(kind, rank), strict=True)
        return [(path, header) for path, header in both if header is not None]

    def _header(self, kind: Kind, rank: int, path: Path) -> Header | None:
        try:
            reader = BufferReader(path)
        except (FileNotFoundError, PermissionError, NotRegularError, IsADirectoryError):
            return None
        with contextlib.closing(reader):
            header = reader.header()
        # A file may have been put anywhere.
        wanted = (self.run, kind, self.group, rank)
        return header if header and (header.run, header.kind, header.group, header.rank) == wanted else None

    def claim(self, rank: int) -> None:
        """Have the keeper look after this rank before it has published anything. Raises SnapshotError."""
        path = self.file("data", rank, 0)
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise SnapshotError(f"{path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error

    def bell(self) -> int:
        """The keeper's end of a pipe: readable once somebody has rung. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkfifo(self.path / "bell", 0o600)
        return os.open(self.path / "bell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def ring(self) -> None:
        """Say that there is something new, or a use for the keeper: it looks at once, if there is one that listens."""
        with contextlib.suppress(OSError):
            os.utime(self.path / "bell")  # for those who sweep
            fd = os.open(self.path / "bell", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"\0")
            finally:
                os.close(fd)

    def _notes(self, rank: int) -> Path:
        return self.path / f"group-{self.group}.rank-{rank}.notes"

    def write_notes(self, rank: int, notes: Notes) -> None:
        """In place, so that a tmpfs that has become full does not silence a keeper. Raises OSError."""
        reason = notes.reason.encode(errors="replace")[:REASON_BYTES].decode(errors="ignore")
        body = json.dumps(replace(notes, reason=reason).__dict__).encode()
        record = xxhash.xxh3_64_hexdigest(body).encode() + body
        fd = os.open(self._notes(rank), os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, record.ljust(NOTES_BYTES), 0)
        finally:
            os.close(fd)

    def read_notes(self, rank: int) -> Notes:
        """The keeper's last word, or an empty one when there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            for _ in range(READ_TRIES):  # one that is just being written is half the one and half the other
                record = read_regular(self._notes(rank), NOTES_BYTES)
                digest, body = record[:16], record[16:].rstrip()
                if xxhash.xxh3_64_hexdigest(body).encode() == digest:
                    return Notes(**json.loads(body))
        return Notes()
