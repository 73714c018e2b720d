"""A part that has rotted in a keeper's memory, made anew out of its parity group's and put in the old one's place.

Only what does not match its checksums is decoded, block by block, into a fresh file beside the damaged one. The file
takes its place when every byte of it is the published one, and not while the trainer writes, which holds a lock then.
What the trainer has in its own memory is not looked at.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import xxhash

from everstep import wire
from everstep.snapshot import parity
from everstep.snapshot.board import Channels
from everstep.snapshot.buffer import BufferReader, BufferWriter, SnapshotError, chunk_digests, chunks, reserved_bytes
from everstep.snapshot.header import Header, Kind
from everstep.snapshot.peers import header_of, wanted
from everstep.snapshot.room import BLOCK_BYTES, check_room
from everstep.snapshot.segment import Segment
from everstep.snapshot.stripes import Code, code_id

PEER_SILENT = timedelta(seconds=3)
"""Longest silence of another keeper while its shards are fetched."""


class RepairError(RuntimeError):
    """A part that cannot be made anew, and why."""


def repair(
    segment: Segment, header: Header, channels: Channels, reserve_bytes: int, give_way: Callable[[], None]
) -> int:
    """Make the part that `header` describes anew in the segment. Returns how many bytes were decoded.

    `give_way` is called after each block.

    Raises:
        RepairError: what is left of its code does not give it back, there is no room, or its place is being written.
    """
    path = next((path for path in segment.files("data", header.rank) if _published(path) == header), None)
    if path is None:
        raise RepairError("it is not there any more")
    reasons = []
    for piece_path in segment.files("parity", header.rank):
        piece = _published(piece_path)
        if piece is None or piece.identity != header.identity or header.group not in piece.givers:
            continue
        fresh = BufferWriter(segment.path / f"rank-{header.rank}.rebuilt")
        peers = _Peers(piece, _covers(piece_path, piece), channels)
        try:
            check_room(segment.root, reserved_bytes(header.payload_bytes), reserve_bytes)
            with contextlib.closing(BufferReader(path)) as damaged:
                decoded = _rebuild(header, damaged, fresh, peers, give_way)
            _exchange(segment, header, fresh.path, path)
            return decoded
        except (RepairError, SnapshotError) as error:
            reasons.append(str(error))
        finally:
            peers.close()
            fresh.release()
            fresh.path.unlink(missing_ok=True)
    raise RepairError("; ".join(reasons) or "no parity over it is held here")


def _exchange(segment: Segment, header: Header, fresh: Path, path: Path) -> None:
    """Put the fresh file in the place of the damaged one, if that is still what it was."""
    with segment.writing(header.rank, wait_s=0.0):
        if _published(path) != header:
            raise RepairError("its place has been written meanwhile")
        fresh.replace(path)


def _published(path: Path) -> Header | None:
    try:
        with contextlib.closing(BufferReader(path)) as reader:
            return reader.header()
    except OSError:
        return None


def _covers(path: Path, piece: Header) -> dict[int, Header]:
    """The payloads that a piece of parity is over, by group. Empty if they are not those that its code is named for."""
    begin, end = piece.sections["covers"]
    body = bytearray(end - begin)
    with contextlib.suppress(OSError, SnapshotError, ValueError), contextlib.closing(BufferReader(path)) as reader:
        reader.read_into(memoryview(body), begin)
        found = {header.group: header for header in map(Header.from_json, json.loads(body))}
        code = Code(piece.givers, piece.holders, piece.parity)
        if found.keys() == set(piece.givers) and code_id(code, {g: h.root for g, h in found.items()}) == piece.code:
            return found
    return {}


def _rebuild(
    header: Header, damaged: BufferReader, fresh: BufferWriter, peers: "_Peers", give_way: Callable[[], None]
) -> int:
    """The payload into the fresh file, what is sound from the damaged one, the rest decoded; published there."""
    fresh.reserve(header.payload_bytes)
    fresh.begin()
    payload = fresh.payload(header.payload_bytes)
    table = damaged.table(header)
    decoded = 0
    for index, (begin, end) in enumerate(chunks(header.payload_bytes, header.split)):
        damaged.read_into(payload[begin:end], begin)
        if table is None or xxhash.xxh3_64_intdigest(payload[begin:end]) != table[index]:
            peers.decode(header, payload, begin, end, give_way)
            decoded += end - begin
        give_way()
    if fresh.publish(header, chunk_digests(payload, header.split)) != header:
        raise RepairError("what its peers and parity give is not what was published")
    return decoded


@dataclass
class _Peers:
    """The other keepers of a code, as far as they are needed: connections on which one buffer each is served."""

    piece: Header
    covers: dict[int, Header]
    channels: Channels
    _served: dict[tuple[Kind, int], wire.Channel | None] = field(default_factory=dict)

    def decode(self, header: Header, payload: memoryview, begin: int, end: int, give_way: Callable[[], None]) -> None:
        """Bytes [begin, end) of that payload. Raises RepairError."""
        if self.covers.get(header.group) != header:
            raise RepairError("the parity that is held here is over another part")
        code = Code(self.piece.givers, self.piece.holders, self.piece.parity)
        length = code.shard_bytes({group: h.payload_bytes for group, h in self.covers.items()})
        for shard, at, count in _in_shards(begin, end, length):
            stripe = code.stripes_of(header.group)[shard]
            start = shard * length + at
            payload[start : start + count] = self._decoded(code, header.group, stripe, length, at, count).data
            give_way()

    def _decoded(self, code: Code, group: int, stripe: int, length: int, at: int, count: int) -> np.ndarray:
        """Bytes [at, at + count) of the group's shard of a stripe."""
        columns, holders = code.columns(stripe), code.rows(stripe)
        shards: dict[int, np.ndarray] = {}
        for column, giver in enumerate(columns):
            offset = code.stripes_of(giver).index(stripe) * length + at
            found = None if giver == group else self._fetch("data", giver, offset, count)
            if found is not None:
                shards[column] = found
        for row, holder in enumerate(holders):
            if len(shards) < len(columns):
                found = self._fetch("parity", holder, row * length + at, count)
                if found is not None:
                    shards[len(columns) + row] = found
        if len(shards) < len(columns):
            raise RepairError(f"of {len(columns)} shards that are needed {len(shards)} are left")
        have = sorted(shards)
        rows = parity.decoding_rows(len(columns), code.parity, [columns.index(group)], have)
        out = parity.aligned_bytes(count)
        parity.combine(rows, [shards[index] for index in have], [out])
        return out

    def _fetch(self, kind: Kind, group: int, offset: int, count: int) -> np.ndarray | None:
        """Bytes of a payload, zeros beyond its end; None if its keeper does not serve it."""
        channel = self._channel(kind, group)
        if channel is None:
            return None
        size = self.covers[group].payload_bytes if kind == "data" else self.piece.sections["shards"][1]
        got = max(0, min(count, size - offset))
        shard = parity.aligned_bytes(count)
        shard[got:] = 0
        try:
            if got:
                channel.ask_range(offset, got)
                channel.receive_range(wire.Pieces([shard[:got].data]), offset, got, base=offset)
        except wire.WireError:
            self._served[kind, group] = None
            channel.close()
            return None
        return shard

    def _channel(self, kind: Kind, group: int) -> wire.Channel | None:
        if (kind, group) not in self._served:
            self._served[kind, group] = self._open(kind, group)
        return self._served[kind, group]

    def _open(self, kind: Kind, group: int) -> wire.Channel | None:
        channel = None
        try:
            channel = self.channels.take(group)
            channel.set_timeout(PEER_SILENT)
            code = self.piece.code if kind == "parity" else ""
            question = wanted(kind, group, self.piece.rank, self.piece.identity, code)
            answer = header_of(channel.ask({"op": "open", **question}).get("header"), channel.peer)
        except wire.WireError:
            if channel is not None:
                channel.close()
            return None
        if answer == self.covers[group] if kind == "data" else answer.code == self.piece.code:
            return channel
        channel.close()
        return None

    def close(self) -> None:
        for channel in filter(None, self._served.values()):
            self.channels.give(channel)
        self._served.clear()


def _in_shards(begin: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
    """A range of a payload by shards and blocks: number of the shard, where in it, how many bytes."""
    while begin < end:
        shard, at = divmod(begin, length)
        count = min(end - begin, length - at, BLOCK_BYTES)
        yield shard, at, count
        begin += count
