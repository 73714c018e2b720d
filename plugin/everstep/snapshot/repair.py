"""A part that has rotted in a keeper's memory, made anew and put in the old one's place.

Only what does not match its checksums is made anew, into a fresh file beside the damaged one: decoded, block by block,
out of the parity group's, or fetched from a group that holds the same whole copy. A header is what the keeper remembers
of it. The file takes its place when every byte of it is the published one, and not while the trainer writes, which
holds a lock then. What the trainer has in its own memory is not looked at.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from everstep import wire
from everstep.snapshot import parity
from everstep.snapshot.board import Channels
from everstep.snapshot.buffer import (
    BufferReader,
    BufferWriter,
    SnapshotError,
    as_table,
    chunks,
    emptied,
    reserved_bytes,
    root_of,
)
from everstep.snapshot.header import Header, Kind
from everstep.snapshot.peers import header_of, wanted
from everstep.snapshot.room import BLOCK_BYTES, check_room
from everstep.snapshot.segment import Segment
from everstep.snapshot.stripes import Code, code_id

PEER_SILENT = timedelta(seconds=3)
"""Longest silence of another keeper while its shards are fetched."""


class RepairError(RuntimeError):
    """A part that cannot be made anew, and why."""


class Source(Protocol):
    """Where bytes of a damaged payload can be had once more."""

    def fill(self, payload: memoryview, begin: int, end: int, give_way: Callable[[], None]) -> None:
        """Write bytes [begin, end) of the payload, as far as they can be had here. Raises RepairError."""
        ...

    def close(self) -> None: ...


def repair(
    segment: Segment,
    path: Path,
    header: Header,
    channels: Channels,
    reserve_bytes: int,
    give_way: Callable[[], None],
) -> int:
    """Make the part anew that `header` describes and that was published in `path`. Returns how many bytes had to be
    decoded or fetched.

    `give_way` is called after each block.

    Raises:
        RepairError: what is left elsewhere does not give it back, there is no room, or its place is being written.
    """
    fresh = BufferWriter(segment.path / f"rank-{header.rank}.rebuilt")
    try:
        _check_place(segment, path, header)
        check_room(segment.root, reserved_bytes(header.payload_bytes), reserve_bytes)
        fresh.reserve(header.payload_bytes)
        fresh.begin()
        made = _rebuild(header, path, fresh, _sources(segment, header, channels), give_way)
        _exchange(segment, header, fresh.path, path)
        return made
    except (SnapshotError, OSError) as error:
        raise RepairError(str(error)) from error
    finally:
        fresh.release()
        fresh.path.unlink(missing_ok=True)


def _exchange(segment: Segment, header: Header, fresh: Path, path: Path) -> None:
    """Put the fresh file in the place of the damaged one, if that is still what it was."""
    with segment.writing(header.rank, wait_s=0.0):
        _check_place(segment, path, header)
        fresh.replace(path)


def _check_place(segment: Segment, path: Path, header: Header) -> None:
    """Raises RepairError if the trainer has gone on to write something else there."""
    found = segment.header("data", header.rank, path)
    with contextlib.suppress(FileNotFoundError):
        if found not in (None, header) or emptied(path):
            raise RepairError("its place has been written meanwhile")


def _rebuild(
    header: Header, path: Path, fresh: BufferWriter, sources: Iterable[Source], give_way: Callable[[], None]
) -> int:
    """The payload into the fresh file, what is sound out of the damaged one; published there."""
    payload, spans = fresh.payload(header.payload_bytes), chunks(header.payload_bytes, header.split)
    table, digests = _copied(header, path, payload, spans, give_way)

    def wrong() -> list[int]:
        """The chunks to be made anew: all, where it is not known which."""
        if table is not None:
            return [index for index, digest in enumerate(digests) if digest != table[index]]
        return [] if root_of(as_table(digests)) == header.root else list(range(len(spans)))

    made = sum(end - begin for begin, end in (spans[index] for index in wrong()))
    why = ["nothing else is held of it, here or elsewhere"]
    for source in sources:
        with contextlib.closing(source):
            try:
                for index in wrong():
                    begin, end = spans[index]
                    source.fill(payload, begin, end, give_way)
                    digests[index] = xxhash.xxh3_64_intdigest(payload[begin:end])
                why.append("what its peers hold is not what was published")
            except RepairError as error:
                why.append(str(error))
        if not wrong():
            break
    if wrong():
        raise RepairError("; ".join(why[1:] or why))
    if fresh.publish(header, as_table(digests)) != header:
        raise RepairError("its checksums are those of another header")
    return made


def _copied(
    header: Header, path: Path, payload: memoryview, spans: list[tuple[int, int]], give_way: Callable[[], None]
) -> tuple[np.ndarray | None, list[int]]:
    """Copy what is left of a damaged buffer into `payload`. Returns its table, if that is the published one, and the
    digests of what `payload` has now."""
    table = None
    with contextlib.suppress(OSError, SnapshotError), contextlib.closing(BufferReader(path)) as damaged:
        for begin, end in spans:
            damaged.read_into(payload[begin:end], begin)
            give_way()
        table = damaged.table(header)
    return table, [xxhash.xxh3_64_intdigest(payload[begin:end]) for begin, end in spans]


def _sources(segment: Segment, header: Header, channels: Channels) -> Iterator[Source]:
    for path in segment.files("parity", header.rank):
        piece = segment.header("parity", header.rank, path)
        if piece is not None and piece.identity == header.identity and header.group in piece.givers:
            yield _Coded(header, piece, _covers(path, piece), channels)
    if header.part == (0, header.state_bytes):
        for group in header.parity_group:
            if group != header.group:
                yield _Copy(header, group, channels)


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


@dataclass
class _Copy:
    """Another group's whole copy, which has all but what is a group's own."""

    header: Header
    group: int
    channels: Channels
    _peer: "_Peer | None" = None

    def fill(self, payload: memoryview, begin: int, end: int, give_way: Callable[[], None]) -> None:
        mine = self.header
        if self._peer is None:
            self._peer = _Peer(self.channels, "data", self.group, mine)
        theirs = self._peer.header
        if theirs is None or theirs.part != mine.part:
            raise RepairError(f"group {self.group} does not serve its copy")
        for name in ("part", "layout"):
            first, last = mine.sections[name]
            for at in range(max(begin, first), min(end, last), BLOCK_BYTES):
                target = payload[at : min(at + BLOCK_BYTES, end, last)]
                if not self._peer.fetch(theirs.sections[name][0] + at - first, target):
                    raise RepairError(f"group {self.group} does not serve its copy any more")
                give_way()

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()


@dataclass
class _Coded:
    """A piece of parity and, as far as they are needed, the other keepers of its code."""

    header: Header
    piece: Header
    covers: dict[int, Header]
    channels: Channels
    _peers: "dict[tuple[Kind, int], _Peer]" = field(default_factory=dict)

    def fill(self, payload: memoryview, begin: int, end: int, give_way: Callable[[], None]) -> None:
        group = self.header.group
        if self.covers.get(group) != self.header:
            raise RepairError("the parity that is held here is over another part")
        code = Code(self.piece.givers, self.piece.holders, self.piece.parity)
        length = code.shard_bytes({giver: h.payload_bytes for giver, h in self.covers.items()})
        for shard, at, count in _in_shards(begin, end, length):
            stripe = code.stripes_of(group)[shard]
            start = shard * length + at
            payload[start : start + count] = self._decoded(code, group, stripe, length, at, count).data
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
        peer = self._peers.get((kind, group))
        if peer is None:
            code = self.piece.code if kind == "parity" else ""
            peer = self._peers[kind, group] = _Peer(self.channels, kind, group, self.piece, code)
            theirs = peer.header
            if theirs is None or (theirs.code != code if kind == "parity" else theirs != self.covers[group]):
                peer.drop()
        size = self.covers[group].payload_bytes if kind == "data" else self.piece.sections["shards"][1]
        got = max(0, min(count, size - offset))
        shard = parity.aligned_bytes(count)
        shard[got:] = 0
        return shard if peer.fetch(offset, shard[:got].data) else None

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """A connection to another keeper, on which one buffer of the same snapshot is served."""

    def __init__(self, channels: Channels, kind: Kind, group: int, like: Header, code: str = "") -> None:
        """`like`: of the same snapshot and rank."""
        self._channels = channels
        self._channel: wire.Channel | None = None
        self.header: Header | None = None
        """Of the buffer that is served; None if none is, or none any more."""
        try:
            self._channel = channels.take(group)
            self._channel.set_timeout(PEER_SILENT)
            answer = self._channel.ask({"op": "open", **wanted(kind, group, like.rank, like.identity, code)})
            self.header = header_of(answer.get("header"), self._channel.peer)
        except wire.WireError:
            self.drop()

    def fetch(self, offset: int, target: memoryview) -> bool:
        """Fill `target` with the payload's bytes from `offset` on. False if they cannot be had."""
        try:
            if self._channel is not None and len(target):
                self._channel.ask_range(offset, len(target))
                self._channel.receive_range(wire.Pieces([target]), offset, len(target), base=offset)
        except wire.WireError:
            self.drop()
        return self._channel is not None

    def drop(self) -> None:
        """Have nothing more of it."""
        if self._channel is not None:
            self._channel.close()
        self._channel = self.header = None

    def close(self) -> None:
        if self._channel is not None:
            self._channels.give(self._channel)
        self._channel = self.header = None


def _in_shards(begin: int, end: int, length: int) -> Iterator[tuple[int, int, int]]:
    """A range of a payload by shards and blocks: number of the shard, where in it, how many bytes."""
    while begin < end:
        shard, at = divmod(begin, length)
        count = min(end - begin, length - at, BLOCK_BYTES)
        yield shard, at, count
        begin += count
