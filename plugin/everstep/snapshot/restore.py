"""Carrying out the sources's decision for one rank: fetch the parts, decode the missing, verify every byte.

The state lands in one flat buffer, of which the restored tensors are views. Nothing is returned before every
payload, fetched or decoded, has matched the chunk table that its publisher wrote (of a decoded payload: the
root of that table, which the parity's publishers kept).
"""

import json
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from everstep import wire
from everstep.snapshot import parity, peers, stripes
from everstep.snapshot.buffer import CHUNK_BYTES, Header, chunk_digests, root_of, table_bytes
from everstep.snapshot.segment import Kind
from everstep.snapshot.sources import Column

BLOCK_BYTES = 2 << 20


@dataclass(frozen=True)
class Blame:
    """The buffers because of which a snapshot could not be restored."""

    kind: Kind
    rank: int
    identity: peers.Identity
    group: int | None
    """None: whichever group's."""

    def hits(self, header: Header) -> bool:
        return (
            (header.kind, header.rank, header.identity) == (self.kind, self.rank, self.identity)
            and self.group in (None, header.group)
        )  # fmt: skip


class RestoreError(RuntimeError):
    """A snapshot that turned out not to be restorable after all. Nothing of it may be used."""

    def __init__(self, message: str, blame: Blame) -> None:
        super().__init__(message)
        self.blame = blame


@dataclass
class Restored:
    """One rank's state, verified."""

    step: int
    lineage: str
    flat: np.ndarray
    """uint8 [state_bytes]: the tensors end to end, as `layout` says."""
    layout: dict[str, Any]
    """`layout.Layout.to_json()`."""
    meta: dict[str, Any]
    blobs: dict[str, bytes]
    fetched_bytes: int = 0
    decoded: tuple[int, ...] = ()
    """Groups whose parts came from parity."""


@dataclass
class _Payload:
    """A member's payload: its part of the state in place in the flat buffer, the rest beside it."""

    header: Header
    flat: np.ndarray
    rest: np.ndarray = field(init=False)
    pieces: wire.Pieces = field(init=False)

    def __post_init__(self) -> None:
        begin, end = self.header.part
        self.rest = np.empty(self.header.payload_bytes - (end - begin), dtype=np.uint8)
        self.pieces = wire.Pieces([self.flat[begin:end].data, self.rest.data])

    def section(self, name: str) -> bytes:
        """Any section but the state itself."""
        part_bytes = self.header.part[1] - self.header.part[0]
        begin, end = self.header.sections[name]
        return self.rest[begin - part_bytes : end - part_bytes].tobytes()

    def matches_root(self) -> bool:
        """Whether the bytes are the published ones: their chunk digests give the header's root."""
        size = self.pieces.size
        starts = range(0, size, CHUNK_BYTES)
        digests = [wire.digest_of(self.pieces.views(s, min(CHUNK_BYTES, size - s))) for s in starts]
        return root_of(np.array(digests, dtype="<u8")) == self.header.root


def restore_rank(column: Column, rank: int, group: int, token: bytes, timeout: timedelta) -> Restored:
    """Fetch, decode and verify one rank's state.

    Args:
        column: the rank's column of a `sources.Decision`.
        group: this group. Its own part brings its own random states; a group that was not there takes a
        member's. timeout: the longest silence of a keeper.

    Raises:
        RestoreError: a keeper died or went on, or the bytes are not the published ones.
    """
    step, lineage, _, _ = column.identity
    source = _Source(column, rank, token, timeout)
    try:
        parities = {holder: source.parity(holder) for holder in sorted(column.parity)}
        covers = {header.group: header for _, headers in parities.values() for header in headers}
        headers = {holder: source.header("data", holder) for holder in sorted(column.data)}
        state_bytes = next(iter((headers or covers).values())).state_bytes
        flat = parity.aligned_bytes(state_bytes)
        payloads: dict[int, _Payload] = {}
        # Our own keeper first: it is the nearest, and where each copy is whole the only one needed.
        for holder in sorted(headers, key=lambda g: (g != group, g)):
            payloads[holder] = _Payload(headers[holder], flat)
            source.data(holder, payloads[holder])
            if headers[holder].part == (0, state_bytes):
                break
        for lost in column.missing:
            payloads[lost] = _Payload(covers[lost], flat)
        if column.missing:
            _decode(column, payloads, {holder: shards for holder, (shards, _) in parities.items()})
    except (wire.WireError, parity.ParityError, ValueError, TypeError, KeyError) as error:
        blame = Blame(source.kind, rank, column.identity, source.holder)
        raise RestoreError(f"step {step} of rank {rank}, {source.doing}: {error}", blame) from error
    for holder, payload in payloads.items():
        if payload.matches_root():
            continue
        if holder in column.missing:
            # Either a part that passed its own checks or some parity is of another step: no telling which.
            blame = Blame("parity", rank, column.identity, None)
            raise RestoreError(f"step {step} of rank {rank}: what parity gives for group {holder} is wrong", blame)
        blame = Blame("data", rank, column.identity, holder)
        raise RestoreError(f"step {step} of rank {rank}: the part of group {holder} is not what was saved", blame)
    own = payloads.get(group) or payloads[sorted(payloads)[group % len(payloads)]]
    meta, blobs = unpack_own(own.section("own"))
    layout = json.loads(own.section("layout"))
    return Restored(step, lineage, flat, layout, meta, blobs, source.fetched_bytes, column.missing)


