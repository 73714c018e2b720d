"""The workers' own states in the run directory: what a worker that moves to another group is taken from.

One file for each worker, rank of a group and round, or steps of a round, written by the group that computed them, in a
thread of its own, while training goes on. In front of the state stands an authentication code (GMAC, under a key that
is the file's alone and made from the run's token) of the state and of what it is the state of: a file that was torn,
altered, moved or written by somebody else is no state.
"""

import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from everstep.run.files import write_whole
from everstep.run.regular import open_regular
from everstep.wire.sealing import KEY_BYTES, TAG_BYTES, Gcm, SealError

SALT_BYTES = 32
HEAD_BYTES = SALT_BYTES + TAG_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """What a state is of: this rank's part of a worker's own state, after a round, or after some steps of it.

    Attributes:
        history: after the round, or if `steps` is not 0 before it.
        steps: that the worker has made of the round; 0: all, and it is committed.
        writer: who made them, 32 bits, the same on all ranks of a group; 0 if `steps` is.
    """

    worker: int
    round: int
    history: int
    steps: int = 0
    writer: int = 0


_NAME = re.compile(
    r"\.?worker-(?P<worker>\d+)\.rank-(?P<rank>\d+)\.round-(?P<round>\d+)\."
    r"(steps-(?P<steps>\d+)\.by-(?P<writer>[0-9a-f]+)\.)?(?P<history>[0-9a-f]+)"
)
"""Of a state's file, or of its draft."""


def folder_of(run_dir: Path) -> Path:
    """Where a run's states of workers are."""
    return run_dir / "state" / "workers"


def files_by_round(folder: Path, worker: int) -> dict[int, list[Path]]:
    """The files of a worker's states after rounds, of all ranks."""
    found: dict[int, list[Path]] = {}
    for path in folder.glob(f"worker-{worker}.rank-*"):
        if (of := _NAME.fullmatch(path.name)) and of["steps"] is None:
            found.setdefault(int(of["round"]), []).append(path)
    return found


def files_within_rounds(folder: Path, worker: int) -> list[Path]:
    """The files of a worker's states within rounds, of all ranks."""
    return list(folder.glob(f"worker-{worker}.rank-*.steps-*"))


class WorkerFiles:
    """One rank's states of workers, of whatever group.

    Args:
        folder: of all workers.
        rank: of this process in its group.
        whose: further words that a state is bound to: the run, and how its groups are laid out.
        nbytes: of every state after a round.
        token: the run's.
        most: bytes of a state within a round at most.
    """

    def __init__(self, folder: Path, *, rank: int, whose: str, nbytes: int, token: bytes, most: int = 0) -> None:
        self._folder, self._rank, self._whose, self._nbytes, self._token = folder, rank, whose, nbytes, token
        self._most = most
        self._writer = ThreadPoolExecutor(1, "worker-files")
        self._writing: dict[Place, Future[None]] = {}
        self.written_bytes = 0
        """What this rank has written so far."""

    def path(self, place: Place) -> Path:
        within = f"steps-{place.steps}.by-{place.writer:x}." if place.steps else ""
        return self._folder / f"worker-{place.worker}.rank-{self._rank}.round-{place.round}.{within}{place.history:x}"

    def save(self, states: Mapping[Place, bytes], *, keep_from: int) -> None:
        """Begin to write these states after rounds, and to remove those of the same workers after rounds before
        `keep_from`, and within rounds that are over."""
        for place, state in states.items():
            self._writing[place] = self._writer.submit(self._write, place, [memoryview(state)], keep_from)

    def save_within(self, place: Place, parts: Sequence[memoryview], *, keep_from: int) -> None:
        """Begin to write a state within a round, in parts, which must stay as they are until it is written. Of the
        same worker's states within rounds those of earlier rounds are removed, and of this one after fewer than
        `keep_from` steps."""
        self._writing[place] = self._writer.submit(self._write, place, parts, keep_from)

    @property
    def idle(self) -> bool:
        """Whether nothing is being written."""
        return all(future.done() for future in self._writing.values())

    def settle(self) -> None:
        """Wait for what is being written."""
        wait(self._writing.values())

    def failures(self) -> list[str]:
        """Why states could not be written, since the last call."""
        done = [place for place, future in self._writing.items() if future.done()]
        errors = [self._writing.pop(place).exception() for place in done]
        return [str(error) for error in errors if error is not None]

    def has(self, place: Place) -> bool:
        """Whether there is a file of the right size for it."""
        with contextlib.suppress(OSError):
            return self.path(place).stat().st_size == HEAD_BYTES + self._nbytes
        return False

    def forget_within(self) -> None:
        """Remove this rank's states within rounds, of all workers."""
        for path in self._folder.glob(f"worker-*.rank-{self._rank}.round-*.steps-*"):
            path.unlink(missing_ok=True)

    def within(self, place: Place) -> list[Place]:
        """The states within a round that are there; of `place` steps and writer are not read."""
        beginning, _, end = self.path(replace(place, steps=1, writer=1)).name.partition("steps-1.by-1.")
        found = (_NAME.fullmatch(path.name) for path in self._folder.glob(f"{beginning}steps-*.by-*.{end}"))
        return [replace(place, steps=int(of["steps"]), writer=int(of["writer"], 16)) for of in found if of]

    def read(self, place: Place) -> bytes | None:
        """The state; None if it is not there whole and authentic."""
        most = self._most if place.steps else self._nbytes
        try:
            with open_regular(self.path(place), links=False, limit=HEAD_BYTES + most) as file:
                salt, tag, state = file.read(SALT_BYTES), file.read(TAG_BYTES), file.read(most)
        except OSError:
            return None
        if len(tag) < TAG_BYTES or not (place.steps or len(state) == self._nbytes):
            return None
        opening = self._cipher(salt).open(self._of(place))
        opening.update([memoryview(state)])
        try:
            opening.check(tag)
        except SealError:
            return None
        return state

    def _cipher(self, salt: bytes) -> Gcm:
        """Of one file."""
        return Gcm(hashlib.blake2b(salt, key=self._token[:64], digest_size=KEY_BYTES).digest(), encrypts=False)

    def _of(self, place: Place) -> bytes:
        of = json.dumps([self._whose, self._rank, self._nbytes, asdict(place)]).encode()
        return len(of).to_bytes(8, "little") + of

    def _write(self, place: Place, parts: Sequence[memoryview], keep_from: int) -> None:
        salt = secrets.token_bytes(SALT_BYTES)
        sealing = self._cipher(salt).seal(self._of(place))
        sealing.update(parts)
        write_whole(self.path(place), salt, sealing.tag(), *parts)
        self.written_bytes += sum(part.nbytes for part in parts)
        for path in self._folder.iterdir():
            of = _NAME.match(path.name)
            if of is None or (int(of["worker"]), int(of["rank"])) != (place.worker, self._rank):
                continue
            round_, history, within = int(of["round"]), int(of["history"], 16), of["steps"]
            if place.steps:
                # Who has missed a commit may be a round behind.
                this = (round_, history) == (place.round, place.history)
                useless = within is not None and (round_ < place.round or (this and int(within) < keep_from))
            else:
                useless = round_ <= place.round if within is not None else round_ < keep_from
            if useless:
                path.unlink(missing_ok=True)
