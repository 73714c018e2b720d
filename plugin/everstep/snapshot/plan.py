"""What is copied of a state, and how: one member's part, with checksums of the trainer's own bytes.

On a CPU every MiB is hashed where it lies in the trainer's tensors and then copied, while it is in the cache. A copy
that differs, because the memory is bad or somebody changed a tensor meanwhile, does not match: the keeper finds it.
On a device the bytes are gathered there, summed there, copied, and summed again in host memory.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.snapshot import private, stripes
from everstep.snapshot.buffer import SnapshotError, as_table, chunk_digests, chunks, root_of
from everstep.snapshot.layout import Entry, Layout, Shard, buckets
from everstep.snapshot.section import Snapshot

BUCKET_BYTES = 32 << 20
STAGING_BUFFERS = 2
VOLATILE = "buffer/"
"""Names of tensors that the next forward may change: they are set aside before a commit returns."""
_ZEROS = np.zeros(stripes.ALIGNMENT, dtype=np.uint8)


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


@dataclass(frozen=True)
class Copied:
    """What a copy says of the bytes in the trainer's memory."""

    table: np.ndarray
    """Digests of the part's chunks."""
    part_digest: str
    witness_digest: str


class Plan:
    """Which bytes of which tensors go where; made anew when tensors or members change."""

    def __init__(
        self,
        state: State,
        members: tuple[int, ...],
        group: int,
        rank: int,
        ranks: int,
        settings: Snapshot,
        locations: Mapping[int, int],
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
        self.parity_group = stripes.parity_group(members, settings.parity_group, group, locations)
        self.parity = 0 if full else stripes.effective_parity(len(self.parity_group), settings.parity)
        whole = (0, self.layout.size)
        self.part = whole if full else stripes.part_bounds(self.layout.size, count, index)
        # The part of the next in the parity group, whose keepers see each other's headers. With whole copies every
        # group's digest is of the same bytes already.
        after = self.parity_group[(self.parity_group.index(group) + 1) % len(self.parity_group)]
        alone = full or after == group
        self.witness = (0, 0) if alone else stripes.part_bounds(self.layout.size, count, members.index(after))
        self._key = self._key_of(state, members, settings, locations)
        self._tensors = state.tensors
        self._device = next((t.device for t in state.tensors.values() if t.is_cuda), None)
        self._chunks: list[list[np.ndarray]] = []
        self._witnessed: list[list[np.ndarray]] = []
        if self._device is None:
            views = {name: _bytes_of(tensor) for name, tensor in state.tensors.items()}
            self._chunks = [self._pieces(views, *span) for span in _spans(self.part)]
            self._witnessed = [self._pieces(views, *span) for span in _spans(self.witness)]
        self._stager: _Stager | None = None

    @staticmethod
    def _key_of(state: State, members: tuple[int, ...], settings: Snapshot, locations: Mapping[int, int]) -> tuple:
        tensors = state.tensors
        where = tuple(tensors), tuple(t.data_ptr() for t in tensors.values())
        return members, settings.scope, *where, tuple(sorted(locations.items()))

    def fits(self, state: State, members: tuple[int, ...], settings: Snapshot, locations: Mapping[int, int]) -> bool:
        """Whether it is still these tensors and members that it was made for."""
        return self._key == self._key_of(state, members, settings, locations)

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

    def copy(self, payload: torch.Tensor, ready: "torch.cuda.Event | None", pause: Callable[[int], None]) -> Copied:
        """Copy this member's part to the beginning of `payload`, uint8. Returns when every byte is there.

        Args:
            ready: what a copy from a device must come after; recorded on the compute stream.
            pause: told how many bytes have just been read or written; sleeps as the bandwidth limit demands.
        """
        if self._device is not None:
            assert ready is not None
            self._stager = self._stager or _Stager(self._device)
            return self._stager.copy(self, self._tensors, payload, ready)
        target, at, digests = payload.numpy(), 0, []
        for pieces in self._chunks:
            begin = at
            digests.append(_digest(pieces))
            for piece in pieces:
                np.copyto(target[at : at + len(piece)], piece)
                at += len(piece)
            pause(2 * (at - begin))
        seen = []
        for pieces in self._witnessed:
            seen.append(_digest(pieces))
            pause(sum(map(len, pieces)))
        table = as_table(digests)
        witness = f"xxh3:{root_of(as_table(seen))}" if self.witness != (0, 0) else ""
        return Copied(table, f"xxh3:{root_of(table)}", witness)


def meta_digest(meta: Mapping[str, Any]) -> str:
    """Of what is the same in all groups beside tensors."""
    return hashlib.blake2b(json.dumps(meta, sort_keys=True).encode(), digest_size=8).hexdigest()


def part_digest_of(part: memoryview, claimed: str) -> str:
    """The digest of a part's bytes, of the kind that `claimed` is. Raises ValueError for an unknown kind."""
    kind = claimed.partition(":")[0]
    if kind == "xxh3":
        return f"xxh3:{root_of(chunk_digests(part))}"
    if kind == "sum":
        return f"sum:{WordSums.of(torch.from_numpy(np.frombuffer(part, dtype=np.uint8)))}"
    raise ValueError(f"a part's digest of kind '{kind}'")


def _spans(part: tuple[int, int]) -> list[tuple[int, int]]:
    return [(part[0] + a, part[0] + b) for a, b in chunks(part[1] - part[0])]


def _digest(pieces: list[np.ndarray]) -> int:
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0].data)
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    return digest.intdigest()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).view(torch.uint8).numpy()