class _Source:
    """Downloads of one rank's buffers of one identity."""

    def __init__(self, column: Column, rank: int, token: bytes, timeout: timedelta) -> None:
        self._column, self._rank, self._token, self._timeout = column, rank, token, timeout
        self.fetched_bytes = 0
        self.kind: Kind = "parity"
        self.holder: int | None = None

    @property
    def doing(self) -> str:
        """What was being fetched last, or worked on with it."""
        return f"{'parity' if self.kind == 'parity' else 'the part'} of group {self.holder}"

    def header(self, kind: Kind, holder: int) -> Header:
        self.kind, self.holder = kind, holder
        address = (self._column.data if kind == "data" else self._column.parity)[holder]
        channel = wire.connect(address, self._token, self._timeout)
        try:
            return peers.open_buffer(channel, kind, self._rank, self._column.identity)
        finally:
            channel.close()

    def _download(self, kind: Kind, address: str, header: Header, sink: list[memoryview]) -> None:
        """Payload into `sink`, and after it the table, which must be the one that the header vouches for."""
        table = np.empty(table_bytes(header.payload_bytes) // 8, dtype="<u8")
        pieces = wire.Pieces([*sink, table.view(np.uint8).data])
        peers.Download(address, self._token, self._timeout).run(kind, self._rank, self._column.identity, pieces)
        self.fetched_bytes += pieces.size
        if root_of(table) != header.root:
            raise wire.WireError(f"the {kind} that {address} sent is not the one that it announced")

    def data(self, holder: int, payload: _Payload) -> None:
        self.kind, self.holder = "data", holder
        views = payload.pieces.views(0, payload.pieces.size) if payload.pieces.size else []
        self._download("data", self._column.data[holder], payload.header, views)

    def parity(self, holder: int) -> tuple[np.ndarray, list[Header]]:
        """A holder's shards, [parity, shard bytes], and the headers of the members that they cover."""
        header = self.header("parity", holder)
        payload = parity.aligned_bytes(header.payload_bytes)
        self._download("parity", self._column.parity[holder], header, [payload.data])
        if root_of(chunk_digests(payload.data)) != header.root:
            raise wire.WireError(f"the parity of group {holder} does not match its checksums")
        begin, end = header.sections["covers"]
        covers = [Header.from_json(body) for body in json.loads(payload[begin:end].tobytes())]
        begin, end = header.sections["shards"]
        return payload[begin:end].reshape(header.parity, -1), covers


def _decode(column: Column, payloads: dict[int, _Payload], shards: dict[int, np.ndarray]) -> None:
    """Fill the missing payloads, stripe by stripe, from the ones that are there and from parity."""
    members = column.identity[2]
    n = len(members)
    m, length = next(iter(shards.values())).shape
    k = n - m
    block = [parity.aligned_bytes(min(BLOCK_BYTES, length)) for _ in range(k + n)]
    for stripe in range(n):
        givers = [members[i] for i in stripes.data_members(stripe, n, m)]
        lost = [c for c, giver in enumerate(givers) if giver in column.missing]
        if not lost:
            continue
        holders = {k + row: members[stripes.parity_member(stripe, row, n)] for row in range(m)}
        have = [c for c in range(k) if c not in lost] + [index for index, g in holders.items() if g in shards]
        have = have[:k]
        rows = parity.decoding_rows(k, m, lost, have)
        for start in range(0, length, BLOCK_BYTES):
            span = min(BLOCK_BYTES, length - start)
            for index, target in zip(have, block, strict=False):
                if index < k:
                    _read_padded(payloads[givers[index]].pieces, index * length + start, target[:span])
                else:
                    target[:span] = shards[holders[index]][index - k, start : start + span]
            out = [target[:span] for target in block[k : k + len(lost)]]
            parity.combine(rows, [target[:span] for target in block[: len(have)]], out)
            for column_index, decoded in zip(lost, out, strict=True):
                _write_clipped(payloads[givers[column_index]].pieces, column_index * length + start, decoded)


def _read_padded(pieces: wire.Pieces, offset: int, target: np.ndarray) -> None:
    """Bytes from `offset` on; beyond the end they count as 0."""
    count = max(0, min(len(target), pieces.size - offset))
    at = 0
    for view in pieces.views(offset, count) if count else []:
        target[at : at + len(view)] = np.frombuffer(view, dtype=np.uint8)
        at += len(view)
    target[count:] = 0


def _write_clipped(pieces: wire.Pieces, offset: int, source: np.ndarray) -> None:
    """The inverse: what lies beyond the end is dropped."""
    count = max(0, min(len(source), pieces.size - offset))
    at = 0
    for view in pieces.views(offset, count) if count else []:
        view[:] = source[at : at + len(view)].data
        at += len(view)


def pack_own(meta: dict[str, Any], blobs: dict[str, bytes]) -> bytes:
    """A JSON object and named byte strings as one byte string."""
    head = json.dumps({"meta": meta, "blobs": [[name, len(blob)] for name, blob in blobs.items()]}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(blobs.values())


def unpack_own(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The inverse of `pack_own`."""
    at = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:at])
    blobs = {}
    for name, size in head["blobs"]:
        blobs[name] = data[at : at + size]
        at += size
    return head["meta"], blobs
