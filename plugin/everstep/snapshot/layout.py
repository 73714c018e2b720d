"""How one rank's tensors lie end to end in a flat state, and how that state is restored into groups of another shape.

A layout says which box of the whole tensor each shard is. To restore into groups of another shape (other numbers of
ranks, other meshes), a rank copies the intersections of its boxes with those of each saved rank, tensor by tensor. A
tensor that is not sharded is a box like any other. Pipeline stages need nothing more, as their tensors' names differ.

A `CopyPlan` copies and checksums the part of the state that one member, a group that shares the snapshot, stores. On a
CPU, each MiB is hashed in the trainer's tensors and then copied while it is in the cache. From a device, the part is
first copied to page-locked memory, on a separate stream, and hashed there; the trainer need not wait for the hashing.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.quorum.streams import Event, Streams, copy_to_host, page_locked
from everstep.run import typed
from everstep.snapshot import parity
from everstep.snapshot.buffer import CHUNK_BYTES, as_table, chunk_digests, chunks
from everstep.snapshot.parity import ALIGNMENT, part_bounds


@dataclass(frozen=True)
class Shard:
    """Where in a whole tensor a local shard begins."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offset: tuple[int, ...]
    """Index of the shard's first element in the whole tensor."""


@dataclass(frozen=True)
class Entry:
    """One local tensor of a layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the state; a multiple of 64."""
    shard: Shard | None = None
    """None if the tensor is not sharded."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Names, dtypes, shapes and offsets of tensors, sorted by dtype and name: equal states have equal layouts."""

    entries: tuple[Entry, ...]
    size: int
    """Size of the state in bytes."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard] | None = None) -> "Layout":
        """Return the layout of these local tensors."""
        entries, at = [], 0
        kinds = [(str(t.dtype).removeprefix("torch."), name, tuple(t.shape)) for name, t in tensors.items()]
        for dtype, name, shape in sorted(kinds):
            entry = Entry(name, dtype, shape, at, (shards or {}).get(name))
            entries.append(entry)
            at += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), at)

    def topology(self, rank: int, ranks: int) -> str:
        """Return a digest of layout, rank and number of ranks: equal ones are restored without reshaping."""
        return xxhash.xxh3_128_hexdigest(json.dumps([rank, ranks, self.to_json()], sort_keys=True).encode())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Any) -> "Layout":
        """The inverse of `to_json`. Raises ValueError."""
        return typed.parse(cls, body, "a layout")

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors as views of a flat uint8 state whose memory is aligned to 64 bytes."""
        return {e.name: flat[e.offset : e.offset + e.nbytes].view(e.torch_dtype).view(e.shape) for e in self.entries}

    def pieces(self, begin: int, end: int) -> list[tuple[Entry, int, int]]:
        """Return what lies in bytes [begin, end) of the state: entries, each with the first and last + 1 of its bytes.

        `begin` and `end` must be multiples of 64 (or the state's end), so that no element is cut.
        """
        found = []
        for entry in self.entries:
            start, stop = max(begin - entry.offset, 0), min(end - entry.offset, entry.nbytes)
            if start < stop:
                found.append((entry, start, stop))
        return found


Box = tuple[tuple[int, int], ...]
"""First and last + 1 index in each dimension of the whole tensor."""


class ShapeError(ValueError):
    """The saved shards do not make up the needed state. The message names the tensor."""


def box_of(entry: Entry) -> Box:
    """Return the box of the whole tensor that a local tensor is."""
    offset = entry.shard.offset if entry.shard else (0,) * len(entry.shape)
    return tuple((o, o + n) for o, n in zip(offset, entry.shape, strict=True))


def whole_shape(entry: Entry) -> tuple[int, ...]:
    """Return the shape of the tensor of which a local tensor is a shard."""
    return entry.shard.shape if entry.shard else entry.shape


def volume(box: Box) -> int:
    return math.prod(max(0, end - begin) for begin, end in box)


