"""Carrying out a recovery decision for one rank: fetch the parts, decode missing ones, verify every byte.

The state is written to one flat array, and the restored tensors are views of it. Nothing is returned before the parts
cover the array exactly once and the chunk table of every payload, fetched or decoded, has the root that was published
with it. (The root of a decoded payload is in the headers that the parity payload holds.)
"""

import contextlib
import functools
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import xxhash

from everstep import wire
from everstep.snapshot import parity, peers
from everstep.snapshot.buffer import as_table, chunk_digests, chunks, root_of
from everstep.snapshot.header import Header, coverage_error, headers_from_json
from everstep.snapshot.layout import Layout
from everstep.snapshot.parity import Code
from everstep.snapshot.sources import Column

PARALLEL = 8
"""Keepers that one rank reads from at the same time."""
TRIES = 3
"""Attempts to read from a keeper."""


class RestoreError(RuntimeError):
    """A snapshot turned out not to be restorable. `buffers` are the buffers that caused this, by `Header.name`."""

    def __init__(self, message: str, buffers: list[str]) -> None:
        super().__init__(message)
        self.buffers = buffers


@dataclass
class Restored:
    """One rank's state, verified."""

    step: int
    history: int
    flat: np.ndarray
    """uint8 [state_bytes]: the tensors, placed as `layout` says."""
    layout: Layout
    meta: dict[str, Any]
    blobs: dict[str, bytes]
    fetched_bytes: int = 0
    decoded: tuple[int, ...] = ()
    """Groups whose parts were decoded from parity."""


@dataclass
class _Payload:
    """A member's payload: its part of the state is in place in `flat`, and what follows it is in `rest`."""

    header: Header
    flat: np.ndarray
    rest: np.ndarray = field(init=False)
    pieces: wire.Pieces = field(init=False)

    def __post_init__(self) -> None:
        begin, end = self.header.part
        self.rest = parity.aligned_bytes(self.header.payload_bytes - (end - begin))
        self._layout_bytes = self.header.payload_bytes - self.header.last_section
        self.pieces = wire.Pieces([self.flat[begin:end].data, self.rest.data])

    @property
    def own(self) -> bytes:
        """The bytes between part and layout: what only this rank and group has (`pack_own`)."""
        return self.rest[: len(self.rest) - self._layout_bytes].tobytes()

    @property
    def layout(self) -> bytes:
        return self.rest[len(self.rest) - self._layout_bytes :].tobytes()

    def wrong(self) -> str:
        """Return why the bytes are not the published ones; "" if they are."""
        digests = []
        for begin, end in chunks(self.header.payload_bytes):
            digest = xxhash.xxh3_64()
            for view in self.pieces.views(begin, end - begin):
                digest.update(view)
            digests.append(digest.intdigest())
        if root_of(as_table(digests)) != self.header.root:
            return "does not match its checksums"
        try:
            unpack_own(self.own, **whose(self.header))
        except ValueError as error:
            return f"belongs to another snapshot: {error}"
        return ""


