"""A state into groups of another shape: other numbers of ranks, other meshes.

Layouts say which box of a whole tensor each shard is. So what a rank needs is the intersection of its boxes with those
of the ranks that were saved, tensor by tensor and by name; what is whole is a box like any other. Pipeline stages hold
different names, which changes nothing.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from everstep.snapshot import parity
from everstep.snapshot.layout import Entry, Layout

Box = tuple[tuple[int, int], ...]
"""First and last + 1 index in each dimension of the whole tensor."""


class ShapeError(ValueError):
    """Shards that do not make up what is needed; the message names the tensor."""


def box_of(entry: Entry) -> Box:
    """Where a local tensor lies in the whole one."""
    offset = entry.shard.offset if entry.shard else (0,) * len(entry.shape)
    return tuple((o, o + n) for o, n in zip(offset, entry.shape, strict=True))


def whole_shape(entry: Entry) -> tuple[int, ...]:
    return entry.shard.shape if entry.shard else entry.shape


def volume(box: Box) -> int:
    count = 1
    for begin, end in box:
        count *= max(0, end - begin)
    return count


def intersection(one: Box, other: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


@dataclass
class Reshaped:
    """One rank's state as it is put together."""

    layout: Layout
    """Of the rank that needs it."""
    flat: np.ndarray = field(init=False)
    _done: dict[str, list[Box]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flat = parity.aligned_bytes(self.layout.size)
        self._views = self.layout.views(torch.from_numpy(self.flat))

    def take(self, layout: Layout, flat: np.ndarray) -> None:
        """Copy what a saved rank holds of it. Raises ShapeError for tensors of another dtype or whole shape."""
        views = layout.views(torch.from_numpy(flat))
        saved = {entry.name: entry for entry in layout.entries}
        for entry in self.layout.entries:
            source = saved.get(entry.name)
            if source is None:
                continue
            if (source.dtype, whole_shape(source)) != (entry.dtype, whole_shape(entry)):
                was = f"{source.dtype} {whole_shape(source)}"
                raise ShapeError(f"{entry.name} is {entry.dtype} {whole_shape(entry)} here and was {was}")
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
        """The state. Raises ShapeError if anything of it came from nowhere."""
        for entry in self.layout.entries:
            need, have = volume(box_of(entry)), sum(map(volume, self._done.get(entry.name, [])))
            if have != need:
                raise ShapeError(f"the saved shards of {entry.name} make up {have} elements of {need}")
        return self.flat


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, within, strict=True))


def whole_layout(layouts: list[Layout]) -> Layout:
    """The layout of the whole state: every tensor that some rank has a shard of."""
    entries: dict[str, Entry] = {}
    for layout in layouts:
        for entry in layout.entries:
            entries.setdefault(entry.name, entry)
    return Layout.of_entries({name: (entry.dtype, whole_shape(entry)) for name, entry in entries.items()})
