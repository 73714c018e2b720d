"""What is copied of a state, and how: one member's part, with checksums of the trainer's own bytes.

On a CPU every MiB is hashed where it lies in the trainer's tensors and copied while it is in the cache. From a device
the part is copied into page-locked memory first, on a stream of its own; then the trainer waits no more.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.snapshot.buffer import CHUNK_BYTES, as_table, chunk_digests, chunks
from everstep.snapshot.layout import Layout, Shard
from everstep.snapshot.stripes import ALIGNMENT, part_bounds
from everstep.step.streams import Event, Streams

VOLATILE = "buffer/"
"""Names of tensors that the next forward may change: they are set aside before a commit returns."""
_ZEROS = np.zeros(ALIGNMENT, dtype=np.uint8)

log = logging.getLogger("everstep.snapshots")


@dataclass
class State:
    """What a snapshot of one rank carries."""

    tensors: Mapping[str, torch.Tensor]
    """Local shards, contiguous, all on one device (host scalars beside them are fine)."""
    meta: dict[str, Any] = field(default_factory=dict)
    """JSON: counters, learning-rate schedule; the same in all groups."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Byte strings of this rank and group: random states, a dataloader's position."""
    shards: Mapping[str, Shard] | None = None
    """Which boxes of whole tensors the shards are; needed to export a checkpoint."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are that are not host scalars."""
        return next((t.device for t in self.tensors.values() if t.device.type != "cpu"), torch.device("cpu"))


class Plan:
    """Which bytes of which tensors go where; made anew when tensors or members change."""

    def __init__(self, state: State, members: tuple[int, ...], group: int, rank: int, ranks: int) -> None:
        self.layout = Layout.of(state.tensors, state.shards)
        self.layout_json = json.dumps(self.layout.to_json(), separators=(",", ":")).encode()
        self.topology = self.layout.topology(rank, ranks)
        self.part = part_bounds(self.layout.size, len(members), members.index(group))
        self._key = self._key_of(state, members)
        self._tensors = state.tensors
        begin, end = self.part
        self._staging: torch.Tensor | None = None
        if state.device.type == "cpu":
            views = {name: _bytes_of(tensor) for name, tensor in state.tensors.items()}
            self._chunks = [self._pieces(views, begin + a, begin + b) for a, b in chunks(end - begin)]
        else:
            self._staging = _page_locked(end - begin)
            self._chunks = [[self._staging[a:b].numpy()] for a, b in chunks(end - begin)]

    @staticmethod
    def _key_of(state: State, members: tuple[int, ...]) -> tuple:
        tensors = state.tensors
        return members, tuple(tensors), tuple(t.data_ptr() for t in tensors.values())

    def fits(self, state: State, members: tuple[int, ...]) -> bool:
        """Whether it is still these tensors and members that it was made for."""
        return self._key == self._key_of(state, members)

    def _pieces(self, views: Mapping[str, np.ndarray], begin: int, end: int) -> list[np.ndarray]:
        """The bytes [begin, end) of the state as arrays end to end, alignment gaps as zeros."""
        found, at = [], begin
        for entry, start, stop in self.layout.pieces(begin, end):
            gap = entry.offset + start - at
            if gap:
                found.append(_ZEROS[:gap])
            found.append(views[entry.name][start:stop])
            at = entry.offset + stop
        if at < end:
            found.append(_ZEROS[: end - at])
        return found

    def copy(
        self, whole: np.ndarray, tail: bytes, streams: Streams, ready: Event | None, copied: Callable[[], None]
    ) -> np.ndarray:
        """Copy this member's part, and after it the tail, to `whole`, uint8 [part + tail]. Returns the chunk table.

        Args:
            ready: what a copy from a device must come after; recorded on the compute stream.
            copied: called as soon as the tensors may change.
        """
        size = self.part[1] - self.part[0]
        whole[size:] = np.frombuffer(tail, dtype=np.uint8)
        if self._staging is not None:
            self._stage(self._staging, streams, ready)
            copied()
        digests = []
        for (begin, end), pieces in zip(chunks(size), self._chunks, strict=True):
            digest, at = xxhash.xxh3_64(), begin
            for piece in pieces:
                digest.update(piece.data)
            for piece in pieces:
                np.copyto(whole[at : at + len(piece)], piece)
                at += len(piece)
            digest.update(whole[end : begin + CHUNK_BYTES].data if end == size else b"")  # the tail begins in a chunk
            digests.append(digest.intdigest())
        copied()
        return np.concatenate([as_table(digests), chunk_digests(whole[len(digests) * CHUNK_BYTES :].data)])

    def _stage(self, staging: torch.Tensor, streams: Streams, ready: Event | None) -> None:
        """Bring the part to the host, on a stream of its own; returns when it is there."""
        with streams.of_sums():
            streams.wait(ready)
            for entry, start, stop in self.layout.pieces(*self.part):
                at = entry.offset + start - self.part[0]
                source = self._tensors[entry.name].detach().view(-1).view(torch.uint8)[start:stop]
                staging[at : at + stop - start].copy_(source, non_blocking=True)
            done = streams.record()
        if done is not None:
            done.synchronize()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _page_locked(size: int) -> torch.Tensor:
    """Zeros, uint8 [size], to which an accelerator copies by itself if its driver gives such memory; to any other the
    copies take longer."""
    try:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        log.warning("snapshots are copied through memory that is not page-locked: %s", error)
        return torch.zeros(size, dtype=torch.uint8)
