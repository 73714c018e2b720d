"""One rank's store of workers' own states: the newest of each worker in this process, and for each worker, rank of a
group and round a file in the host's memory, which outlives the process, and one on storage, which outlives the host.

In front of the state a file has a keyed digest (BLAKE2b, under the run's token) of the state and of what it is the
state of: a file that was torn, altered, moved or written by somebody else is no state.

Files are written by a thread while the next round is made. On storage one write of a worker is under way at a time; the
next begins with the first round that finds it done.
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
from typing import Protocol

from everstep.quorum.memory import room_for
from everstep.run.files import write_whole
from everstep.run.regular import is_own_directory, open_regular

TAG_BYTES = 32
OLDER = 2
"""Rounds whose states stay on storage besides the newest one's."""
OLDER_IN_MEMORY = 1
"""The same of the host's memory."""


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


class Memory(Protocol):
    """Where files of states are kept in hosts' memory."""

    folder: Path
    """This host's, which outlives its processes."""

    def elsewhere(self, name: str, size: int) -> bool:
        """Whether another host has a file of this name and size."""
        ...

    def fetch(self, name: str, size: int) -> bytes | None:
        """Another host's file; None if it cannot be had."""
        ...


class WorkerStore:
    """Keeps workers' own states, and tells which are not on storage yet.

    Args:
        folder: of all workers, on storage.
        memory: of hosts.
        rank: of this process in its group.
        whose: further words that a state is bound to: the run, and how its groups are laid out.
        nbytes: of every state.
        token: the run's.
    """

    def __init__(self, folder: Path, memory: Memory, *, rank: int, whose: str, nbytes: int, token: bytes) -> None:
        self.folder, self._memory = folder, memory
        self._rank, self._whose, self._nbytes, self._token = rank, whose, nbytes, token
        self.held: dict[int, tuple[Place, bytes]] = {}
        """By worker the newest state after a round that this rank has in memory."""
        self.written_bytes = 0
        """Of all writes that this rank has begun."""
        self._writes: dict[int, tuple[Place, Future[None]]] = {}
        """By worker the write to storage that was begun last."""
        self._kept: list[Place] = []
        """Of the states after the last commit."""
        self.has_memory = False
        """Whether those before them were in the host's memory when they were made."""

    # States

    def hold(self, place: Place, state: bytes) -> None:
        """Keep a worker's newest state in memory."""
        self.held[place.worker] = place, state

    def holds(self, worker: int, round_: int) -> bool:
        """Whether a worker's state after a round is in memory."""
        return worker in self.held and self.held[worker][0].round == round_

    def let_go(self, known: Iterable[Place]) -> None:
        """Forget states in this process that are of none of these places, or older than one of them that is in a
        file."""
        known = list(known)
        for worker, (place, _) in list(self.held.items()):
            newer = (one for one in known if one.worker == worker and one.round > place.round)
            if place not in known or any(self.in_file(one) for one in newer):
                del self.held[worker]

    def has(self, place: Place) -> bool:
        """Whether a state after a round is in this process or in a file on any host, by its name and size."""
        is_here = self.holds(place.worker, place.round) or self.in_file(place)
        return is_here or self._memory.elsewhere(self.path(place).name, self._size)

    def read(self, place: Place) -> bytes | None:
        """A state in this process or in a file; None if it is not there whole and authentic."""
        held, state = self.held.get(place.worker, (None, b""))
        if held == place:
            return state
        name = self.path(place).name
        for path in (self._memory.folder / name, self.path(place)):
            with contextlib.suppress(OSError), open_regular(path, links=False, limit=self._size) as file:
                tag, state = file.read(TAG_BYTES), file.read(self._nbytes)
                if self._is_whole(place, tag, state):
                    return state
        found = memoryview(self._memory.fetch(name, self._size) or b"")
        tag, state = bytes(found[:TAG_BYTES]), bytes(found[TAG_BYTES:])
        return state if self._is_whole(place, tag, state) else None

    def _is_whole(self, place: Place, tag: bytes, state: bytes) -> bool:
        return len(state) == self._nbytes and hmac.compare_digest(tag, self._tag(place, state))

    # Files

    @property
    def _size(self) -> int:
        return TAG_BYTES + self._nbytes

    def path(self, place: Place) -> Path:
        return self.folder / f"worker-{place.worker}.rank-{self._rank}.round-{place.round}.{place.history:x}"

    def in_file(self, place: Place) -> bool:
        """Whether there is a file of the right size for a state, in this host's memory or on storage."""
        return self.in_memory(place) or self.on_storage(place)

    def in_memory(self, place: Place) -> bool:
        return self._is_state(self._memory.folder / self.path(place).name)

    def on_storage(self, place: Place) -> bool:
        return self._is_state(self.path(place))

    def _is_state(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            return path.stat().st_size == self._size
        return False

    def keep(self, round_: int, timeout_s: float) -> str:
        """After a commit, write the states in this process that are of its round. The write that these workers' state
        before it is of has to be done, and is waited for where that state is not in the host's memory.

        Returns which worker's is not on storage, and why; empty if all are. Training can go on, but a loss of those
        files that there are then means that the run ends.
        """
        mine = [(place, state) for place, state in self.held.values() if place.round == round_]
        carried = {place.worker for place, _ in mine}
        self._writes = {worker: begun for worker, begun in self._writes.items() if worker in carried}
        before = {place.worker for place in self._kept} & carried
        in_memory = {place.worker for place in self._kept if self.in_memory(place)}
        self._kept, self.has_memory = [place for place, _ in mine], before <= in_memory
        wait([done for worker, (_, done) in self._writes.items() if worker not in in_memory], timeout_s)
        why = ""
        for place, state in mine:
            known, done = self._writes.get(place.worker, (None, None))
            is_done = done is None or done.done()
            error = done.exception() if done is not None and is_done else None
            if known is not None and (error or not is_done or known.round < round_ - 1):
                reason = error or "the storage takes longer than a round"
                why = why or f"the state of worker {place.worker} is not written to {self.folder}: {reason}"
            self.begin_write(place, state, to_storage=is_done)
        return why

    def settle(self, timeout_s: float) -> None:
        """Wait for the writes to storage that were begun."""
        wait([done for _, done in self._writes.values()], timeout_s)

    def begin_write(self, place: Place, state: bytes, *, to_storage: bool = True) -> None:
        """Write a state to memory, and to storage, in a thread; the next `keep` waits for it."""
        done: Future[None] = Future()
        if to_storage:
            self._writes[place.worker] = place, done
            self.written_bytes += self._nbytes
        args = (place, state, done, to_storage)
        # Not of an executor, whose threads an ending process waits for: a storage may stand still.
        threading.Thread(target=self._run_write, args=args, name="worker-state", daemon=True).start()

    def _run_write(self, place: Place, state: bytes, done: "Future[None]", to_storage: bool) -> None:
        tag = self._tag(place, state)
        with contextlib.suppress(OSError):  # it is there or not: `in_memory`
            self._write_to_memory(place, tag, state)
        try:
            if to_storage:
                self._write(self.folder, place, tag, state)
        except OSError as failed:
            done.set_exception(failed)
        else:
            done.set_result(None)

    def _write_to_memory(self, place: Place, tag: bytes, state: bytes) -> None:
        with room_for(self._size) as has_room:
            if has_room and is_own_directory(self._memory.folder):
                self._write(self._memory.folder, place, tag, state)

    def _write(self, folder: Path, place: Place, tag: bytes, state: bytes) -> None:
        """Write a state, then remove those of the same worker that are older by more than so many rounds: another
        history may have to go on from later ones."""
        write_whole(folder / self.path(place).name, tag, state)
        older = OLDER if folder == self.folder else OLDER_IN_MEMORY
        for path in [*folder.glob(f"worker-{place.worker}.*"), *folder.glob(f".worker-{place.worker}.*")]:
            of = _NAME.match(path.name)
            if of is not None and int(of["rank"]) == self._rank and int(of["round"]) < place.round - older:
                path.unlink(missing_ok=True)

    def _tag(self, place: Place, state: bytes) -> bytes:
        of = json.dumps([self._whose, self._rank, self._nbytes, asdict(place)]).encode()
        digest = hashlib.blake2b(key=self._token[:64], digest_size=TAG_BYTES, person=b"worker-state")
        digest.update(len(of).to_bytes(8, "little") + of)
        digest.update(state)
        return digest.digest()