def restore_rank(column: Column, group: int, token: bytes, timeout: timedelta) -> Restored:
    """Fetch, decode and verify one rank's state.

    Args:
        column: the rank's column of a `sources.Decision`.
        group: this group. Its own random states are restored if it is a member, otherwise another member's.
        timeout: longest silence of a keeper.

    Raises:
        RestoreError: a keeper died or no longer holds a buffer, or bytes are not the published ones.
    """
    step, rank, missing = column.any_header.step, column.any_header.rank, frozenset(column.missing)
    failed = lambda why, names: RestoreError(f"step {step} of rank {rank}: {why}", names)  # noqa: E731
    flat = parity.aligned_bytes(column.any_header.state_bytes)
    payloads = {holder: _Payload(held.header, flat) for holder, held in column.data.items()}
    sinks = {held.header.name: payloads[holder].pieces for holder, held in column.data.items()}
    coded = [[piece.header for piece in held] for held in column.parity]
    shards = {header.name: parity.aligned_bytes(header.payload_bytes) for header in itertools.chain(*coded)}
    sinks |= {name: wire.Pieces([memory.data]) for name, memory in shards.items()}
    _fetch_all(column, sinks, group, token, timeout)
    codes = [_pieces_of(headers, shards, column.any_header) for headers in coded]
    covers = {h.group: h for pieces in codes for h in pieces.covers if h.group in missing}
    headers = {**{holder: held.header for holder, held in column.data.items()}, **covers}
    why_not = coverage_error(list(headers.values()))
    if why_not or covers.keys() != missing:
        raise failed(why_not or "its parity covers other parts", _parity_of(column) or column.names)
    payloads |= {holder: _Payload(header, flat) for holder, header in covers.items()}
    for pieces in codes:
        pieces.decode(payloads, missing)
    for holder, payload in payloads.items():
        if wrong := payload.wrong():
            # If a decoded part is wrong, some parity, or a part that passed its own checks, is of another step.
            names = _parity_of(column, holder) if holder in missing else [headers[holder].name]
            raise failed(f"the part of group {holder}, {'decoded' if holder in missing else 'fetched'}, {wrong}", names)
    chosen = group if group in payloads else sorted(payloads)[group % len(payloads)]
    header = payloads[chosen].header
    try:
        meta, blobs = unpack_own(payloads[chosen].own, **whose(header))
        layout = Layout.from_json(json.loads(payloads[chosen].layout))
        if layout.topology(rank, header.ranks) != header.topology:
            raise ValueError("its layout is not the one that its header names")
    except ValueError as error:
        names = _parity_of(column, chosen) if chosen in missing else [header.name]
        raise failed(f"the part of group {chosen}: {error}", names) from error
    fetched = sum(held.header.payload_bytes for held in column.held)
    return Restored(step, header.history, flat, layout, meta, blobs, fetched, column.missing)


def _parity_of(column: Column, group: int | None = None) -> list[str]:
    """Return the parity buffers, by `Header.name`, of the parity group of `group`, or of all parity groups."""
    pieces = (held.header for held in itertools.chain(*column.parity))
    return [header.name for header in pieces if group is None or group in header.parity_group]


def nearest_first(groups: Iterable[int], first: int) -> list[int]:
    """Return the groups in the order in which group `first` reads from their keepers: its own, which is nearest, then
    the following ids. So groups that start together do not all begin with the same keeper."""
    return sorted(groups, key=lambda group: (group < first, group))


def _fetch_all(column: Column, sinks: Mapping[str, wire.Pieces], group: int, token: bytes, timeout: timedelta) -> None:
    """Fetch a column's buffers into their sinks (by `Header.name`), several keepers at once. Raises RestoreError."""
    order = {one: place for place, one in enumerate(nearest_first({held.header.group for held in column.held}, group))}
    by_keeper: dict[str, list[Header]] = defaultdict(list)
    for held in sorted(column.held, key=lambda held: order[held.header.group]):
        by_keeper[held.address].append(held.header)
    with ThreadPoolExecutor(PARALLEL) as pool:
        fetch = functools.partial(_fetch, sinks=sinks, token=token, timeout=timeout)
        list(pool.map(fetch, by_keeper, by_keeper.values()))


def _fetch(
    address: str, headers: list[Header], sinks: Mapping[str, wire.Pieces], token: bytes, timeout: timedelta
) -> None:
    """Fetch these buffers from one keeper over one connection, and over a new one if it breaks. Raises RestoreError,
    which names the buffer that failed."""
    done = broken = 0
    while done < len(headers):
        try:
            with contextlib.closing(wire.connect(address, token, timeout)) as channel:
                for header in headers[done:]:
                    peers.download(channel, header, sinks[header.name])
                    done += 1
        except wire.WireError as error:
            broken += 1
            if broken == TRIES or isinstance(error, wire.RefusedError):  # refused: the keeper no longer holds it
                header = headers[done]
                what = f"step {header.step} of rank {header.rank}, the {header.kind} of group {header.group}"
                raise RestoreError(f"{what}: {error}", [header.name]) from error
            time.sleep(0.1)  # a keeper that is being restarted needs time until it listens


