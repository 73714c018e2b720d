"""A keeper's parity: shards of the other members' payloads, fetched, combined and published block by block.

It holds one block per member in memory. Everything it reads is of one identity (step, lineage, members,
layout): each source is opened under that identity once its own keeper has verified it, and asked after the
last block whether it is still the same. What is published is therefore the parity of one step or nothing.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import numpy as np

from everstep import wire
from everstep.snapshot import parity, stripes
from everstep.snapshot.buffer import BufferWriter, Header, SnapshotError, chunk_digests, file_bytes, pack_sections
from everstep.snapshot.peers import open_buffer
from everstep.snapshot.segment import BUFFERS, Kind, Segment, check_room

BLOCK_BYTES = 2 << 20
PATIENCE_S = 0.5  # of one question; it is asked anew until the deadline


class CodingError(RuntimeError):
    """A step whose parity was given up, and why."""


class Coder:
    """Codes one rank's parity buffers."""

    def __init__(
        self,
        segment: Segment,
        rank: int,
        token: bytes,
        address_of: Callable[[int], str | None],
        reserve_bytes: int,
    ) -> None:
        """`address_of`: a group's keeper, or None when none is known."""
        self._segment, self._rank, self._token = segment, rank, token
        self._address_of, self._reserve_bytes = address_of, reserve_bytes
        self._writers = [BufferWriter(segment.file("parity", rank, i)) for i in range(BUFFERS)]

    def code(
        self,
        own: Header,
        timeout: timedelta,
        silence: timedelta,
        held: Callable[[], bool],
        newest: Callable[[], bool],
    ) -> Header:
        """Code and publish what this member holds of the parity over `own`'s step; return when all have.

        Args:
            timeout: the longest wait for the other members to hold the step.
            silence: the longest silence of a keeper during the transfer.
            held: False once the step's own buffer is gone; asked between blocks.
            newest: False once a newer step is published here. Waiting for others ends then: some of them will
                only ever code the newer one.

        Raises:
            CodingError: a member is not there, has gone on, or there is no room.
        """
        others = [group for group in own.members if group != own.group]
        channels: dict[int, wire.Channel] = {}
        deadline = time.monotonic() + timeout.total_seconds()
        group = own.group
        try:
            sources = {own.group: own}
            for group in others:
                channels[group], sources[group] = self._open(group, "data", own, deadline, silence, newest)
            header, table, writer = self._combine(own, sources, channels, held)
            for group in others:
                if not channels[group].ask({"op": "still"})["still"]:
                    raise CodingError(f"group {group} went on to another step")
            published = writer.publish(header, table)
            # Ours is of use only with theirs: until all have it, the step before is the one to fall back on.
            for group in others:
                channels.pop(group).close()
                channels[group], _ = self._open(group, "parity", own, deadline, silence, newest)
            return published
        except (wire.WireError, SnapshotError) as error:
            raise CodingError(f"group {group}: {error}") from error
        finally:
            for channel in channels.values():
                channel.close()

    def _open(
        self,
        group: int,
        kind: Kind,
        own: Header,
        deadline: float,
        silence: timedelta,
        newest: Callable[[], bool],
    ) -> tuple[wire.Channel, Header]:
        while True:
            left_s = deadline - time.monotonic()
            address = self._address_of(group)
            try:
                if address is None:
                    raise wire.WireError("no keeper is known")
                channel = wire.connect(address, self._token, silence)
            except wire.WireError:
                if left_s <= 0 or not newest():
                    raise
                time.sleep(min(0.2, left_s))  # it may be starting
                continue
            try:
                patience_s = max(0.0, min(left_s, PATIENCE_S))
                sound = kind == "data"
                return channel, open_buffer(channel, kind, own.rank, own.identity, sound=sound, patience_s=patience_s)
            except wire.WireError as error:
                channel.close()
                if (
                    not isinstance(error, wire.RefusedError)
                    or not str(error).startswith("not yet")
                    or left_s <= 0
                    or not newest()
                ):
                    raise

    def _combine(
        self,
        own: Header,
        sources: dict[int, Header],
        channels: dict[int, wire.Channel],
        held: Callable[[], bool],
    ) -> tuple[Header, np.ndarray, BufferWriter]:
        members, m = own.members, own.parity
        n, index = len(members), members.index(own.group)
        length = stripes.shard_bytes([sources[g].payload_bytes for g in members], m)
        covers = json.dumps([sources[g].to_json() for g in members]).encode()
        tail, places = pack_sections({"covers": covers}, m * length)
        size = m * length + len(tail)
        writer = self._writer(size)
        payload = writer.payload(size)
        out = np.frombuffer(payload, dtype=np.uint8)
        block = [parity.aligned_bytes(min(BLOCK_BYTES, length)) for _ in range(n - m)]
        rows = parity.encoding_rows(n - m, m)
        for row in range(m):
            stripe = stripes.stripe_coded_by(index, row, n)
            givers = [members[i] for i in stripes.data_members(stripe, n, m)]
            for start in range(0, length, BLOCK_BYTES):
                if not held():
                    raise CodingError("its buffer was overwritten meanwhile")
                span = min(BLOCK_BYTES, length - start)
                ranges = []
                for column, giver in enumerate(givers):
                    begin = min(column * length + start, sources[giver].payload_bytes)
                    end = min(column * length + start + span, sources[giver].payload_bytes)
                    if end > begin:
                        channels[giver].ask_range(begin, end - begin)
                    ranges.append((begin, end - begin))
                for giver, (begin, count), shard in zip(givers, ranges, block, strict=True):
                    shard[count:span] = 0
                    if count:
                        channels[giver].receive_range(wire.Pieces([shard[:count].data]), begin, count, base=begin)
                target = out[row * length + start : row * length + start + span]
                parity.combine([rows[row]], [shard[:span] for shard in block], [target])
        payload[m * length :] = tail
        header = replace(
            own,
            kind="parity",
            part=(0, 0),
            sections={"shards": (0, m * length), **places},
            payload_bytes=size,
            taken_at=time.time(),
            root="",
        )
        return header, chunk_digests(payload), writer

    def _writer(self, size: int) -> BufferWriter:
        """The buffer that holds the older parity, emptied, with room for `size` bytes."""
        held = self._segment.headers("parity", self._rank)
        index = min(range(BUFFERS), key=lambda i: -1 if (header := held[i]) is None else header.sequence)
        writer = self._writers[index]
        if writer.capacity < size:
            check_room(self._segment.path, file_bytes(size) - file_bytes(writer.capacity), self._reserve_bytes)
        writer.reserve(size)
        writer.begin()
        return writer
