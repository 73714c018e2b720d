"""One rank's store of workers' own states: the newest of each worker in this process, and for each worker, rank of a
group and round a file in the host's memory, which outlives the process, and a copy that outlives the host: in another
host's memory, or if no other takes it on storage.

In front of the state a file has a keyed digest (BLAKE2b, under the run's token) of the state and of what it is the
state of: a file that was torn, altered, moved or written by somebody else is no state.

Files are written by a thread while the next round is made. One copy of a worker's is under way at a time; the next
begins with the first round that finds it done.
"""

import contextlib
import hashlib
import hmac
import json
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from everstep.run.memory import room_for
from everstep.run.regular import open_regular

TAG_BYTES = 32


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


class Memory(Protocol):
    """Where files of states are kept in hosts' memory."""

    folder: Path
    """This host's, which outlives its processes."""

    def write(self, name: str, *data: bytes) -> None:
        """Keep a file on this host, and none of the same worker that is older by more than a round. Raises OSError."""
        ...

    def copy(self, name: str, *data: bytes) -> bool:
        """Keep a file where it outlives this host; whether another host took it, and not storage. Raises OSError."""
        ...

    def elsewhere(self, name: str, size: int) -> bool:
        """Whether another host, or storage, has a file of this name and size."""
        ...

    def fetch(self, name: str, size: int) -> bytes | None:
        """Such a file; None if it cannot be had."""
        ...


class WorkerStore:
    """Keeps workers' own states, and tells which have no copy yet.

    Args:
        memory: of hosts.
        rank: of this process in its group.
        whose: further words that a state is bound to: the run, and how its groups are laid out.
        nbytes: of every state.
        token: the run's.
    """

    def __init__(self, memory: Memory, *, rank: int, whose: str, nbytes: int, token: bytes) -> None:
        self._memory = memory
        self._rank, self._whose, self._nbytes, self._token = rank, whose, nbytes, token
        self.held: dict[int, tuple[Place, bytes]] = {}
        """By worker the newest state after a round that this rank has in memory."""
        self.copied_bytes = 0
        """To other hosts."""
        self._writes: dict[int, tuple[Place, Future[None]]] = {}
        """By worker the copy that was begun last."""
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
            if place not in known or any(self.in_memory(one) for one in newer):
                del self.held[worker]

    def has(self, place: Place) -> bool:
        """Whether a state after a round is in this process or in a file on any host, by its name and size."""
        is_here = self.holds(place.worker, place.round) or self.in_memory(place)
        return is_here or self._memory.elsewhere(self.name(place), self._size)

    def read(self, place: Place) -> bytes | None:
        """A state in this process or in a file; None if it is not there whole and authentic."""
        held, state = self.held.get(place.worker, (None, b""))
        if held == place:
            return state
        path = self._memory.folder / self.name(place)
        with contextlib.suppress(OSError), open_regular(path, links=False, limit=self._size) as file:
            tag, state = file.read(TAG_BYTES), file.read(self._nbytes)
            if self._is_whole(place, tag, state):
                return state
        found = memoryview(self._memory.fetch(path.name, self._size) or b"")
        tag, state = bytes(found[:TAG_BYTES]), bytes(found[TAG_BYTES:])
        return state if self._is_whole(place, tag, state) else None

    def _is_whole(self, place: Place, tag: bytes, state: bytes) -> bool:
        return len(state) == self._nbytes and hmac.compare_digest(tag, self._tag(place, state))

    # Files

    @property
    def _size(self) -> int:
        return TAG_BYTES + self._nbytes

    def name(self, place: Place) -> str:
        return f"worker-{place.worker}.rank-{self._rank}.round-{place.round}.{place.history:x}"

    def in_memory(self, place: Place) -> bool:
        """Whether there is a file of the right size for a state in this host's memory."""
        with contextlib.suppress(OSError):
            return (self._memory.folder / self.name(place)).stat().st_size == self._size
        return False

    def keep(self, round_: int, timeout_s: float) -> str:
        """After a commit, write the states in this process that are of its round. Where these workers' state before it
        is not in the host's memory, its write is waited for.

        Returns which worker's has no copy, and why; empty if all have. Training can go on, but a loss of those
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
                reason = error or "the copy takes longer than a round"
                why = why or f"the state of worker {place.worker} has no copy: {reason}"
            self.begin_write(place, state, copies=is_done)
        return why

    def settle(self, timeout_s: float) -> None:
        """Wait for the copies that were begun."""
        wait([done for _, done in self._writes.values()], timeout_s)

    def begin_write(self, place: Place, state: bytes, *, copies: bool = True) -> None:
        """Write a state to memory, and copy it, in a thread; the next `keep` asks what came of it."""
        done: Future[None] = Future()
        if copies:
            self._writes[place.worker] = place, done
        # Not of an executor, whose threads an ending process waits for: another host may be silent.
        args = (place, state, done, copies)
        threading.Thread(target=self._run_write, args=args, name="worker-state", daemon=True).start()

    def _run_write(self, place: Place, state: bytes, done: "Future[None]", copies: bool) -> None:
        name, tag = self.name(place), self._tag(place, state)
        with contextlib.suppress(OSError), room_for(self._size) as has_room:  # it is there or not: `in_memory`
            if has_room:
                self._memory.write(name, tag, state)
        try:
            if copies and self._memory.copy(name, tag, state):
                self.copied_bytes += self._nbytes
        except OSError as failed:
            done.set_exception(failed)
        else:
            done.set_result(None)

    def _tag(self, place: Place, state: bytes) -> bytes:
        of = json.dumps([self._whose, self._rank, self._nbytes, asdict(place)]).encode()
        digest = hashlib.blake2b(key=self._token[:64], digest_size=TAG_BYTES, person=b"worker-state")
        digest.update(len(of).to_bytes(8, "little") + of)
        digest.update(state)
        return digest.digest()
