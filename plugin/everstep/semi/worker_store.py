"""One rank's store of workers' own states, in three places: the newest state of each worker in this process; a file for
each worker, rank and round in the host's memory, which outlives the process; and a copy of that file that outlives the
host, in another host's memory or, if no other host takes it, on storage.

A file begins with a keyed digest (BLAKE2b with the run's token) of the state and of its worker, rank, round and
history. So a file that is torn, altered, renamed or written without the token is not accepted as a state.

Threads write the files while the next round is computed. For each worker at most one copy is in progress; the next copy
begins after the first round that finds it done.
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

from everstep.run.files import open_regular
from everstep.run.memory import room_for

TAG_BYTES = 32


@dataclass(frozen=True, slots=True)
class StateKey:
    """Identifies a worker's own state.

    Attributes:
        round: the committed round at whose end the worker had this state.
        history: the history after that commit.
    """

    worker: int
    round: int
    history: int


class Memory(Protocol):
    """Reads and writes files of states in the memory of this host and of others, or on storage."""

    folder: Path
    """Folder in this host's memory. It outlives the processes."""

    def write(self, name: str, *data: bytes) -> None:
        """Write a file on this host, and remove the same worker's files older than the round before. Raises OSError."""
        ...

    def copy(self, name: str, *data: bytes) -> bool:
        """Copy a file to another host, or else to storage. Return whether another host took it. Raises OSError."""
        ...

    def fetch(self, name: str, size: int) -> bytes | None:
        """Return the bytes of a file of this name and size on another host or storage; None if none can be read."""
        ...


