"""What is copied of a state, and how: one member's part, with checksums of the trainer's own bytes.

On a CPU every MiB is hashed where it lies in the trainer's tensors and copied while it is in the cache. From a device
each tensor is copied into page-locked memory on a stream of its own and hashed there, when the trainer waits no more.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.snapshot.buffer import CHUNK_BYTES, BufferWriter, as_table, chunk_digests, chunks
from everstep.snapshot.layout import Layout, Shard
from everstep.snapshot.stripes import ALIGNMENT, part_bounds
from everstep.step.streams import Event, Streams

VOLATILE = "buffer/"
"""Names of tensors that the next forward may change: they are set aside before a commit returns."""
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
        self._chunks: list[list[np.ndarray]] = []
        if state.device.type == "cpu":
            views = {name: _bytes_of(tensor) for name, tensor in state.tensors.items()}
            begin, end = self.part
            self._chunks = [self._pieces(views, begin + a, begin + b) for a, b in chunks(end - begin)]

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
        self, payload: torch.Tensor, tail: bytes, streams: Streams, ready: Event | None, copied: Callable[[], None]
    ) -> np.ndarray:
        """Copy this member's part and after it the tail to the beginning of `payload`, uint8. Returns the chunk table.

        Args:
            ready: what a copy from a device must come after; recorded on the compute stream.
            copied: called as soon as the tensors may change.
        """
        size = self.part[1] - self.part[0]
        whole = payload.numpy()[: size + len(tail)]
        whole[size:] = np.frombuffer(tail, dtype=np.uint8)
        if self._chunks or not size:
            table = self._copy_here(whole)
            copied()
            return table
        whole[:size] = 0  # the alignment gaps
        with streams.of_sums():
            streams.wait(ready)
            for entry, start, stop in self.layout.pieces(*self.part):
                at = entry.offset + start - self.part[0]
                source = self._tensors[entry.name].detach().view(-1).view(torch.uint8)[start:stop]
                payload[at : at + stop - start].copy_(source, non_blocking=True)
            done = streams.record()
        if done is not None:
            done.synchronize()
        copied()
        return chunk_digests(whole.data)

    def _copy_here(self, whole: np.ndarray) -> np.ndarray:
        """Copy the part before the tail that is there already. Returns the table over both."""
        size, digests = self.part[1] - self.part[0], []
        for (begin, end), pieces in zip(chunks(size), self._chunks, strict=True):
            digest, at = xxhash.xxh3_64(), begin
            for piece in pieces:
                digest.update(piece.data)
            for piece in pieces:
                np.copyto(whole[at : at + len(piece)], piece)
                at += len(piece)
            digest.update(whole[end : begin + CHUNK_BYTES].data if end == size else b"")  # the tail begins in a chunk
            digests.append(digest.intdigest())
        return np.concatenate([as_table(digests), chunk_digests(whole[len(digests) * CHUNK_BYTES :].data)])


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _runtime() -> Any:
    return torch.cuda.cudart()


class PinnedBuffer:
    """A buffer's memory as a tensor, page-locked where copies come from a device that can have it so."""

    def __init__(self, writer: BufferWriter) -> None:
        self.writer = writer
        self.unpinned = ""
        """Why the memory is not page-locked though copies come from a device. They work, and take longer."""
        self._registered: int | None = None
        self._tensor: torch.Tensor | None = None

    def reserve(self, size: int, device: torch.device) -> torch.Tensor:
        """The memory for a payload of this size. Raises SnapshotError when there is no room for it."""
        if size > self.writer.capacity:
            self._unregister()  # before the mapping goes
            self._tensor = None
        if self.writer.reserve(size) or self._tensor is None or len(self._tensor) < size:
            self._unregister()
            self._tensor = torch.frombuffer(self.writer.payload(self.writer.capacity), dtype=torch.uint8)
        if device.type == "cuda" and self._registered is None and not self.unpinned:
            self._register(device)
        return self._tensor

    def _register(self, device: torch.device) -> None:
        address, length = self.writer.address
        try:
            # On the rank's own device: in a thread that has none yet, the call would open a context on the first.
            with torch.cuda.device(device):
                code = int(_runtime().cudaHostRegister(address, length, 0))
        except RuntimeError as error:
            self.unpinned = str(error)
            return
        if code:
            self.unpinned = f"cudaHostRegister of {length} bytes failed with error {code}"
        else:
            self._registered = address

    def _unregister(self) -> None:
        if self._registered is not None:
            _runtime().cudaHostUnregister(self._registered)
            self._registered = None

    def release(self) -> None:
        self._unregister()
        self._tensor = None
        self.writer.release()