class Throttle:
    """Keeps a thread's memory traffic below a rate, by sleeping."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._due = bytes_per_s, time.monotonic()

    def __call__(self, nbytes: int) -> None:
        if self._rate <= 0:
            return
        now = time.monotonic()
        self._due = max(self._due, now - 0.005) + nbytes / self._rate
        if self._due > now + 0.001:
            time.sleep(self._due - now)


class _Stager:
    """Copies from a device through two staging buffers there, so that one is filled while the other travels."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=device) for _ in range(STAGING_BUFFERS)]

    def copy(
        self, plan: Plan, tensors: Mapping[str, torch.Tensor], payload: torch.Tensor, ready: torch.cuda.Event
    ) -> Copied:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            part = self._gather(plan, tensors, plan.part, payload)
            witness = self._gather(plan, tensors, plan.witness, None)
        self._stream.synchronize()
        size = plan.part[1] - plan.part[0]
        found = WordSums.of(payload[:size])
        if found != part:
            raise SnapshotError("the copy from the device differs from what the device holds")
        table = chunk_digests(payload[:size].numpy().data)
        return Copied(table, f"sum:{part}", f"sum:{witness}" if plan.witness != (0, 0) else "")

    def _gather(
        self, plan: Plan, tensors: Mapping[str, torch.Tensor], span: tuple[int, int], payload: torch.Tensor | None
    ) -> str:
        """Gather a range of the state bucket by bucket; sum each on the device and, with a payload, copy it there."""
        sums = WordSums()
        for number, start in enumerate(range(span[0], span[1], BUCKET_BYTES)):
            end = min(start + BUCKET_BYTES, span[1])
            staging = self._staging[number % STAGING_BUFFERS][: end - start]
            staging.zero_()  # the alignment gaps
            for run in buckets(plan.layout.pieces(start, end), BUCKET_BYTES):
                places = [_place(staging, start, *piece) for piece in run]
                sources = [_source(tensors[entry.name], a, b) for entry, a, b in run]
                on_device = [(p, s) for p, s in zip(places, sources, strict=True) if s.is_cuda]
                if on_device:
                    private.copy_each([p for p, _ in on_device], [s for _, s in on_device])
                for place, source in zip(places, sources, strict=True):
                    if not source.is_cuda:  # host scalars, such as an optimizer's step counters
                        place.copy_(source)
            sums.add(staging, start - span[0])
            if payload is not None:
                payload[start - span[0] : end - span[0]].copy_(staging, non_blocking=True)
        return str(sums)


def _place(staging: torch.Tensor, start: int, entry: Entry, a: int, b: int) -> torch.Tensor:
    return staging[entry.offset + a - start : entry.offset + b - start].view(entry.torch_dtype)


def _source(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The elements of a contiguous tensor that lie in bytes [start, stop)."""
    size = tensor.dtype.itemsize
    return tensor.detach().view(-1)[start // size : stop // size]


class WordSums:
    """Two sums modulo 2^64 over the 64-bit words of some bytes, plain and weighted by odd numbers: any changed bit
    changes the second. Taken where the bytes are, bucket by bucket; nothing waits for a device before `str`."""

    def __init__(self) -> None:
        self._found: list[torch.Tensor] = []

    def add(self, data: torch.Tensor, at: int) -> None:
        spare = -data.numel() % 8
        words = torch.nn.functional.pad(data, (0, spare)).view(torch.int64) if spare else data.view(torch.int64)
        weights = torch.arange(at // 8, at // 8 + words.numel(), device=data.device) * 2 + 1
        self._found.append(torch.stack([words.sum(), (words * weights).sum()]))

    def __str__(self) -> str:
        total, weighted = 0, 0
        for plain, heavy in torch.stack(self._found).tolist() if self._found else ():
            total, weighted = total + plain, weighted + heavy
        return f"{total & (1 << 64) - 1:016x}{weighted & (1 << 64) - 1:016x}"

    @classmethod
    def of(cls, data: torch.Tensor) -> str:
        sums = cls()
        for start in range(0, data.numel(), BUCKET_BYTES):
            sums.add(data[start : start + BUCKET_BYTES], start)
        return str(sums)
