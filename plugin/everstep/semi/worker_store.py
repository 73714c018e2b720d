"""One rank's store of workers' own states: the newest of each worker in memory, and a file for each worker, rank of a
group and round, which outlives the group.

In front of the state a file has a keyed digest (BLAKE2b, under the run's token) of the state and of what it is the
state of: a file that was torn, altered, moved or written by somebody else is no state.

A file is written by a thread while the next round is made. Of a worker one write is under way at a time; the next
begins with the first round that finds it done.
"""

import contextlib
import hashlib
import hmac
import json
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from everstep.run.files import write_whole
from everstep.run.regular import open_regular

TAG_BYTES = 32
OLDER = 2
"""Rounds whose states stay on storage besides the newest one's."""


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


_NAME = re.compile(r"\.?worker-\d+\.rank-(?P<rank>\d+)\.round-(?P<round>\d+)\.")
"""Of a state's file, or of its draft."""


def folder_of(run_dir: Path) -> Path:
    """Where a run's states of workers are."""
    return run_dir / "state" / "workers"


class WorkerStore:
    """Keeps workers' own states, and tells which are not on storage yet.

    Args:
        folder: of all workers.
        rank: of this process in its group.
        whose: further words that a state is bound to: the run, and how its groups are laid out.
        nbytes: of every state.
        token: the run's.
    """

    def __init__(self, folder: Path, *, rank: int, whose: str, nbytes: int, token: bytes) -> None:
        self.folder, self._rank, self._whose, self._nbytes, self._token = folder, rank, whose, nbytes, token
        self.held: dict[int, tuple[Place, bytes]] = {}
        """By worker the newest state after a round that this rank has in memory."""
        self.written_bytes = 0
        """Of all writes that this rank has begun."""
        self._writes: dict[int, tuple[Place, Future[None]]] = {}
        """By worker the write that was begun last."""

    # States

    def hold(self, place: Place, state: bytes) -> None:
        """Keep a worker's newest state in memory."""
        self.held[place.worker] = place, state

    def holds(self, worker: int, round_: int) -> bool:
        """Whether a worker's state after a round is in memory."""
        return worker in self.held and self.held[worker][0].round == round_

    def let_go(self, known: Iterable[Place]) -> None:
        """Forget states in memory that are of none of these places, or older than one of them that is in a file."""
        known = list(known)
        for worker, (place, _) in list(self.held.items()):
            newer = (one for one in known if one.worker == worker and one.round > place.round)
            if place not in known or any(self.on_storage(one) for one in newer):
                del self.held[worker]

    def has(self, place: Place) -> bool:
        """Whether a state after a round is in memory or in a file, by its name and size."""
        return self.holds(place.worker, place.round) or self.on_storage(place)

    def read(self, place: Place) -> bytes | None:
        """A state in memory or in a file; None if it is not there whole and authentic."""
        held, state = self.held.get(place.worker, (None, b""))
        if held == place:
            return state
        try:
            with open_regular(self.path(place), links=False, limit=TAG_BYTES + self._nbytes) as file:
                tag, state = file.read(TAG_BYTES), file.read(self._nbytes)
        except OSError:
            return None
        is_whole = len(state) == self._nbytes and hmac.compare_digest(tag, self._tag(place, state))
        return state if is_whole else None

    # Files

    def path(self, place: Place) -> Path:
        return self.folder / f"worker-{place.worker}.rank-{self._rank}.round-{place.round}.{place.history:x}"

    def on_storage(self, place: Place) -> bool:
        """Whether there is a file of the right size for a state."""
        with contextlib.suppress(OSError):
            return self.path(place).stat().st_size == TAG_BYTES + self._nbytes
        return False

    def keep(self, round_: int, timeout_s: float) -> str:
        """After a commit, write the states in memory that are of its round. The write that these workers' state before
        it is of has to be done, and is waited for.

        Returns which worker's is not, and why; empty if all are. Training can go on, but this group's loss then means
        that the run ends.
        """
        mine = [(place, state) for place, state in self.held.values() if place.round == round_]
        carried = {place.worker for place, _ in mine}
        self._writes = {worker: begun for worker, begun in self._writes.items() if worker in carried}
        wait([done for _, done in self._writes.values()], timeout_s)
        why = ""
        for place, state in mine:
            known, done = self._writes.get(place.worker, (None, None))
            is_done = done is None or done.done()
            error = done.exception() if done is not None and is_done else None
            if known is not None and (error or not is_done or known.round < round_ - 1):
                reason = error or "the storage takes longer than a round"
                why = why or f"the state of worker {place.worker} is not written to {self.folder}: {reason}"
            if is_done:
                self.begin_write(place, state)
        return why

    def settle(self, timeout_s: float) -> None:
        """Wait for the writes that were begun."""
        wait([done for _, done in self._writes.values()], timeout_s)

    def begin_write(self, place: Place, state: bytes) -> None:
        """Write a state, in a thread; the next `keep` waits for it."""
        done: Future[None] = Future()
        self._writes[place.worker] = place, done
        self.written_bytes += self._nbytes
        # Not of an executor, whose threads an ending process waits for: a storage may stand still.
        threading.Thread(target=self._run_write, args=(place, state, done), name="worker-state", daemon=True).start()

    def _run_write(self, place: Place, state: bytes, done: "Future[None]") -> None:
        try:
            self.write(place, state)
        except OSError as failed:
            done.set_exception(failed)
        else:
            done.set_result(None)

    def write(self, place: Place, state: bytes) -> None:
        """Write a state, then remove those of the same worker that are older by more than OLDER rounds: another history
        may have to go on from later ones. Raises OSError."""
        write_whole(self.path(place), self._tag(place, state), state)
        for path in [*self.folder.glob(f"worker-{place.worker}.*"), *self.folder.glob(f".worker-{place.worker}.*")]:
            of = _NAME.match(path.name)
            if of is not None and int(of["rank"]) == self._rank and int(of["round"]) < place.round - OLDER:
                path.unlink(missing_ok=True)

    def _tag(self, place: Place, state: bytes) -> bytes:
        of = json.dumps([self._whose, self._rank, self._nbytes, asdict(place)]).encode()
        digest = hashlib.blake2b(key=self._token[:64], digest_size=TAG_BYTES, person=b"worker-state")
        digest.update(len(of).to_bytes(8, "little") + of)
        digest.update(state)
        return digest.digest()