class WorkerStore:
    """Keeps this rank's parts of workers' own states, and reports a state that has no copy yet.

    Args:
        memory: reads and writes the files.
        rank: this process's rank in its group.
        whose: text that every digest includes: the run, and the layout of its groups.
        nbytes: size of this rank's part of every state.
        token: the run's token.
    """

    def __init__(self, memory: Memory, *, rank: int, whose: str, nbytes: int, token: bytes) -> None:
        self._memory = memory
        self._rank, self._whose, self._nbytes, self._token = rank, whose, nbytes, token
        self.held: dict[int, tuple[StateKey, bytes]] = {}
        """Worker -> its newest state in this process."""
        self.copied_bytes = 0
        """Bytes of state copied to other hosts so far."""
        self._writes: dict[int, tuple[StateKey, Future[None]]] = {}
        """Worker -> the copy that was begun last, and its completion."""
        self._kept: list[StateKey] = []
        """The states that the last `begin_writes` began to write."""
        self.has_memory = False
        """Whether the last `begin_writes` found the states of the one before in the host's memory."""

    # States

    def hold(self, key: StateKey, state: bytes) -> None:
        """Keep a worker's newest state in this process."""
        self.held[key.worker] = key, state

    def holds(self, worker: int, round_: int) -> bool:
        """Return whether a worker's state after this round is in this process."""
        return worker in self.held and self.held[worker][0].round == round_

    def drop_old(self, known: Iterable[StateKey]) -> None:
        """Drop each state in this process that is not one of `known`, or that is older than a known state of the same
        worker whose file is in this host's memory."""
        known = list(known)
        for worker, (key, _) in list(self.held.items()):
            newer = (one for one in known if one.worker == worker and one.round > key.round)
            if key not in known or any(self.in_memory(one) for one in newer):
                del self.held[worker]

    def read(self, key: StateKey) -> bytes | None:
        """Return a state from this process or from a file; None if there is none that is whole and authentic."""
        held, state = self.held.get(key.worker, (None, b""))
        if held == key:
            return state
        path = self._memory.folder / self.name(key)
        with contextlib.suppress(OSError), open_regular(path, links=False, limit=self._size) as file:
            tag, state = file.read(TAG_BYTES), file.read(self._nbytes)
            if self._is_whole(key, tag, state):
                return state
        found = memoryview(self._memory.fetch(path.name, self._size) or b"")
        tag, state = bytes(found[:TAG_BYTES]), bytes(found[TAG_BYTES:])
        return state if self._is_whole(key, tag, state) else None

    def _is_whole(self, key: StateKey, tag: bytes, state: bytes) -> bool:
        return len(state) == self._nbytes and hmac.compare_digest(tag, self._tag(key, state))

    # Files

    @property
    def _size(self) -> int:
        return TAG_BYTES + self._nbytes

    def name(self, key: StateKey) -> str:
        """Return the name of a state's file."""
        return f"worker-{key.worker}.rank-{self._rank}.round-{key.round}.{key.history:x}"

    def in_memory(self, key: StateKey) -> bool:
        """Return whether this host's memory has a file of the right name and size for a state."""
        with contextlib.suppress(OSError):
            return (self._memory.folder / self.name(key)).stat().st_size == self._size
        return False

    def begin_writes(self, round_: int, timeout_s: float) -> str:
        """Begin to write the states in this process that are of `round_`, which was just committed. If a worker's
        previous state is not in the host's memory yet, wait up to `timeout_s` for its copy first.

        Returns a sentence naming a worker whose state has no copy, and why; "" if every worker's copy is recent.
        Training can go on without a copy, but then the loss of the host's file ends the run.
        """
        mine = [(key, state) for key, state in self.held.values() if key.round == round_]
        carried = {key.worker for key, _ in mine}
        self._writes = {worker: begun for worker, begun in self._writes.items() if worker in carried}
        before = {key.worker for key in self._kept} & carried
        in_memory = {key.worker for key in self._kept if self.in_memory(key)}
        self._kept, self.has_memory = [key for key, _ in mine], before <= in_memory
        wait([done for worker, (_, done) in self._writes.items() if worker not in in_memory], timeout_s)
        why = ""
        for key, state in mine:
            known, done = self._writes.get(key.worker, (None, None))
            is_done = done is None or done.done()
            error = done.exception() if done is not None and is_done else None
            if known is not None and (error or not is_done or known.round < round_ - 1):
                reason = error or "the copy takes longer than a round"
                why = why or f"the state of worker {key.worker} has no copy: {reason}"
            self.begin_write(key, state, copies=is_done)
        return why

    def finish_copies(self, timeout_s: float) -> None:
        """Begin to copy the newest states that are not, or whose copy failed; wait `timeout_s` at most for all."""
        for key, state in self.held.values():
            known, done = self._writes.get(key.worker, (None, None))
            if known != key or (done is not None and done.done() and done.exception()):
                self.begin_write(key, state)
        wait([done for _, done in self._writes.values()], timeout_s)

    def begin_write(self, key: StateKey, state: bytes, *, copies: bool = True) -> None:
        """Start a thread that writes a state to this host's memory and copies it if `copies`; see `begin_writes`."""
        done: Future[None] = Future()
        if copies:
            self._writes[key.worker] = key, done
        # Not an executor: a process waits for an executor's threads when it exits, and another host may be silent.
        args = (key, state, done, copies)
        threading.Thread(target=self._run_write, args=args, name="worker-state", daemon=True).start()

    def _run_write(self, key: StateKey, state: bytes, done: "Future[None]", copies: bool) -> None:
        name, tag = self.name(key), self._tag(key, state)
        try:
            with contextlib.suppress(OSError), room_for(self._size) as has_room:  # `in_memory` tells the result
                if has_room:
                    self._memory.write(name, tag, state)
            if copies and self._memory.copy(name, tag, state):
                self.copied_bytes += self._nbytes
        except Exception as failed:  # noqa: BLE001  `begin_writes` tells it; without an outcome, no other copy would begin
            done.set_exception(failed)
        else:
            done.set_result(None)

    def _tag(self, key: StateKey, state: bytes) -> bytes:
        of = json.dumps([self._whose, self._rank, self._nbytes, asdict(key)]).encode()
        digest = hashlib.blake2b(key=self._token[:64], digest_size=TAG_BYTES, person=b"worker-state")
        digest.update(len(of).to_bytes(8, "little") + of)
        digest.update(state)
        return digest.digest()
