"""Carrying out a recovery decision for one rank: fetch the parts, decode the missing, verify every byte.

The state lands in one flat memory, of which the restored tensors are views. Nothing is returned before the parts
cover it exactly once and every payload, fetched or decoded, has matched the chunk table of its trainer's bytes (of a
decoded payload: the root of that table, which the parity's publishers kept).
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from everstep import wire
from everstep.snapshot import parity, peers
from everstep.snapshot.buffer import as_table, chunks, root_of, table_bytes
from everstep.snapshot.header import Header, coverage_error, topology_of
from everstep.snapshot.parity import Code
from everstep.snapshot.peers import Held
from everstep.snapshot.sources import Column, code_of

PARALLEL = 8
"""Keepers that one rank reads from at a time."""


class RestoreError(RuntimeError):
    """A snapshot that turned out not to be restorable after all, and the buffers because of which, by `Header.name`."""

    def __init__(self, message: str, buffers: list[str]) -> None:
        super().__init__(message)
        self.buffers = buffers


@dataclass
class Restored:
    """One rank's state, verified."""

    step: int
    history: int
    start: str
    """Of the snapshot: `header.Header.start`."""
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
    """A member's payload: its part of the state in place in the flat memory, the rest beside it."""

    header: Header
    flat: np.ndarray
    rest: np.ndarray = field(init=False)
    pieces: wire.Pieces = field(init=False)

    def __post_init__(self) -> None:
        begin, end = self.header.part
        self.rest = parity.aligned_bytes(self.header.payload_bytes - (end - begin))
        self.pieces = wire.Pieces([self.flat[begin:end].data, self.rest.data])

    def section(self, name: str) -> bytes:
        """Any section but the state itself."""
        part_bytes = self.header.part[1] - self.header.part[0]
        begin, end = self.header.sections[name]
        return self.rest[begin - part_bytes : end - part_bytes].tobytes()

    def wrong(self) -> str:
        """Why the bytes are not the published ones; "" if they are."""
        digests = [wire.digest_of(self.pieces.views(a, b - a)) for a, b in chunks(self.header.payload_bytes)]
        if root_of(as_table(digests)) != self.header.root:
            return "is not what was saved"
        try:
            unpack_own(self.section("own"), **whose(self.header))
        except ValueError as error:
            return f"is another's: {error}"
        return ""


def restore_rank(column: Column, rank: int, group: int, token: bytes, timeout: timedelta) -> Restored:
    """Fetch, decode and verify one rank's state.

    Args:
        column: the rank's column of a `sources.Decision`.
        group: this group. Its own part brings its own random states; a group that was not there takes a
        member's. timeout: the longest silence of a keeper.

    Raises:
        RestoreError: a keeper died or went on, or the bytes are not the published ones.
    """
    step = column.identity.step
    source = _Source(column, rank, token, timeout)
    codes = source.parities()
    covers = {h.group: h for pieces in codes for h in pieces.covers if h.group in column.missing}
    data = {holder: held.header for holder, held in column.data.items()}
    headers = {**data, **covers}
    why_not = coverage_error(list(headers.values()))
    if why_not or covers.keys() != set(column.missing):
        why_not = why_not or "its parity is over other parts"
        raise RestoreError(f"step {step} of rank {rank}: {why_not}", _parity_of(column) or column.names())
    flat = parity.aligned_bytes(next(iter(headers.values())).state_bytes)
    payloads = {holder: _Payload(header, flat) for holder, header in headers.items()}
    source.fetch({holder: payloads[holder] for holder in data}, first=group)
    for pieces in codes:
        pieces.decode(payloads, frozenset(column.missing))
    for holder, payload in payloads.items():
        wrong = payload.wrong()
        if not wrong:
            continue
        if holder in column.missing:
            # Either a part that passed its own checks or some parity is of another step: no telling which.
            what = f"what parity gives for group {holder} {wrong}"
            raise RestoreError(f"step {step} of rank {rank}: {what}", _parity_of(column, holder))
        what = f"the part of group {holder} {wrong}"
        raise RestoreError(f"step {step} of rank {rank}: {what}", [headers[holder].name])
    chosen = group if group in payloads else sorted(payloads)[group % len(payloads)]
    header = payloads[chosen].header
    try:
        meta, blobs = unpack_own(payloads[chosen].section("own"), **whose(header))
        layout = json.loads(payloads[chosen].section("layout"))
        if topology_of(layout, rank, header.ranks) != header.topology:
            raise ValueError("its layout is not the one that its header names")
    except ValueError as error:
        buffers = _parity_of(column, chosen) if chosen in column.missing else [header.name]
        raise RestoreError(f"step {step} of rank {rank}: the part of group {chosen}: {error}", buffers) from error
    fetched = sum(held.header.payload_bytes for held in itertools.chain(column.data.values(), *column.parity))
    return Restored(step, header.history, header.start, flat, layout, meta, blobs, fetched, column.missing)


def _parity_of(column: Column, group: int | None = None) -> list[str]:
    """The pieces of the code that a group is coded in, or of all, by `Header.name`."""
    pieces = (held.header for held in itertools.chain(*column.parity))
    return [header.name for header in pieces if group is None or group in header.parity_group]


def in_turn(groups: Iterable[int], first: int) -> list[int]:
    """The groups in the order in which group `first` reads from their keepers: from its own on, which is the nearest.
    So groups that start together do not all begin with the same keeper."""
    return sorted(groups, key=lambda group: (group < first, group))