def _pieces_of(held: Sequence[Header], fetched: Mapping[str, np.ndarray], any_part: Header) -> "_Pieces":
    """Return the verified parity of one parity group, with the headers that it covers. Raises RestoreError."""
    what = f"step {any_part.step} of rank {any_part.rank}"
    for header in held:
        if root_of(chunk_digests(fetched[header.name].data)) != header.root:
            raise RestoreError(f"{what}: the parity of group {header.group} is damaged", [header.name])
    said = {fetched[header.name][header.last_section :].tobytes() for header in held}
    code = Code(held[0].parity_group, held[0].parity)
    try:
        shards = {h.group: fetched[h.name][: h.last_section].reshape(h.parity, -1) for h in held}
        covers = headers_from_json(json.loads(max(said)))
    except (ValueError, TypeError):
        shards, covers = {}, []
    sound = len(said) == 1 and all(h.identity == any_part.identity and h.kind == "data" for h in covers)
    named = tuple((h.group, h.root) for h in covers) == tuple(zip(code.members, held[0].roots, strict=True))
    if not (sound and named):
        raise RestoreError(f"{what}: its parity covers other parts", [header.name for header in held])
    return _Pieces(code, covers, shards)


@dataclass
class _Pieces:
    """The remaining parity of a parity group."""

    code: Code
    covers: list[Header]
    """Headers of the payloads that the parity covers."""
    shards: dict[int, np.ndarray]
    """Holder -> its parity shards, uint8 [parity, shard bytes]."""

    def decode(self, payloads: Mapping[int, _Payload], missing: frozenset[int]) -> None:
        """Fill the missing members' payloads, stripe by stripe, from the other payloads and from parity."""
        code = self.code
        length = next(iter(self.shards.values())).shape[1]
        for stripe in range(len(code.members)):
            givers, holders = code.columns(stripe), code.rows(stripe)
            at = [code.stripes_of(giver).index(stripe) * length for giver in givers]
            # A shard that begins beyond the end of its payload is not lost: it is all zeros.
            ends = [payloads[giver].pieces.size if giver in missing else 0 for giver in givers]
            lost = [column for column, end in enumerate(ends) if at[column] < end]
            if not lost:
                continue
            k = len(givers)
            there = {c: _views(payloads[g].pieces, at[c], length) for c, g in enumerate(givers) if c not in lost}
            whole = {c: b"".join(views).ljust(length, b"\0") for c, views in there.items()}
            shards = {c: np.frombuffer(data, dtype=np.uint8) for c, data in whole.items()}
            shards |= {k + row: self.shards[holder][row] for row, holder in enumerate(holders) if holder in self.shards}
            have, out = list(shards)[:k], [parity.aligned_bytes(length) for _ in lost]
            rows = parity.decoding_rows(k, code.parity, lost, have)
            parity.combine(rows, [shards[index] for index in have], out)
            for column, decoded in zip(lost, (each.data for each in out), strict=True):
                for view in _views(payloads[givers[column]].pieces, at[column], length):
                    view[:], decoded = decoded[: len(view)], decoded[len(view) :]


def _views(payload: wire.Pieces, offset: int, length: int) -> list[memoryview]:
    """Return up to `length` bytes from `offset` on, as far as the payload goes."""
    return payload.views(offset, max(0, min(length, payload.size - offset)))


def whose(header: Header) -> dict[str, Any]:
    """Return the header fields that a payload repeats, so that a payload with another one's header is noticed."""
    names = ("run", "step", "history", "start", "group", "rank", "state_bytes")
    return {**{name: getattr(header, name) for name in names}, "part": list(header.part)}


def pack_own(meta: dict[str, Any], blobs: dict[str, bytes], **whose: Any) -> bytes:
    """Pack a JSON object and named byte strings into one byte string that says whose it is."""
    named = [[name, len(blob)] for name, blob in blobs.items()]
    head = json.dumps({"of": whose, "meta": meta, "blobs": named}).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(blobs.values())


def unpack_own(data: bytes, **whose: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The inverse of `pack_own`. Raises ValueError if `whose` differs or the bytes are malformed."""
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
        raise ValueError(f"it is malformed: {error}") from error
