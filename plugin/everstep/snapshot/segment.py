"""The segment: one keeper's directory of buffers on tmpfs.

everstep-RUN-group-K/
    lock                     held by the keeper (flock)
    rank-R.buffer-0, -1, -2  the newest snapshots of a rank, written by its trainer
    rank-R.parity-0, -1      the two newest parities coded by the keeper; parity-2 while a step is coded a second time
    rank-R.writing           held (flock) while one of the rank's buffers is written or exchanged
    rank-R.rebuilt           a buffer that is being made anew
    rank-R.notes             what the keeper knows about the rank's buffers, for the trainer
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from everstep.snapshot.buffer import BufferReader, SnapshotError
from everstep.snapshot.header import Header, Kind
from everstep.snapshot.room import BUFFERS, PARITY_BUFFERS, is_own_directory

NOTES_BYTES = 4096
REASON_CHARACTERS = 500
"""Which fit, whatever they are."""
READ_TRIES = 100
_FILE_WORD: dict[Kind, str] = {"data": "buffer", "parity": "parity"}
_COUNT: dict[Kind, int] = {"data": BUFFERS, "parity": PARITY_BUFFERS}


def run_id(token: bytes) -> str:
    """A run's public name, from its secret token: 16 hexadecimal digits."""
    return hashlib.sha256(b"everstep run " + token).hexdigest()[:16]


@dataclass(frozen=True)
class Notes:
    """A keeper's word on one rank's newest snapshots, written for the trainer beside it."""

    heartbeat: float = 0.0
    """time.monotonic() of the keeper's last word."""
    sequence: int = -1
    """The youngest buffer that the keeper has dealt with."""
    sound: bool = False
    """Its bytes match its checksums."""
    coded: bool = False
    """Its parity shards are published here."""
    settled: bool = False
    """No parity work on it is under way or to come."""
    reason: str = ""
    """Why it is settled without being coded."""
    rests_until: float = 0.0
    """time.monotonic() until which the next snapshots are not to be verified and coded."""
    holding: int = -1
    """A buffer that somebody reads and that must not be overwritten meanwhile."""
    held: int = -1
    """The buffer that was held last."""


class Segment:
    """Paths and bookkeeping of one group's buffers on this host."""

    def __init__(self, directory: Path, run: str, group: int) -> None:
        self.root = directory
        self.run = run
        self.group = group
        self.path = directory / f"everstep-{run}-group-{group}"

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

    def file(self, kind: Kind, rank: int, index: int) -> Path:
        return self.path / f"rank-{rank}.{_FILE_WORD[kind]}-{index}"

    def files(self, kind: Kind, rank: int) -> list[Path]:
        """The rank's buffers, of which not all need be there."""
        return [self.file(kind, rank, index) for index in range(_COUNT[kind])]

    def ranks(self) -> list[int]:
        """The ranks that have buffers here."""
        found = set()
        with contextlib.suppress(FileNotFoundError):  # removed under us: no ranks
            for name in os.listdir(self.path):
                if match := re.fullmatch(r"rank-(\d+)\.buffer-\d", name):
                    found.add(int(match.group(1)))
        return sorted(found)

    def headers(self, kind: Kind, rank: int) -> list[Header | None]:
        """What each of the rank's buffers holds; None for one that holds nothing or is not of this run."""
        return [self.header(kind, rank, path) for path in self.files(kind, rank)]

    def header(self, kind: Kind, rank: int, path: Path) -> Header | None:
        """What one of them holds. Raises OSError when it is there and cannot be read."""
        try:
            reader = BufferReader(path)
        except (FileNotFoundError, PermissionError):
            return None
        try:
            header = reader.header()
        finally:
            reader.close()
        if header is None or not self.owns(header, kind, rank):
            return None
        return header

    def owns(self, header: Header, kind: Kind, rank: int) -> bool:
        """Whether a header found in the rank's file of that kind belongs there. A file may have been put anywhere."""
        return header.is_for(run=self.run, kind=kind, group=self.group, rank=rank)

    def bytes_of(self, rank: int) -> int:
        """Memory that the rank's buffers and parity take now."""
        total = 0
        for kind in _FILE_WORD:
            for path in self.files(kind, rank):
                with contextlib.suppress(FileNotFoundError):  # not made yet
                    total += path.stat().st_size
        return total

    @contextlib.contextmanager
    def writing(self, rank: int, wait_s: float) -> Iterator[None]:
        """Alone among those who write the rank's buffers, its trainer, or put another in one's place, its keeper.

        Who has written changes the `mark`. Raises SnapshotError if somebody else is at it for longer than `wait_s`: a
        keeper that is stopped may be, and nobody waits for it.
        """
        path, deadline = self._writing(rank), time.monotonic() + wait_s
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SnapshotError(f"{path} cannot be made: {error.strerror} (snapshot.segment_dir)") from error
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise SnapshotError(f"{path} is held by another process") from None
                    time.sleep(0.01)
            yield
            os.utime(fd, ns=(time.time_ns(),) * 2)  # finer than the clock that the kernel would take
        finally:
            os.close(fd)

    def mark(self, rank: int) -> int:
        """Another number whenever the rank's trainer has published; -1 before the first time. Cheaper than to read
        headers."""
        try:
            return os.stat(self._writing(rank)).st_mtime_ns
        except OSError:
            return -1

    def _writing(self, rank: int) -> str:
        return f"{self.path}/rank-{rank}.writing"

    def write_notes(self, rank: int, notes: Notes) -> None:
        """In place, so that a tmpfs that has become full does not silence a keeper. Raises OSError."""
        body = json.dumps(replace(notes, reason=notes.reason[:REASON_CHARACTERS]).__dict__).encode()
        record = xxhash.xxh3_64_hexdigest(body).encode() + body
        fd = os.open(self.path / f"rank-{rank}.notes", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, record.ljust(NOTES_BYTES), 0)
        finally:
            os.close(fd)

    def read_notes(self, rank: int) -> Notes:
        """The keeper's last word, or an empty one when there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            for _ in range(READ_TRIES):  # one that is just being written is half the one and half the other
                record = (self.path / f"rank-{rank}.notes").read_bytes()
                digest, body = record[:16], record[16:].rstrip()
                if xxhash.xxh3_64_hexdigest(body).encode() == digest:
                    return Notes(**json.loads(body))
        return Notes()
