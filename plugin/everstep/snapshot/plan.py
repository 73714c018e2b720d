"""What is copied of a state, and how: one member's part, gathered into few large copies."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from everstep.snapshot import stripes
from everstep.snapshot.buffer import SnapshotError
from everstep.snapshot.layout import Entry, Layout, Shard, buckets
from everstep.snapshot.section import Snapshot

BUCKET_BYTES = 32 << 20


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


class Plan:
    """Which bytes of which tensors go where; made anew when tensors or members change."""

    def __init__(
        self, state: State, members: tuple[int, ...], group: int, rank: int, ranks: int, settings: Snapshot
    ) -> None:
        """Raises SnapshotError when the group is none of the members."""
        if group not in members:
            raise SnapshotError(f"group {group} is none of the members {list(members)}")
        self.members = members
        self.layout = Layout.of(state.tensors, state.shards)
        self.layout_json = json.dumps(self.layout.to_json(), separators=(",", ":")).encode()
        self.topology = self.layout.topology(rank, ranks)
        index, count = members.index(group), len(members)
        full = settings.scope == "full"
        self.parity = 0 if full else stripes.effective_parity(count, settings.parity)
        self.part = (0, self.layout.size) if full else stripes.part_bounds(self.layout.size, count, index)
        self._key = self._key_of(state, members, settings)
        self._buckets = buckets(self.layout.pieces(*self.part), BUCKET_BYTES)
        self._sources = [[_source(state.tensors[e.name], a, b) for e, a, b in run] for run in self._buckets]
        self._stream: torch.cuda.Stream | None = None

    @staticmethod
    def _key_of(state: State, members: tuple[int, ...], settings: Snapshot) -> tuple:
        tensors = state.tensors
        return members, settings.scope, tuple(tensors), tuple(t.data_ptr() for t in tensors.values())

    def fits(self, state: State, members: tuple[int, ...], settings: Snapshot) -> bool:
        """Whether it is still these tensors and members that it was made for."""
        return self._key == self._key_of(state, members, settings)

    def copy(self, payload: torch.Tensor, device: torch.device | None, ready: torch.cuda.Event | None) -> None:
        """Copy this member's part to the beginning of `payload`, uint8. Returns when every byte is there.

        `ready`: what a copy from `device` must come after; recorded on the compute stream.
        """
        targets = [[self._target(payload, *piece) for piece in run] for run in self._buckets]
        if device is None:
            for run, sources in zip(targets, self._sources, strict=True):
                torch._foreach_copy_(run, sources)
        else:
            assert ready is not None
            self._copy_from_device(device, ready, payload, targets)

    def _target(self, payload: torch.Tensor, entry: Entry, start: int, stop: int) -> torch.Tensor:
        at = entry.offset - self.part[0]
        return payload[at + start : at + stop].view(entry.torch_dtype)

    def _copy_from_device(
        self, device: torch.device, ready: torch.cuda.Event, payload: torch.Tensor, targets: list[list[torch.Tensor]]
    ) -> None:
        """Gather each bucket on the device, then one copy per bucket to the (pinned) segment, on a stream of
        its own."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        staging = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device)
        from_host: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            staging.record_stream(self._stream)
            for pieces, sources, run in zip(self._buckets, self._sources, targets, strict=True):
                first, last = pieces[0], pieces[-1]
                begin, end = first[0].offset + first[1], last[0].offset + last[2]
                gathered, gathered_from = [], []
                for (entry, a, b), source, target in zip(pieces, sources, run, strict=True):
                    if not source.is_cuda:
                        from_host.append((target, source))
                        continue
                    place = staging[entry.offset + a - begin : entry.offset + b - begin]
                    gathered.append(place.view(entry.torch_dtype))
                    gathered_from.append(source)
                if gathered:
                    torch._foreach_copy_(gathered, gathered_from)
                at = begin - self.part[0]
                payload[at : at + end - begin].copy_(staging[: end - begin], non_blocking=True)
        self._stream.synchronize()
        # Host scalars, such as an optimizer's step counters, go into the holes that the buckets left for
        # them.
        for target, source in from_host:
            target.copy_(source)


def _source(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements of a contiguous tensor that lie in bytes [start, stop)."""
    size = tensor.dtype.itemsize
    return tensor.detach().view(-1)[start // size : stop // size]
