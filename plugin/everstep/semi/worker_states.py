"""One rank's store of workers' own states: the newest of each worker in memory, and files that outlive the group.

A thread writes while training goes on. Of a worker at most two states wait or are being written: one that has not begun
gives way to the next. A state that cannot be written is tried again until then.
"""

import threading
import time
from collections.abc import Sequence

from everstep.semi.worker_files import Place, WorkerFiles

RETRY_S = 1.0
OLDER = 2
"""Rounds whose states stay on storage besides the newest one's."""


class WorkerStates:
    """Keeps states, and tells which are not on storage yet.

    Args:
        files: of this rank.
    """

    def __init__(self, files: WorkerFiles) -> None:
        self.files = files
        self.held: dict[int, tuple[Place, bytes]] = {}
        """By worker the newest state after a round that this rank has in memory."""
        self._change = threading.Condition()
        self._waiting: dict[int, tuple[Place, bytes]] = {}
        self._writing: Place | None = None
        self._saved: dict[int, int] = {}
        """By worker the round of the newest state that was given to be written."""
        self._written: dict[int, int] = {}
        """By worker the round of the newest state that is known to be on storage, or with other groups."""
        self._error = ""
        threading.Thread(target=self._write_on, name="worker-states", daemon=True).start()

    def hold(self, place: Place, state: bytes) -> None:
        """Keep a worker's newest state in memory."""
        self.held[place.worker] = place, state

    def holds(self, worker: int, round_: int) -> bool:
        """Whether a worker's state after a round is in memory."""
        return worker in self.held and self.held[worker][0].round == round_

    def has(self, place: Place) -> bool:
        """Whether a state after a round is in memory or in a file, by its name and size."""
        return self.holds(place.worker, place.round) or self.files.has(place)

    def of(self, worker: int) -> list[Place]:
        """The states of a worker in memory and in files."""
        return [*self.files.of(worker), *(place for place, _ in self.held.values() if place.worker == worker)]

    def read(self, place: Place) -> bytes | None:
        """A state in memory or in a file; None if it is not there whole and authentic."""
        held, state = self.held.get(place.worker, (None, b""))
        return state if held == place else self.files.read(place)

    def save(self, place: Place, state: bytes) -> None:
        """Begin to write a state."""
        with self._change:
            self._waiting[place.worker] = place, state
            self._saved[place.worker] = place.round
            self._written.setdefault(place.worker, place.round - 1)  # where it was taken up
            self._change.notify_all()

    def behind(self) -> str:
        """Which worker's state has waited for too long, and why; empty as long as each but the newest state of a worker
        is on storage."""
        with self._change:
            return self._behind()

    def _behind(self) -> str:
        late = [w for w, round_ in self._saved.items() if self._written[w] < round_ - 1]
        if not late:
            return ""
        return (
            f"states of worker{'s'[: len(late) > 1]} {', '.join(map(str, late))} after round {self._written[late[0]]} "
            f"are not written to {self.files.folder}: {self._error or 'the storage takes longer than a round'}"
        )

    def catch_up(self, timeout_s: float) -> bool:
        """Wait until nothing is `behind`; whether that came in time."""
        with self._change:
            return self._change.wait_for(lambda: not self._behind(), timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait for all that is to be written; whether it was in time."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and self._writing is None, timeout_s)

    def let_go(self, known: Sequence[Place]) -> None:
        """Forget states in memory that are of none of these places, or older than one of them that is in a file."""
        for worker, (place, _) in list(self.held.items()):
            mine = [one for one in known if one.worker == worker]
            if place not in mine or any(one.round > place.round and self.files.has(one) for one in mine):
                del self.held[worker]

    def _write_on(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting))
                worker = next(iter(self._waiting))
                place, state = self._waiting.pop(worker)
                self._writing = place
            error = ""
            try:
                self.files.write(place, state, keep_round=place.round - OLDER)
            except OSError as failed:
                error = str(failed)
            with self._change:
                self._writing, self._error = None, error
                if error:
                    self._waiting.setdefault(worker, (place, state))
                else:
                    self._written[worker] = max(place.round, self._written[worker])
                self._change.notify_all()
            if error:
                time.sleep(RETRY_S)