class _Source:
    """Downloads of one rank's buffers of one identity, several keepers at a time."""

    def __init__(self, column: Column, rank: int, token: bytes, timeout: timedelta) -> None:
        self._column, self._rank, self._token, self._timeout = column, rank, token, timeout

    def _each(self, work: Callable[[Held], Any], held: Iterable[Held]) -> list[Any]:
        """`work` on each buffer. Raises RestoreError, which names the first that failed."""

        def attempt(buffer: Held) -> Any:
            header = buffer.header
            try:
                return work(buffer)
            except (wire.WireError, parity.ParityError, ValueError, TypeError, KeyError) as error:
                what = f"{'parity' if header.kind == 'parity' else 'the part'} of group {header.group}"
                raise RestoreError(
                    f"step {header.step} of rank {self._rank}, {what}: {error}", [header.name]
                ) from error

        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(attempt, held))

    def _download(self, held: Held, sink: list[memoryview]) -> None:
        """Payload into `sink`, and after it the table, which must be the one that the header vouches for."""
        header = held.header
        table = np.zeros(table_bytes(header.payload_bytes) // 8, dtype="<u8")
        pieces = wire.Pieces([*sink, table.view(np.uint8).data])
        peers.download(held.address, self._token, self._timeout, header, pieces)
        if root_of(table) != header.root:
            raise wire.WireError(f"the {header.kind} that {held.address} sent is not the one that it announced")

    def fetch(self, payloads: Mapping[int, _Payload], first: int) -> None:
        """Every member's payload to its place, in turn from `first` on."""

        def one(held: Held) -> None:
            payload = payloads[held.header.group]
            self._download(held, payload.pieces.views(0, payload.pieces.size) if payload.pieces.size else [])

        self._each(one, [self._column.data[group] for group in in_turn(payloads, first)])

    def parities(self) -> list["_Pieces"]:
        """The pieces of each code that is needed."""

        def one(held: Held) -> tuple[Header, np.ndarray, list[Header]]:
            header = held.header
            payload = parity.aligned_bytes(header.payload_bytes)
            self._download(held, [payload.data])
            if root_of(as_table([wire.digest_of([payload[a:b].data]) for a, b in chunks(len(payload))])) != header.root:
                raise wire.WireError(f"the parity of group {header.group} does not match its checksums")
            begin, end = header.sections["covers"]
            covers = [Header.from_json(body) for body in json.loads(payload[begin:end].tobytes())]
            begin, end = header.sections["shards"]
            return header, payload[begin:end].reshape(header.parity, -1), covers

        found = []
        for pieces in self._column.parity:
            fetched = self._each(one, pieces)
            header, _, covers = fetched[0]
            code = code_of(header)
            sound = all(h.identity == self._column.identity and h.kind == "data" for h in covers)
            alike = all(c == covers for _, _, c in fetched)
            named = tuple((h.group, h.root) for h in covers) == tuple(zip(code.members, header.roots, strict=True))
            if not (sound and alike and named):
                buffers = [held.header.name for held in pieces]
                raise RestoreError(f"step {header.step} of rank {self._rank}: its parity is over other parts", buffers)
            held = {h.group: shards for h, shards, _ in fetched}
            found.append(_Pieces(code, covers, held))
        return found


@dataclass
class _Pieces:
    """What is left of a code."""

    code: Code
    covers: list[Header]
    """The payloads that it is over."""
    shards: dict[int, np.ndarray]
    """By holder: [parity, shard bytes]."""

    def decode(self, payloads: Mapping[int, _Payload], missing: frozenset[int]) -> None:
        """Fill the missing payloads, stripe by stripe, from the ones that are there and from parity."""
        code = self.code
        length = next(iter(self.shards.values())).shape[1]
        for stripe in range(len(code.members)):
            givers, holders = code.columns(stripe), code.rows(stripe)
            lost = [c for c, giver in enumerate(givers) if giver in missing]
            if not lost:
                continue
            k = len(givers)
            at = [code.stripes_of(giver).index(stripe) * length for giver in givers]
            shards = {}
            for column, giver in enumerate(givers):
                if column not in lost:
                    shards[column] = parity.aligned_bytes(length)
                    read_padded(payloads[giver].pieces, at[column], shards[column])
            for row, holder in enumerate(holders):
                if holder in self.shards:
                    shards[k + row] = self.shards[holder][row]
            have, out = list(shards)[:k], [parity.aligned_bytes(length) for _ in lost]
            rows = parity.decoding_rows(k, code.parity, lost, have)
            parity.combine(rows, [shards[index] for index in have], out)
            for column, decoded in zip(lost, out, strict=True):
                _write_clipped(payloads[givers[column]].pieces, at[column], decoded)


def read_padded(pieces: wire.Bytes, offset: int, target: np.ndarray) -> None:
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


def whose(header: Header) -> dict[str, Any]:
    """What a payload says of itself: its header could be another's."""
    names = ("run", "step", "history", "start", "group", "rank", "state_bytes")
    return {**{name: getattr(header, name) for name in names}, "part": list(header.part)}


def pack_own(meta: dict[str, Any], blobs: dict[str, bytes], **whose: Any) -> bytes:
    """A JSON object and named byte strings as one byte string that says whose it is."""
    named = [[name, len(blob)] for name, blob in blobs.items()]
    head = json.dumps({"of": whose, "meta": meta, "blobs": named}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(blobs.values())


def unpack_own(data: bytes, **whose: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The inverse of `pack_own`. Raises ValueError if it is somebody else's."""
    at = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:at])
    if not isinstance(head, dict) or head.get("of") != whose:
        raise ValueError(f"it is of {head.get('of') if isinstance(head, dict) else head}, not of {whose}")
    blobs = {}
    try:
        for name, size in head["blobs"]:
            blobs[name] = data[at : at + size]
            at += size
        return head["meta"], blobs
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is none: {error}") from error
