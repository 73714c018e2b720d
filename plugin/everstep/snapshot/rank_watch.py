"""A keeper's eye on one rank: what its trainer publishes is verified, then coded."""

import logging
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from everstep.snapshot.buffer import BufferReader, Header, SnapshotError
from everstep.snapshot.coding import Coder, CodingError
from everstep.snapshot.segment import BUFFERS, Notes

if TYPE_CHECKING:
    from everstep.snapshot.keeper import Keeper

POLL_S = 0.05

log = logging.getLogger("everstep.keeper")


class RankWatch:
    """Verifies and codes what one rank's trainer publishes, in a thread of its own."""

    def __init__(self, keeper: "Keeper", rank: int) -> None:
        self._keeper, self.rank = keeper, rank
        settings = keeper.settings
        self._coder = Coder(
            keeper.segment, rank, keeper.token, keeper.address_of, int(settings.memory_reserve_gb * 2**30)
        )
        self._lock = threading.Lock()
        self._notes = Notes()
        self._holders: list[int] = []
        self.sound: dict[int, bool] = {}
        """By sequence: what verification found, of the buffers that are there now."""
        self._thread = threading.Thread(target=self._run, name=f"rank-{rank}", daemon=True)
        self._thread.start()

    def note(self, **changes: Any) -> None:
        """Tell the trainer, by way of the notes file."""
        with self._lock:
            self._notes = replace(self._notes, heartbeat=time.monotonic(), **changes)
            try:
                self._keeper.segment.write_notes(self.rank, self._notes)
            except OSError as error:
                log.warning("rank %d: notes cannot be written: %s", self.rank, error)

    def hold(self, sequence: int) -> None:
        """Ask the trainer to leave a buffer alone until `release`."""
        with self._lock:
            self._holders.append(sequence)
        self.note(holding=sequence, held=sequence)

    def release(self, sequence: int) -> None:
        with self._lock:
            self._holders.remove(sequence)
            left = self._holders[-1] if self._holders else -1
        self.note(holding=left)

    def _run(self) -> None:
        dealt = -1
        while not self._keeper.over.is_set():
            newest = self._newest()
            if newest is None or newest.sequence == dealt:
                self._keeper.over.wait(POLL_S)
                continue
            self._keeper.spoken()
            dealt = newest.sequence
            self._verify(newest)
            if self.sound.get(newest.sequence):
                self._code(newest)

    def _published(self) -> list[Header]:
        if self._keeper.over.is_set():
            return []
        return [header for header in self._keeper.segment.headers("data", self.rank) if header]

    def _newest(self) -> Header | None:
        headers = self._published()
        with self._keeper.changed:
            self.sound = {h.sequence: self.sound[h.sequence] for h in headers if h.sequence in self.sound}
        return max(headers, key=lambda header: header.sequence, default=None)

    def _verify(self, header: Header) -> None:
        for index in range(BUFFERS):
            damage = self._damage(index, header)
            if damage is None:
                continue
            sound = damage == ""
            with self._keeper.changed:
                self.sound[header.sequence] = sound
                self._keeper.changed.notify_all()
            coding = sound and header.parity > 0
            self.note(sequence=header.sequence, sound=sound, coded=False, settled=not coding, reason=damage)
            if not sound:
                log.error("rank %d, step %d: %s", self.rank, header.step, damage)

    def _damage(self, index: int, header: Header) -> str | None:
        """None: this file does not hold that buffer. "": it does, unharmed. Else what is wrong with it."""
        try:
            reader = BufferReader(self._keeper.segment.file("data", self.rank, index))
        except OSError:
            return None
        try:
            return (reader.damage(header) or "") if reader.header() == header else None
        except SnapshotError as error:
            return str(error)
        finally:
            reader.close()

    def _code(self, header: Header) -> None:
        if header.parity == 0:
            return
        settings = self._keeper.settings
        try:
            self._coder.code(
                header,
                timedelta(seconds=settings.coding_timeout_s),
                timedelta(seconds=settings.transfer_timeout_s),
                held=lambda: header in self._published(),
                newest=lambda: not any(h.sequence > header.sequence for h in self._published()),
            )
            self.note(coded=True, settled=True)
        except CodingError as error:
            log.warning("rank %d, step %d: no parity: %s", self.rank, header.step, error)
            self.note(settled=True, reason=str(error))
