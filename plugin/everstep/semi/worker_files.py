"""The workers' own states in the run directory: one file for each worker, rank of a group and round.

In front of the state stands an authentication code (GMAC, under a key that is the file's alone and made from the run's
token) of the state and of what it is the state of: a file that was torn, altered, moved or written by somebody else is
no state.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.run.files import write_whole
from everstep.run.regular import open_regular
from everstep.wire.sealing import KEY_BYTES, TAG_BYTES, Sealer, SealError, Suite

SALT_BYTES = 32
HEAD_BYTES = SALT_BYTES + TAG_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """What a state is of: this rank's part of a worker's own state.

    Attributes:
        round: that it is after, and that is committed.
        history: after that commit.
    """

    worker: int
    round: int
    history: int


_NAME = re.compile(r"\.?worker-(?P<worker>\d+)\.rank-(?P<rank>\d+)\.round-(?P<round>\d+)\.(?P<history>[0-9a-f]+)")
"""Of a state's file, or of its draft."""


def folder_of(run_dir: Path) -> Path:
    """Where a run's states of workers are."""
    return run_dir / "state" / "workers"


def files_by_round(folder: Path, worker: int) -> dict[int, list[Path]]:
    """The files of a worker's states after rounds, of all ranks."""
    found: dict[int, list[Path]] = {}
    for path in folder.glob(f"worker-{worker}.rank-*"):
        if of := _NAME.fullmatch(path.name):
            found.setdefault(int(of["round"]), []).append(path)
    return found


class WorkerFiles:
    """One rank's states of workers, of whatever group.

    Args:
        folder: of all workers.
        rank: of this process in its group.
        whose: further words that a state is bound to: the run, and how its groups are laid out.
        nbytes: of every state.
        token: the run's.
    """

    def __init__(self, folder: Path, *, rank: int, whose: str, nbytes: int, token: bytes) -> None:
        self.folder, self._rank, self._whose, self._nbytes, self._token = folder, rank, whose, nbytes, token
        self.written_bytes = 0
        """What this rank has written so far."""

    def path(self, place: Place) -> Path:
        return self.folder / f"worker-{place.worker}.rank-{self._rank}.round-{place.round}.{place.history:x}"

    def has(self, place: Place) -> bool:
        """Whether there is a file of the right size for a state."""
        with contextlib.suppress(OSError):
            return self.path(place).stat().st_size == HEAD_BYTES + self._nbytes
        return False

    def of(self, worker: int) -> list[Place]:
        """The states of a worker that are there, by their names."""
        return [place for path, place in self._all(worker) if not path.name.startswith(".")]

    def read(self, place: Place) -> bytes | None:
        """The state; None if it is not there whole and authentic."""
        try:
            with open_regular(self.path(place), links=False, limit=HEAD_BYTES + self._nbytes) as file:
                salt, tag, state = file.read(SALT_BYTES), file.read(TAG_BYTES), file.read(self._nbytes)
        except OSError:
            return None
        if len(tag) < TAG_BYTES or len(state) != self._nbytes:
            return None
        opening = self._cipher(salt).open(self._head(place))
        opening.update([memoryview(state)])
        try:
            opening.check(tag)
        except SealError:
            return None
        return state

    def write(self, place: Place, state: bytes, *, keep_round: int) -> None:
        """Write a state, then remove those of the same worker after rounds before `keep_round`: another history may
        have to go on from later ones. Raises OSError."""
        salt = secrets.token_bytes(SALT_BYTES)
        sealing = self._cipher(salt).seal(self._head(place))
        sealing.update([memoryview(state)])
        write_whole(self.path(place), salt, sealing.tag(), state)
        self.written_bytes += len(state)
        for path, known in list(self._all(place.worker)):
            if known.round < keep_round:
                path.unlink(missing_ok=True)

    def _all(self, worker: int) -> Iterator[tuple[Path, Place]]:
        """The files and drafts of a worker on this rank."""
        for path in [*self.folder.glob(f"worker-{worker}.*"), *self.folder.glob(f".worker-{worker}.*")]:
            of = _NAME.match(path.name)
            if of is not None and int(of["rank"]) == self._rank:
                yield path, Place(worker, int(of["round"]), int(of["history"], 16))

    def _cipher(self, salt: bytes) -> Sealer:
        """Of one file."""
        return Sealer(hashlib.blake2b(salt, key=self._token[:64], digest_size=KEY_BYTES).digest(), Suite.GMAC)

    def _head(self, place: Place) -> bytes:
        of = json.dumps([self._whose, self._rank, self._nbytes, asdict(place)]).encode()
        return len(of).to_bytes(8, "little") + of
