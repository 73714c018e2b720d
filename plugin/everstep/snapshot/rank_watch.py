"""A keeper's eye on one rank: what its trainer publishes is verified, then coded."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from everstep.snapshot.board import Board, Channels
from everstep.snapshot.buffer import BufferReader, SnapshotError, emptied
from everstep.snapshot.coding import Coder
from everstep.snapshot.header import KINDS, Header, Kind
from everstep.snapshot.repair import RepairError, repair
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Notes, Segment

POLL_S = 0.05
CALM_S = 10.0
"""After this long without a new snapshot LOOK_S is often enough."""
LOOK_S = 1.0
"""Headers are looked at this often also while nothing says that there is a new one."""
SCRUB_S = 60.0
"""After this long without a new snapshot everything that is held is verified again."""
SCRUB_PAUSE_S = 0.005
"""After each MiB of that."""
FAILED_S = 1.0

log = logging.getLogger("everstep.keeper")


class Keeps(Protocol):
    """What a watch needs of its keeper."""

    segment: Segment
    settings: Snapshot
    board: Board
    channels: Channels
    over: threading.Event
    """The keeper ends."""
    changed: threading.Condition
    """Guards what is known of buffers; notified when that changes."""
    turn: threading.Lock
    """Of the rank that codes."""

    def spoken(self) -> None:
        """Somebody has a use for the keeper."""
        ...

    def tell(self, kind: str, rank: int, step: int, **fields: Any) -> None:
        """An event of the run."""
        ...


class RankWatch:
    """Verifies and codes what one rank's trainer publishes, in a thread of its own."""

    def __init__(self, keeper: Keeps, rank: int) -> None:
        self._keeper, self.rank = keeper, rank
        settings = keeper.settings
        reserve_bytes = int(settings.memory_reserve_gb * 2**30)
        self._coder = Coder(
            keeper.segment, rank, keeper.board, keeper.channels, reserve_bytes, keeper.turn, keeper.over
        )
        self._lock = threading.Lock()
        self._notes = Notes()
        self._holders: list[int] = []
        self.sound: dict[tuple[str, int, str], bool] = {}
        """By kind, sequence and code: what verification found, of the buffers that are there now."""
        self._mark, self._looked = -1, 0.0
        self._dealt: Header | None = None
        """The snapshot that was verified last."""
        self._verified_s, self._coder_s = 0.0, 0.0
        """What verifying it took, and what the coder had worked before."""
        self._known: dict[Path, Header] = {}
        """What each file held when that was done: what it should hold now, unless its writer has emptied it."""
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

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, once the keeper is over."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        checked = dealt_at = time.monotonic()
        while not self._keeper.over.is_set():
            try:
                newest = self._look()
                if newest is not None:
                    self._keeper.spoken()
                    self._deal(newest)
                    checked = dealt_at = time.monotonic()
                elif time.monotonic() - checked > SCRUB_S:
                    self._scrub()
                    checked = time.monotonic()
                else:
                    self._keeper.over.wait(POLL_S if time.monotonic() - dealt_at < CALM_S else LOOK_S)
            except Exception as error:
                log.exception("rank %d", self.rank)
                self._note_failure(f"the keeper failed: {type(error).__name__}: {error}")
                if isinstance(error, OSError):  # such as no descriptor to spare: it is tried again
                    self._dealt = None
                self._keeper.over.wait(FAILED_S)

    def _note_failure(self, reason: str) -> None:
        """What was being dealt with is as far as it will get."""
        if self._dealt is not None:
            sound = self.sound.get(("data", self._dealt.sequence, ""), False)
            self.note(sequence=self._dealt.sequence, sound=sound, coded=False, settled=True, reason=reason)

    def _held(self, kind: Kind) -> dict[Path, Header]:
        segment = self._keeper.segment
        found = zip(segment.files(kind, self.rank), segment.headers(kind, self.rank), strict=True)
        return {path: header for path, header in found if header is not None}

    def _newest(self) -> Header | None:
        return max(self._held("data").values(), key=lambda header: header.sequence, default=None)

    def _is_newest(self, header: Header) -> bool:
        if self._keeper.segment.mark(self.rank) == self._mark:
            return True
        return not any(h.sequence > header.sequence for h in self._held("data").values())

    def _look(self) -> Header | None:
        """The newest snapshot, if it has not been dealt with."""
        mark, now = self._keeper.segment.mark(self.rank), time.monotonic()
        if mark == self._mark and now - self._looked < LOOK_S:
            return None
        # The mark first: a snapshot that is published meanwhile has another.
        self._mark, self._looked = mark, now
        newest = self._newest()
        dealt, known = self._dealt, self._known.values()
        if newest == dealt:
            return None
        # One that was published while the last was dealt with is known already.
        if dealt is None or (newest is not None and (newest.sequence > dealt.sequence or newest not in known)):
            return newest
        self._miss(dealt)
        return None

    def _miss(self, header: Header) -> None:
        """The newest snapshot cannot be found in its place. Unless its trainer is just writing there, it is made anew,
        or the trainer is told not to count on it."""
        key = ("data", header.sequence, "")
        path = self._place_of(header)
        lost = self._lost("data", path) if path else None
        if path is None or lost is None or self.sound.get(key) is False:
            return
        damage = self._repaired(path, header, lost) if lost else "its buffer has been emptied"
        self._found("data", header, damage)
        if damage:
            self._note_failure(damage)

    def _deal(self, newest: Header) -> None:
        """Verify and code, unless it is an interim snapshot."""
        self._dealt = newest
        self._remember()
        if newest.interim:
            self.note(sequence=newest.sequence, sound=True, coded=False, settled=True, reason="")
            return
        begun, self._coder_s = time.monotonic(), self._coder.worked_s
        path = self._place_of(newest)
        damage = self._damage("data", path, newest, lambda: None) if path else None
        if path is None or damage is None:  # it is not there any more
            self._dealt = None
            return
        if damage:  # of a part that a keeper before this one coded
            damage = self._repaired(path, newest, damage)
        self._found("data", newest, damage)
        coding = not damage and newest.parity > 0
        self._verified_s = time.monotonic() - begun
        self._note_work(sequence=newest.sequence, sound=not damage, coded=False, settled=not coding, reason=damage)
        if not damage:
            self._code(newest)
        self._remember()

    def _place_of(self, header: Header) -> Path | None:
        return next((path for path, held in self._known.items() if held == header), None)

    def _remember(self) -> None:
        """What the files hold now. One that has lost what it held is remembered with that."""
        for kind in KINDS:
            held = self._held(kind)
            for path in self._keeper.segment.files(kind, self.rank):
                if path in held:
                    self._known[path] = held[path]
                elif path in self._known and not self._lost(kind, path):
                    del self._known[path]
        there = {(header.kind, header.sequence, header.code) for header in self._known.values()}
        with self._keeper.changed:
            self.sound = {key: sound for key, sound in self.sound.items() if key in there}

    def _lost(self, kind: Kind, path: Path) -> str | None:
        """How a file lost the buffer that it held. "": its writer emptied it. None: it holds one, or is being
        written."""
        segment = self._keeper.segment
        try:
            with segment.writing(self.rank, wait_s=0.0) if kind == "data" else contextlib.nullcontext():
                if segment.header(kind, self.rank, path) is not None:
                    return None
                return "" if emptied(path) else "its header is damaged"
        except FileNotFoundError:
            return "its file is gone" if kind == "data" else ""
        except SnapshotError:
            return None

    def _found(self, kind: Kind, header: Header, damage: str) -> None:
        with self._keeper.changed:
            self.sound[kind, header.sequence, header.code] = not damage
            self._keeper.changed.notify_all()
        if damage:
            log.error("rank %d, %s of step %d: %s", self.rank, kind, header.step, damage)

    def _damage(self, kind: Kind, path: Path, header: Header, give_way: Callable[[], None]) -> str | None:
        """None: it is not there any more. "": it is there, unharmed. Else what is wrong with it."""
        with contextlib.suppress(FileNotFoundError), contextlib.closing(BufferReader(path)) as reader:
            try:
                if reader.header() == header:
                    return reader.damage(header, give_way) or ""
            except SnapshotError as error:
                return str(error)
        return self._lost(kind, path) or None

    def _give_way(self) -> None:
        self._keeper.over.wait(SCRUB_PAUSE_S)

    def _scrub(self) -> None:
        """Look at everything that is held again. What is damaged is made anew, data from parity and parity from data;
        of what cannot be the trainer and whoever restores are told."""
        newest = self._dealt
        for path, header in list(self._known.items()):
            kind = header.kind
            damage = self._damage(kind, path, header, self._give_way)
            if damage is None:
                continue
            if damage and kind == "data":
                damage = self._repaired(path, header, damage)
            self._found(kind, header, damage)
            if damage and newest is not None and header.identity == newest.identity:
                self.note(sequence=newest.sequence, sound=kind == "parity", coded=False, settled=True, reason=damage)
                if kind == "parity":
                    self._coder.drop(path, header)
                    with self._keeper.changed:
                        self.sound.pop((kind, header.sequence, header.code), None)  # the new piece has its name
                    self._code(newest)
                    if any(piece.code == header.code for piece in self._held(kind).values()):
                        self._tell_repaired(header, damage, header.payload_bytes)
        self._remember()

    def _repaired(self, path: Path, header: Header, damage: str) -> str:
        """Make a damaged part anew. Returns "", or what is wrong with it now."""
        told = self.sound.get(("data", header.sequence, "")) is False
        self._found("data", header, damage)  # from here on it is served to nobody
        reserve_bytes = int(self._keeper.settings.memory_reserve_gb * 2**30)
        segment, channels = self._keeper.segment, self._keeper.channels
        try:
            with self._keeper.turn:
                made = repair(segment, path, header, channels, reserve_bytes, self._give_way)
        except RepairError as error:
            if not told:
                self._keeper.tell("snapshot_damaged", self.rank, header.step, what="data", reason=f"{damage}; {error}")
            return damage
        self._tell_repaired(header, damage, made)
        return ""

    def _tell_repaired(self, header: Header, damage: str, nbytes: int) -> None:
        self._keeper.tell("snapshot_repaired", self.rank, header.step, what=header.kind, reason=damage, bytes=nbytes)

    def _code(self, header: Header) -> None:
        if header.parity > 0:
            timeout = timedelta(seconds=self._keeper.settings.coding_timeout_s)
            self._coder.code(header, timeout, lambda: self._is_newest(header), self._note_work)

    def _note_work(self, **changes: Any) -> None:
        """Note how far a snapshot's verification and coding is, and for how long to rest from it."""
        worked_s = self._verified_s + self._coder.worked_s - self._coder_s
        rest_s = worked_s * (1 / self._keeper.settings.coding_share - 1)
        self.note(rests_until=time.monotonic() + rest_s, **changes)
