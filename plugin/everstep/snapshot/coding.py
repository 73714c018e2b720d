"""A keeper's work on one rank's snapshots: it verifies and codes each one, or gives it up at a deadline.

If m members of a parity group may be lost, a keeper makes m rows of parity over shards of the other members' payloads.
It requests the shards from all their keepers at once and receives them block by block. It verifies every block against
its giver's checksums, and combines blocks while more arrive. The other members' keepers verify this keeper's own part,
each byte m times. The header that the trainer wrote names the parity group. If a part does not arrive in time, the
notes for the trainer blame its group, and the trainers leave this group out of the next snapshots.
"""

import contextlib
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from everstep import wire
from everstep.snapshot import parity
from everstep.snapshot.buffer import (
    CHUNK_BYTES,
    BufferReader,
    BufferWriter,
    SnapshotError,
    chunk_digests,
    root_of,
    table_bytes,
)
from everstep.snapshot.header import Header, headers_to_json
from everstep.snapshot.parity import Code
from everstep.snapshot.peers import Neighbours
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Notes, Segment

SLOWEST_BYTES_S = 200e6
"""Lowest rate, in bytes of parts a second, at which a host must code. Gives large parts more than coding_timeout_s."""
NOBODY = -1
ASK_AGAIN_S = 0.05
"""Seconds between two requests to a keeper whose trainer has not published yet."""

log = logging.getLogger("everstep.keeper")


class CodingError(RuntimeError):
    """A snapshot could not be coded. `group` is the group to blame, or NOBODY."""

    def __init__(self, message: str, group: int) -> None:
        super().__init__(message)
        self.group = group


class Waits:
    """How long each group was waited for, until a deadline. After it all waits fail, so the slowest group is blamed."""

    def __init__(self, deadline: float) -> None:
        """`deadline`: a time of time.monotonic()."""
        self.deadline = deadline
        self._spent_s: dict[int, float] = defaultdict(float)
        self.why: dict[int, str] = {}
        """Group -> the last error with it."""

    @contextlib.contextmanager
    def on(self, *groups: int) -> Iterator[None]:
        """Count the time of the body as time in which all of these groups were waited for."""
        began = time.monotonic()
        try:
            yield
        finally:
            for group in groups:
                self._spent_s[group] += time.monotonic() - began

    def failed(self, group: int) -> CodingError:
        """Return the error to raise. It blames this group, or after the deadline the one that took most of the time."""
        if time.monotonic() < self.deadline:
            return CodingError(f"the part of group {group} did not arrive: {self.why[group]}", group)
        slowest = max(self._spent_s, key=lambda group: (self._spent_s[group], group))
        why = f": {self.why[slowest]}" if slowest in self.why else ""
        return CodingError(f"group {slowest} took most of the coding time{why}", slowest)


