"""How one rank's tensors lie end to end in a snapshot's state."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from everstep.snapshot.header import topology_of
from everstep.snapshot.stripes import ALIGNMENT


@dataclass(frozen=True)
class Shard:
    """Which box of a larger tensor a local shard is."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Of the shard's first element in it."""


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the state; a multiple of 64."""
    shard: Shard | None = None
    """None: the tensor is whole."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Names, dtypes, shapes and places. Sorted by dtype and name, so that equal states have equal layouts and
    tensors of one dtype can be copied as one."""

    entries: tuple[Entry, ...]
    size: int
    """Bytes of the state."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard] | None = None) -> "Layout":
        """The layout of these local tensors."""
        kinds = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
        return cls.of_entries(kinds, shards)

    @classmethod
    def of_entries(
        cls, kinds: Mapping[str, tuple[str, tuple[int, ...]]], shards: Mapping[str, Shard] | None = None
    ) -> "Layout":
        """The layout of tensors of these dtypes and shapes."""
        entries, at = [], 0
        for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (item[1][0], item[0])):
            entry = Entry(name, dtype, shape, at, (shards or {}).get(name))
            entries.append(entry)
            at += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(entries), at)

    def topology(self, rank: int, ranks: int) -> str:
        """`header.topology_of` it."""
        return topology_of(self.to_json(), rank, ranks)

    def to_json(self) -> dict[str, Any]:
        return {"size": self.size, "entries": [asdict(entry) for entry in self.entries]}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Layout":
        entries = []
        for entry in body["entries"]:
            shard = entry["shard"] and Shard(tuple(entry["shard"]["shape"]), tuple(entry["shard"]["offset"]))
            entries.append(Entry(entry["name"], entry["dtype"], tuple(entry["shape"]), entry["offset"], shard))
        return cls(tuple(entries), body["size"])

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors as views of a flat uint8 state whose memory is aligned to 64 bytes."""
        return {e.name: flat[e.offset : e.offset + e.nbytes].view(e.torch_dtype).view(e.shape) for e in self.entries}

    def pieces(self, begin: int, end: int) -> list[tuple[Entry, int, int]]:
        """What [begin, end) of the state holds: entries, each with its first and last + 1 byte in the range.

        `begin` and `end` must be multiples of 64 (or the state's end), so that no element is cut.
        """
        found = []
        for entry in self.entries:
            start, stop = max(begin - entry.offset, 0), min(end - entry.offset, entry.nbytes)
            if start < stop:
                found.append((entry, start, stop))
        return found


def buckets(pieces: Iterable[tuple[Entry, int, int]], limit_bytes: int) -> list[list[tuple[Entry, int, int]]]:
    """Pieces in order, cut into runs of one dtype and at most `limit_bytes` (or one larger piece, itself
    cut)."""
    cut = [
        (entry, at, min(at + limit_bytes, stop))
        for entry, start, stop in pieces
        for at in range(start, stop, limit_bytes)
    ]
    runs: list[list[tuple[Entry, int, int]]] = []
    for dtype, run in itertools.groupby(cut, key=lambda piece: piece[0].dtype):
        del dtype
        begin = None
        for entry, start, stop in run:
            if begin is None or entry.offset + stop - begin > limit_bytes:
                runs.append([])
                begin = entry.offset + start
            runs[-1].append((entry, start, stop))
    return runs
