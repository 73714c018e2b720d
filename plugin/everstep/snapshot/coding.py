"""A keeper's parity: shards of its parity group's payloads, fetched, combined and published block by block.

Whoever has verified its part tells the others of its parity group. The lowest group among those that have spoken
chooses the code: over all parts, as soon as all are there; after a grace, or when the others are suspects, over some.
A member that comes later is taken in by another code over the same step, and what its peers have meanwhile is theirs
without it. Every piece names the exact payloads that it is over, so that pieces of two codes are never mixed.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from everstep import wire
from everstep.snapshot import parity
from everstep.snapshot.board import Board, Channels, Heard, code_message
from everstep.snapshot.buffer import BufferWriter, SnapshotError, chunk_digests
from everstep.snapshot.header import Header, difference
from everstep.snapshot.peers import open_buffer
from everstep.snapshot.room import BLOCK_BYTES, make_room
from everstep.snapshot.segment import Segment
from everstep.snapshot.stripes import Code, code_id, effective_parity

WAIT_S = 0.25
TELL_AGAIN_S = 1.0
"""Between two tellings of a part: to all members until a code is whole, then to those that have not been heard of."""
PEER_SILENT_S = 3.0
"""Longest silence of another keeper while its shards are fetched."""


class CodingError(RuntimeError):
    """A piece of a code that could not be made, and why."""

    def __init__(self, message: str, group: int | None = None) -> None:
        super().__init__(message)
        self.group = group
        """Whose fault it is."""


class Coder:
    """Codes one rank's parity buffers."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        board: Board,
        channels: Channels,
        reserve_bytes: int,
        turn: threading.Lock,
        over: threading.Event,
    ) -> None:
        """`turn`: held while shards are fetched and combined: a keeper's ranks code one after the other, so that the
        memory and connections of one are enough."""
        self._segment, self._rank, self._board, self._channels = segment, rank, board, channels
        self._reserve_bytes, self._turn, self._over = reserve_bytes, turn, over
        self._writers = [BufferWriter(path) for path in segment.files("parity", rank)]
        self._whole_codes: set[str] = set()
        self._failed: dict[str, float] = {}
        self.worked_s = 0.0
        """In all, on making pieces."""

    def code(
        self,
        own: Header,
        timeout: timedelta,
        newest: Callable[[], bool],
        note: Callable[..., None],
    ) -> None:
        """Have `own` coded, with all of its parity group or with those that are there, and go on until all are in it
        or a newer snapshot is published here.

        Args:
            timeout: after this long without parity it is given up, and noted; coding goes on all the same.
            newest: False once a newer step is published here.
            note: tells the trainer; gets `coded`, `settled` and `reason`.
        """
        group, began = own.parity_group, time.monotonic()
        deadline, grace = began + timeout.total_seconds(), began + timeout.total_seconds() / 3
        with self._board.changed:
            heard = self._board.of(self._rank, own.identity)
            pieces = [piece for piece in self._segment.headers("parity", self._rank) if piece]
            for piece in pieces:
                if piece.identity == own.identity:  # of this keeper's life before
                    heard.coded.setdefault(piece.code, set()).add(own.group)
            self._whole_codes &= {piece.code for piece in pieces} | {name for _, _, name in heard.codes.values()}
            self._failed.clear()
        told, settled, whole, why = 0.0, False, False, "no parity yet"
        while newest() and not self._over.is_set():
            now = time.monotonic()
            with self._board.changed:
                heard = self._board.of(self._rank, own.identity)
                heard.parts[own.group] = own  # each time: what is heard of too many others displaces it
                absent = [g for g in group if g not in heard.parts]
                parts = list(heard.parts.values())
            if now - told > TELL_AGAIN_S:
                # Answers bring what others have told and was lost: to a keeper that was just starting, for one.
                self._tell_part(own, absent if whole else group)
                told = now
            differing = difference(parts)
            if differing:
                # Not for coding: no such snapshot is ever restored. The trainers overwrite it with the next.
                note(sound=False, coded=False, settled=True, reason=f"{differing}: one of them is wrong")
                return
            chosen = self._choose(own, heard, patient=now < grace)
            if chosen is not None:
                code, name = chosen
                with self._board.changed:
                    mine = own.group not in code.holders or own.group in heard.coded.get(name, ())
                    known = all(giver in heard.parts for giver in code.givers)
                    done = set(code.holders) <= heard.coded.get(name, set())
                if known and not mine and now - self._failed.get(name, -TELL_AGAIN_S) >= TELL_AGAIN_S:
                    why = self._make(own, code, name, heard, newest)
                    continue
                if done and own.group in code.givers:
                    self._whole_codes.add(name)
                    whole = True
                    if not settled or why:
                        settled, why = True, ""
                        note(coded=True, settled=True, reason="")
                    if set(code.givers) == set(group):
                        return
                elif not done:
                    lacking = set(code.holders) - heard.coded.get(name, set())
                    why = why or f"no parity yet of {_named(lacking)}"
            if now > deadline and not settled:
                settled = True
                note(settled=True, reason=self._reason(own, absent, why))
            with self._board.changed:
                self._board.changed.wait(WAIT_S)

    def drop(self, path: Path, header: Header) -> None:
        """Forget a piece of parity that turned out damaged, so that it is made again."""
        writer = next(writer for writer in self._writers if writer.path == path)
        writer.reserve(header.payload_bytes)
        writer.begin()
        with self._board.changed:
            for groups in self._board.of(self._rank, header.identity).coded.values():
                groups.discard(header.group)

    def _reason(self, own: Header, absent: list[int], why: str) -> str:
        if absent:
            return f"nothing is heard of {_named(set(absent))}"
        return why or f"the parity of step {own.step} is not complete"

    def _tell_part(self, own: Header, groups: list[int] | tuple[int, ...]) -> None:
        with self._board.changed:
            roomless = own.group in self._board.of(self._rank, own.identity).roomless
        message = {"op": "part", "rank": self._rank, "identity": list(own.identity), "header": own.to_json()}
        back = lambda group, answer: self._board.heard_back(self._rank, own.identity, group, answer)  # noqa: E731
        self._board.tell(groups, {**message, "roomless": roomless}, back)

    def _choose(self, own: Header, heard: Heard, patient: bool) -> tuple[Code, str] | None:
        """The code to use, chosen here if it is this group's turn to choose."""
        suspects = self._board.suspects()
        with self._board.changed:
            there = sorted(g for g in own.parity_group if g in heard.parts and (g not in suspects or g == own.group))
            awaited = [g for g in own.parity_group if g not in heard.parts and g not in suspects]
            holders = [g for g in there if g not in heard.roomless]
            current = heard.code(suspects)
            if there[0] != own.group or (awaited and patient) or len(holders) < 2:
                return current
            code = Code(tuple(there), tuple(holders), effective_parity(len(holders), own.parity))
            roots = {g: heard.parts[g].root for g in there}
            name = code_id(code, roots)
            known = heard.codes.get(own.group)
            if known is not None and (
                known[2] == name or (set(there) < set(known[1].givers) and not self._lost(known))
            ):
                return current
            heard.codes[own.group] = ((known[0] if known else 0) + 1, code, name)
            number = heard.codes[own.group][0]
            current = heard.code(suspects)
        message = {"op": "code", "rank": self._rank, "identity": list(own.identity)}
        self._board.tell(own.parity_group, {**message, **code_message(own.group, number, code, name)})
        return current

    def _lost(self, known: tuple[int, Code, str]) -> bool:
        """Whether a code that was chosen cannot be finished: one of its givers does not answer any more."""
        return bool(set(known[1].givers) & self._board.suspects()) and known[2] not in self._whole_codes

    def _make(self, own: Header, code: Code, name: str, heard: Heard, newest: Callable[[], bool]) -> str:
        """Make and publish this group's piece of a code. Returns why it could not, or ""."""
        with self._board.changed:
            sources = {giver: heard.parts.get(giver) for giver in code.givers}
        try:
            if name != code_id(code, {g: h.root if h else "" for g, h in sources.items()}):
                raise CodingError("the parts that its code is over are not known here yet")
            known = {giver: header for giver, header in sources.items() if header is not None}
            with self._turn:
                begun = time.monotonic()
                try:
                    self._combine(own, code, name, known, newest)
                finally:
                    self.worked_s += time.monotonic() - begun
        except SnapshotError as error:
            with self._board.changed:
                heard.roomless.add(own.group)
            self._failed[name] = time.monotonic()
            self._tell_part(own, own.parity_group)
            return str(error)
        except CodingError as error:
            self._failed[name] = time.monotonic()
            return str(error)
        with self._board.changed:
            heard.coded.setdefault(name, set()).add(own.group)
        message = {"op": "coded", "rank": self._rank, "identity": list(own.identity), "group": own.group, "name": name}
        back = lambda group, answer: self._board.heard_back(self._rank, own.identity, group, answer)  # noqa: E731
        self._board.tell(own.parity_group, message, back)
        return ""

    def _combine(
        self, own: Header, code: Code, name: str, sources: dict[int, Header], newest: Callable[[], bool]
    ) -> None:
        m, length = code.parity, code.shard_bytes({g: h.payload_bytes for g, h in sources.items()})
        covers = json.dumps([sources[giver].to_json() for giver in code.givers]).encode()
        size = m * length + len(covers)
        writer = self._writer(own, code, size)
        payload = writer.payload(size)
        out = np.frombuffer(payload, dtype=np.uint8)
        stripes = [code.stripe_coded_by(own.group, row) for row in range(m)]
        givers = sorted({giver for stripe in stripes for giver in code.columns(stripe)})
        block = [parity.aligned_bytes(min(BLOCK_BYTES, length)) for _ in range(len(code.givers))]
        channels: dict[int, wire.Channel] = {}
        giver = own.group
        try:
            for giver in givers:
                channels[giver] = self._channels.take(giver)
                channels[giver].set_timeout(timedelta(seconds=PEER_SILENT_S))
                open_buffer(channels[giver], sources[giver])
            for row, stripe in enumerate(stripes):
                columns = code.columns(stripe)
                rows = parity.encoding_rows(len(columns), m)
                first = {giver: code.stripes_of(giver).index(stripe) * length for giver in columns}
                for start in range(0, length, BLOCK_BYTES):
                    if not newest():
                        raise CodingError("a newer step was published meanwhile")
                    span, ranges = min(BLOCK_BYTES, length - start), {}
                    for giver in columns:
                        limit = sources[giver].payload_bytes
                        begin, end = min(first[giver] + start, limit), min(first[giver] + start + span, limit)
                        ranges[giver] = (begin, end - begin)
                        if end > begin:
                            channels[giver].ask_range(begin, end - begin)
                    for giver, shard in zip(columns, block, strict=False):
                        begin, count = ranges[giver]
                        shard[count:span] = 0
                        if count:
                            channels[giver].receive_range(wire.Pieces([shard[:count].data]), begin, count, base=begin)
                    target = out[row * length + start : row * length + start + span]
                    parity.combine([rows[row]], [shard[:span] for shard in block[: len(columns)]], [target])
            for giver in givers:
                if not channels[giver].ask({"op": "still"}).get("still"):
                    raise CodingError(f"group {giver} went on to another step", giver)
            for giver in givers:
                self._channels.give(channels.pop(giver))
        except wire.WireError as error:
            raise CodingError(f"group {giver}: {error}", giver) from error
        finally:
            for channel in channels.values():  # after a failure answers may still be due on them
                channel.close()
        payload[m * length :] = covers
        header = replace(
            own,
            kind="parity",
            part=(0, 0),
            part_digest="",
            witness=(0, 0),
            witness_digest="",
            parity=m,
            code=name,
            givers=code.givers,
            holders=code.holders,
            sections={"shards": (0, m * length), "covers": (m * length, size)},
            payload_bytes=size,
            taken_at=time.time(),
            root="",
        )
        writer.publish(header, chunk_digests(payload))

    def _writer(self, own: Header, code: Code, size: int) -> BufferWriter:
        """A parity buffer, emptied, with room for `size` bytes.

        Not one that protects something: a piece of an older snapshot that is held here, or of this one by a code that
        may be whole elsewhere. So a step that is coded again, because a member came late or is lost, has a third
        buffer. Where there is no room for one, a code that takes in more may overwrite the one that it replaces.

        Raises:
            SnapshotError: there is no room for one.
        """
        held = self._segment.headers("parity", self._rank)
        data = {header.identity for header in self._segment.headers("data", self._rank) if header}
        *first, spare = (
            header is None or header.identity not in data or self._replaced(header, held) for header in held
        )
        if any(first):
            if spare:
                self._writers[-1].release()
                self._writers[-1].path.unlink(missing_ok=True)
            return self._emptied(self._writers[first.index(True)], size)
        fewer = {}
        for index, header in enumerate(held):
            if header is not None and header.identity == own.identity:
                whole = header.code in self._whole_codes
                if set(header.givers) < set(code.givers) or (not whole and set(header.givers) == set(code.givers)):
                    fewer[index] = (whole, len(header.givers))
        if spare:
            try:
                return self._emptied(self._writers[-1], size)
            except SnapshotError:
                if not fewer:
                    raise
        if not fewer:
            raise SnapshotError("there is no parity buffer that protects nothing else")
        return self._emptied(self._writers[min(fewer, key=lambda index: fewer[index])], size)

    def _replaced(self, piece: Header, held: list[Header | None]) -> bool:
        """Whether another code over the same step, a piece of which is held, is whole and protects as much."""
        whole = [h for h in held if h is not None and h.identity == piece.identity and h.code in self._whole_codes]
        mine = set(piece.givers)
        return any(mine < set(h.givers) for h in whole) or (
            piece.code not in self._whole_codes and any(mine == set(h.givers) for h in whole)
        )

    def _emptied(self, writer: BufferWriter, size: int) -> BufferWriter:
        if writer.capacity < size:
            held_bytes = self._segment.bytes_of(self._rank)
            total = held_bytes + size - writer.capacity
            make_room(self._segment.root, self._segment.path, self._rank, total, held_bytes, self._reserve_bytes)
        writer.reserve(size)
        writer.begin()
        return writer


def _named(groups: set[int]) -> str:
    return ("group " if len(groups) == 1 else "groups ") + ", ".join(map(str, sorted(groups)))