class Coder:
    """Verifies and codes what one rank's trainer publishes. Only `note` may be called by other threads."""

    def __init__(
        self, segment: Segment, rank: int, settings: Snapshot, neighbours: Neighbours,
        over: threading.Event, warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`over`: set when the keeper ends. `warn`: logs a text, once."""
        self._segment, self.rank, self._settings = segment, rank, settings
        self._neighbours, self._over, self._warn = neighbours, over, warn
        self._lock = threading.Lock()
        self._notes = Notes()
        reserve_bytes = int(settings.memory_reserve_gb * 2**30)
        self._writers = [BufferWriter(path, reserve_bytes) for path in segment.files("parity", rank)]
        self._last: Header | None = None

    def note(self, **changes: Any) -> None:
        """Write the notes for the trainer, with these fields changed and a new heartbeat."""
        with self._lock:
            self._notes = replace(self._notes, heartbeat=time.monotonic(), **changes)
            try:
                self._segment.write_notes(self.rank, self._notes)
            except OSError as error:
                self._warn(f"group {self._segment.group}, rank {self.rank}: notes cannot be written: {error}")

    def newer(self) -> Header | None:
        """Return the header of the newest snapshot, if it was published after the one that was last dealt with."""
        try:
            newest = self._newest()
        except OSError as error:
            self._warn(f"group {self._segment.group}, rank {self.rank}: {error}")
            return None
        return newest if newest and (self._last is None or newest.sequence > self._last.sequence) else None

    def code(self, newest: Header, waits: Waits) -> None:
        """Verify and code this snapshot, or give it up at the deadline of `waits`, which other ranks may share."""
        self._last, reason, blamed_group = newest, "", self._segment.group
        self.note(sequence=newest.sequence, coded=False, settled=False, reason="", blamed_group=NOBODY)
        try:
            if newest.parity:  # the other members verify the shards that they receive, together the whole part
                self._compute_parity(newest, waits)
            else:
                reason = self._damage(newest)
        except CodingError as error:
            reason, blamed_group = str(error), error.group
        except SnapshotError as error:
            reason = str(error)
        except Exception as error:
            log.exception("group %d, rank %d", self._segment.group, self.rank)
            reason = f"the keeper failed: {type(error).__name__}: {error}"
        self.note(coded=not reason, settled=True, reason=reason, blamed_group=blamed_group if reason else NOBODY)

    def release(self) -> None:
        """Unmap the rank's parity buffers: mappings would keep the memory of removed ones."""
        for writer in self._writers:
            writer.release()

    def _newest(self) -> Header | None:
        held = [header for _, header in self._segment.held("data", self.rank)]
        return max(held, key=lambda header: header.sequence, default=None)

    def _damage(self, header: Header) -> str:
        for path, held in self._segment.held("data", self.rank):
            if held == header:
                with contextlib.suppress(OSError, SnapshotError), contextlib.closing(BufferReader(path)) as reader:
                    return reader.damage(header)
        return "its buffer is not there any more"

    def _compute_parity(self, own: Header, waits: Waits) -> None:
        """Compute and publish this member's parity. Raises CodingError or SnapshotError."""
        code = Code(own.parity_group, own.parity)
        for _, piece in self._segment.held("parity", self.rank):
            if piece.identity == own.identity and own.root in piece.roots:
                return  # coded before this keeper restarted
        with contextlib.ExitStack() as stack:
            givers = self._givers(own, code, waits, stack)
            headers = [own if member == own.group else givers[member].header for member in code.members]
            covers = json.dumps(headers_to_json(headers)).encode()
            length = code.shard_bytes([header.payload_bytes for header in headers])
            size = code.parity * length + len(covers)
            with waits.on(own.group):
                writer = self._writer(own, size)
            payload = writer.payload(size)
            for row in range(code.parity):
                stripe = code.stripe_coded_by(own.group, row)
                shards = [
                    (givers[giver], code.stripes_of(giver).index(stripe) * length) for giver in code.columns(stripe)
                ]
                _combine(shards, payload[row * length : (row + 1) * length], row, lambda: waits.on(own.group))
            payload[code.parity * length :] = np.frombuffer(covers, dtype=np.uint8)
        header = replace(
            own,
            kind="parity",
            part=(0, 0),
            roots=tuple(header.root for header in headers),
            last_section=code.parity * length,
            payload_bytes=size,
            root="",
        )
        writer.publish(header, chunk_digests(payload.data))

    def _givers(self, own: Header, code: Code, waits: Waits, stack: contextlib.ExitStack) -> dict[int, "_Giver"]:
        """Connect to the other members' keepers, once each serves its part of this snapshot. Raises CodingError."""
        found: dict[int, _Giver] = {}
        turn = code.members.index(own.group)
        others = code.members[turn + 1 :] + code.members[:turn]
        while absent := [member for member in others if member not in found]:
            for member in absent:
                try:
                    with waits.on(member):
                        found[member] = _Giver.open(self._neighbours, own, member, waits)
                    stack.callback(found[member].close)
                except wire.WireError as error:
                    waits.why[member] = str(error)
                if time.monotonic() >= waits.deadline:
                    raise waits.failed(member)
            if self._over.is_set() or ((newest := self._newest()) and newest.sequence > own.sequence):
                raise CodingError("a newer snapshot was published before this one was coded", NOBODY)
            with waits.on(*(late := [member for member in absent if member not in found])):
                self._over.wait(ASK_AGAIN_S if late else 0.0)
        return found

    def _writer(self, own: Header, size: int) -> BufferWriter:
        """Return a parity buffer that the other snapshot held here does not use, emptied, with room for `size` bytes.
        Raises SnapshotError if there is no room."""
        held = self._segment.headers("parity", self.rank)
        data = {held.identity for _, held in self._segment.held("data", self.rank)} - {own.identity}
        free = [index for index, header in enumerate(held) if header is None or header.identity not in data]
        writer = self._writers[free[0] if free else 0]
        writer.reserve(size)
        writer.begin()
        return writer


class _Giver:
    """A connection on which another member's keeper serves that member's part."""

    def __init__(self, channel: wire.Channel, header: Header, waits: Waits) -> None:
        self._channel, self.header, self._waits = channel, header, waits
        self._table = np.zeros(table_bytes(header.payload_bytes) // 8, dtype="<u8")
        self.close = channel.close

    @classmethod
    def open(cls, neighbours: Neighbours, own: Header, member: int, waits: Waits) -> "_Giver":
        """Connect and fetch the checksum table. Raises wire.WireError if no keeper serves the member's part now."""
        channel, header = neighbours.open(member, own.rank, own.identity, waits.deadline)
        try:
            if (header.parity_group, header.parity) != (own.parity_group, own.parity):
                raise wire.WireError(f"{channel.peer} codes that part with the groups {header.parity_group}")
            giver = cls(channel, header, waits)
            at, table = header.payload_bytes, giver._table
            channel.ask_range(at, table.nbytes)
            channel.receive_range(wire.Pieces([table.view(np.uint8).data]), at, table.nbytes, base=at)
            if root_of(table) != header.root:
                raise wire.WireError(f"{channel.peer} sent a checksum table that does not match its header")
        except wire.WireError:
            channel.close()
            raise
        return giver

    def ask(self, first: int, length: int) -> None:
        """Request the shard in bytes [first, first + length), or what the payload has of it. Raises CodingError."""
        count = min(length, self.header.payload_bytes - first)
        if count > 0:
            try:
                self._channel.ask_range(first, count)
            except wire.WireError as error:
                self._waits.why[self.header.group] = str(error)
                raise self._waits.failed(self.header.group) from error

    def take(self, at: int, block: np.ndarray) -> None:
        """Receive and verify the next block of the shard. Bytes beyond the payload's end are 0. Raises CodingError."""
        count = max(0, min(CHUNK_BYTES, self.header.payload_bytes - at))
        block[count:] = 0
        if not count:
            return
        try:
            with self._waits.on(self.header.group):
                self._channel.receive_range(wire.Pieces([block[:count].data]), at, count, base=at)
        except wire.WireError as error:
            self._waits.why[self.header.group] = str(error)
            raise self._waits.failed(self.header.group) from error
        if xxhash.xxh3_64_intdigest(block[:count].data) != self._table[at // CHUNK_BYTES]:
            raise CodingError(f"the part of group {self.header.group} is damaged at byte {at}", self.header.group)


def _combine(
    shards: list[tuple[_Giver, int]], out: np.ndarray, row: int, at_work: Callable[[], AbstractContextManager[None]]
) -> None:
    """Fill `out` with parity row `row` over shards, each given by its giver and its first byte in the giver's payload.
    Blocks are combined while more arrive. `at_work` makes a context whose time counts as this keeper's own."""
    blocks = [parity.aligned_bytes(min(CHUNK_BYTES, len(out))) for _ in shards]
    coefficients = parity.encoding_rows(len(shards), row + 1)[row:]
    for giver, first in shards:
        giver.ask(first, len(out))
    for start in range(0, len(out), CHUNK_BYTES):
        target = out[start : start + CHUNK_BYTES]
        for (giver, first), block in zip(shards, blocks, strict=True):
            giver.take(first + start, block[: len(target)])
        with at_work():
            parity.combine(coefficients, [block[: len(target)] for block in blocks], [target])