def intersection(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


@dataclass
class Reshaped:
    """One rank's state while it is assembled from states of saved ranks."""

    layout: Layout
    """Layout of the rank that needs the state."""
    flat: np.ndarray = field(init=False)
    _done: dict[str, list[Box]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flat = parity.aligned_bytes(self.layout.size)
        self._views = self.layout.views(torch.from_numpy(self.flat))

    def take(self, layout: Layout, flat: np.ndarray) -> None:
        """Copy what a saved rank holds of this state. Raises ShapeError if dtypes, shapes or shards do not fit."""
        views = layout.views(torch.from_numpy(flat))
        saved = {entry.name: entry for entry in layout.entries}
        for entry in self.layout.entries:
            source = saved.get(entry.name)
            if source is None:
                continue
            if (source.dtype, whole_shape(source)) != (entry.dtype, whole_shape(entry)):
                was = f"{source.dtype} {whole_shape(source)}"
                raise ShapeError(f"{entry.name} is {entry.dtype} {whole_shape(entry)} here, and {was} in the snapshot")
            mine, theirs = box_of(entry), box_of(source)
            common = intersection(mine, theirs)
            done = self._done.setdefault(entry.name, [])
            if volume(common) == 0 or common in done:
                continue
            if any(volume(intersection(common, box)) for box in done):
                raise ShapeError(f"shards of {entry.name} overlap")
            target = self._views[entry.name][_slices(common, mine)]
            target.copy_(views[entry.name][_slices(common, theirs)])
            done.append(common)

    def finish(self) -> np.ndarray:
        """Return the state. Raises ShapeError if the saved ranks taken so far did not hold all of it."""
        for entry in self.layout.entries:
            need, have = volume(box_of(entry)), sum(map(volume, self._done.get(entry.name, [])))
            if have != need:
                raise ShapeError(f"the saved shards of {entry.name} make up {have} elements of {need}")
        return self.flat


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, within, strict=True))


VOLATILE = "buffer/"
"""Prefix of the names of tensors that the next forward pass may change. `Copier.committed` copies them at once."""
_ZEROS = np.zeros(ALIGNMENT, dtype=np.uint8)


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
    """Name -> which box of the whole tensor the shard is; needed to restore into groups of another shape."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors that are not host scalars."""
        return next((t.device for t in self.tensors.values() if t.device.type != "cpu"), torch.device("cpu"))


class CopyPlan:
    """The bytes of each tensor that one member copies. Made again when tensors or members change."""

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
            views = {name: t.detach().view(-1).view(torch.uint8).numpy() for name, t in state.tensors.items()}
            self._chunks = [self._pieces(views, begin + a, begin + b) for a, b in chunks(end - begin)]
        else:
            self._staging = page_locked(end - begin)
            self._chunks = [[self._staging[a:b].numpy()] for a, b in chunks(end - begin)]

    @staticmethod
    def _key_of(state: State, members: tuple[int, ...]) -> tuple:
        tensors = state.tensors
        return members, tuple(tensors), tuple(t.data_ptr() for t in tensors.values())

    def fits(self, state: State, members: tuple[int, ...]) -> bool:
        """Whether tensors (by address) and members are still those that this plan was made for."""
        return self._key == self._key_of(state, members)

    def _pieces(self, views: Mapping[str, np.ndarray], begin: int, end: int) -> list[np.ndarray]:
        """Return bytes [begin, end) of the state as arrays that follow each other, with zeros in alignment gaps."""
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
        """Copy this member's part and then `tail` to `whole`, uint8 [part + tail]. Returns the chunk table.

        Args:
            ready: event on the compute stream that a copy from a device waits for.
            copied: called as soon as the tensors may change; possibly twice.
        """
        size = self.part[1] - self.part[0]
        whole[size:] = np.frombuffer(tail, dtype=np.uint8)
        if self._staging is not None:
            copy_to_host(self._to_stage(self._staging), streams, ready)
            copied()
        digests = []
        for (begin, end), pieces in zip(chunks(size), self._chunks, strict=True):
            digest, at = xxhash.xxh3_64(), begin
            for piece in pieces:
                digest.update(piece.data)
            for piece in pieces:
                np.copyto(whole[at : at + len(piece)], piece)
                at += len(piece)
            digest.update(whole[end : begin + CHUNK_BYTES].data if end == size else b"")  # tail begins in this chunk
            digests.append(digest.intdigest())
        copied()
        return np.concatenate([as_table(digests), chunk_digests(whole[len(digests) * CHUNK_BYTES :].data)])

    def _to_stage(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each piece of a tensor in this part, with its place in the staging memory."""
        for entry, start, stop in self.layout.pieces(*self.part):
            at = entry.offset + start - self.part[0]
            yield (
                self._tensors[entry.name].detach().view(-1).view(torch.uint8)[start:stop],
                staging[at : at + stop - start],
            )
