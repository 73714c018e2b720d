"""Transfers the state of living groups (sources) to a group that joins.

A source opens its state after one committed step (`StateServer.serve`). When the first joiner asks, a thread copies
it. Joiners read the copy (`Fetch`) while the source computes on. Before its optimizer changes the state, the source
(`close`) waits until the copy is complete, and admits no more joiners. No group waits for joiners that still read.

A joiner fetches the tensors, which are equal in all groups of one history, from several sources at once, piece by
piece. A faster source gives more pieces, and pieces that a slow, silent or dead source owes are requested from another
one too. The transfer fails when no source is left. Data that differs between sources (positions in the data, states of
workers) comes from a single one.

A transfer consists of a schema (names, dtypes and shapes as JSON), raw tensor bytes, a JSON object and named byte
strings. Nothing is executed on arrival, as a pickle would be. `everstep.wire` seals every chunk with keys of the
connection. A request says what is wanted: the run, rank and layout, the step and its history. The source compares that
before it opens anything, and the joiner compares the answer. A transfer that broke off is not resumed: the next one
starts from the beginning.
"""

import contextlib
import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from everstep import wire
from everstep.quorum.streams import Streams, copy_to_host, page_locked, streams_of
from everstep.run import typed
from everstep.run.memory import room_for
from everstep.run.typed import Count, UnfitError

PURPOSE = "heal"
HOST = torch.device("cpu")
STAGING_BYTES = 4 << 20
"""Bytes of the page-locked buffer through which a device's tensors are copied."""
PIECE_BYTES = 4 << 20
"""Bytes of one request to a source: far more than the request has, and so few that a slow source delays little."""
SOON_S = 0.2
AHEAD = 2
"""Pieces that are requested from a source before the first of them has come, so that its link is never idle."""


@dataclass
class HealState:
    """A rank's state, as a joiner needs it to become equal to the source."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name → local shard, on any device. A DTensor is passed as its local tensor."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Values that JSON can represent, such as counters and schedules."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    """Opaque byte strings, such as random number states and a dataloader's position."""


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a view of a contiguous CPU tensor's memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class _Copy(threading.Thread):
    """A host copy of a state's tensors and blobs, end to end (`wire.Bytes`), made while the trainer computes on. From
    `begin` until `join` returns, the tensors must not change.

    Tensors on a device are copied through page-locked memory, on a separate stream, after the work that was on the
    trainer's stream when the state was opened.

    Args:
        patience_s: longest wait of a reader for bytes that are not copied yet.
    """

    def __init__(self, state: HealState, streams: Streams, patience_s: float) -> None:
        super().__init__(name="heal copy", daemon=True)
        self._sources = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in state.tensors.values()]
        self._blobs = list(map(memoryview, state.blobs.values()))
        self.size = sum(map(len, self._sources)) + sum(map(len, self._blobs))
        self._streams, self._ready = streams, streams.record()
        on_device = any(source.device != HOST for source in self._sources)
        self._staging = page_locked(STAGING_BYTES) if on_device else None
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._pieces = wire.Pieces([])
        self._copied = 0
        """Number of bytes copied so far, from the beginning."""
        self._error = ""

    def begin(self) -> None:
        """Start the copy, unless it has begun."""
        if self.ident is None:
            self.start()

    def run(self) -> None:
        try:
            with room_for(self.size) as has_room:
                if not has_room:
                    raise MemoryError("this host has no memory for a copy")
                # Memory of its own returns to the system afterwards; malloc keeps what another thread frees.
                sizes = [*map(len, self._sources), 1]  # a mapping has at least one byte
                *targets, _ = torch.frombuffer(mmap.mmap(-1, sum(sizes)), dtype=torch.uint8).split(sizes)
                self._pieces = wire.Pieces([*map(_memory_of, targets), *self._blobs])
                for source, target in zip(self._sources, targets, strict=True):
                    self._copy(source, target)
            self._tell(self.size)
        except (MemoryError, RuntimeError, OSError) as error:
            self._tell(0, str(error))
        self._sources.clear()

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        for some, there in zip(source.split(STAGING_BYTES), target.split(STAGING_BYTES), strict=True):
            if self._staging is None:
                there.copy_(some)
            else:
                staged = self._staging[: len(some)]
                copy_to_host([(some, staged)], self._streams, self._ready)
                there.copy_(staged)
            self._tell(self._copied + len(some))

    def _tell(self, copied: int, error: str = "") -> None:
        with self._changed:
            self._copied, self._error = copied, error
            self._changed.notify_all()

    def views(self, offset: int, length: int) -> list[memoryview]:
        """Wait until these bytes are copied, and return views of them. Raises RefusedError."""
        with self._changed:
            self._changed.wait_for(lambda: self._copied >= offset + length or self._error, self._patience_s)
            if self._copied < offset + length:
                reason = self._error or f"this takes longer than {self._patience_s:g} s"
                raise wire.RefusedError(f"the state could not be copied: {reason}")
        return self._pieces.views(offset, length)


@dataclass(frozen=True)
class Wanted:
    """The state that a joiner asks for. `whose`: its run and rank, and how it is sharded over a group's ranks."""

    step: int
    history: int
    whose: str


@dataclass(frozen=True)
class _Schema:
    """The source's answer: describes the bytes that the joiner may read from now on."""

    of: Wanted
    tensors: list[tuple[str, str, list[Count]]]
    blobs: list[tuple[str, Count]]
    meta: dict[str, Any]


def _described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    """Return the tensors' names, dtypes and shapes."""
    return [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]


class StateServer:
    """Serves one rank's state to joiners, in threads, and fetches another group's.

    A request for a step that is not open yet waits for `serve`; a request for an earlier step is refused. So it does
    not matter whether the joiner or its source is ready first.

    Args:
        host: address to listen on, under which joiners reach this rank (fault_tolerance.bind_host).
        token: the run's token.
        timeout: longest silence of the other side, and longest wait of a request for its step to be opened.
        whose: run, rank and sharding of the states that are served and fetched; see `Wanted`.
    """

    def __init__(self, host: str, token: bytes, timeout: timedelta, whose: str = "") -> None:
        self._token, self._timeout = token, timeout
        self._changed = threading.Condition()
        self._of = Wanted(-1, 0, whose)
        """Names the state that is served now or was served last."""
        self._open: tuple[_Copy, _Schema] | None = None
        """The state that is served; None if none is."""
        self._server = wire.Server(host, token, self._talk, timeout, purpose=PURPOSE)
        self.address = self._server.address
        """`host:port` under which a joiner's `fetch` reaches this server."""

    def serve(self, step: int, history: int, state: HealState) -> None:
        """Open `state` to joiners, until `close`, as the state after the committed step `step` of `history`. It is
        copied when the first joiner asks. If the host has no memory for a copy, joiners are refused."""
        if self._open is not None:  # since an earlier attempt at the next step
            return
        of = replace(self._of, step=step, history=history)
        device = next((tensor.device for tensor in state.tensors.values() if tensor.device != HOST), HOST)
        copy = _Copy(state, streams_of(device), self._timeout.total_seconds())
        blobs = [(name, len(blob)) for name, blob in state.blobs.items()]
        with self._changed:
            self._of = of
            self._open = copy, _Schema(of, _described(state.tensors), blobs, state.meta)
            self._changed.notify_all()

    def close(self) -> None:
        """Admit no more joiners and wait for a copy that is under way, as the state is about to change."""
        with self._changed:
            copying, self._open = self._open, None
        if copying is not None and copying[0].ident is not None:
            copying[0].join()

    def fetch(self, addresses: Sequence[str], step: int, history: int, like: HealState) -> "Fetch":
        """Begin to fetch the state after `step` of `history` from the servers at `addresses`. `like`: a state whose
        tensors have the same names, dtypes and shapes."""
        wanted = replace(self._of, step=step, history=history)
        return Fetch(addresses, wanted, like.tensors, self._token, self._timeout)

    def shutdown(self) -> None:
        """Disconnect every joiner and stop listening."""
        self.close()
        self._server.close(wait=False)  # a joiner's thread may wait for a step that is never opened

    def _talk(self, channel: wire.Channel) -> None:
        copy, schema = self._admit(channel.receive_frame())
        copy.views(0, min(1, copy.size))  # refuses before the answer if the host has no memory for the copy
        channel.send_frame(schema)
        wire.serve_ranges(channel, copy)

    def _admit(self, request: dict[str, Any]) -> tuple[_Copy, _Schema]:
        try:
            wanted = typed.parse(Wanted, request)
        except UnfitError as error:
            raise wire.RefusedError(f"the request is not understood: {error}") from error
        # A little less than the joiner's timeout, so that the reason arrives before the joiner gives up.
        patience_s = 0.9 * self._timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._of.step >= wanted.step or self._of.whose != wanted.whose, patience_s)
            if self._open is None or self._of != wanted:
                over = ", and its optimizer step has begun" if self._of == wanted else ""
                raise wire.RefusedError(f"it asked for {wanted}; the last state opened here is {self._of}{over}")
            self._open[0].begin()
            return self._open


class Fetch:
    """A transfer of another group's state to this rank. One thread per source receives pieces; every byte is
    authenticated.

    All pieces that are missing are in one queue. A source is asked for the first piece, which then moves to the end. If
    it is still missing when its turn comes again, another source is asked for it too.

    Args:
        addresses: addresses of the sources' servers.
        wanted: names the state to fetch.
        like: tensors with the names, dtypes and shapes that the state's tensors must have.
        token: the run's token.
        timeout: longest silence of a source, and longest wait for it to open the step.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        wanted: Wanted,
        like: Mapping[str, torch.Tensor],
        token: bytes,
        timeout: timedelta,
    ) -> None:
        self._wanted, self._token, self._timeout = wanted, token, timeout
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._channels: list[wire.Channel] = []
        self._over = False
        """Whether the transfer has ended, so that the sources are not needed any more."""
        self._described = _described(like)
        self.nbytes = sum(tensor.nbytes for tensor in like.values())
        """Bytes of the state's tensors."""
        self._left = dict.fromkeys(range(0, self.nbytes, PIECE_BYTES), False)
        """Queue of missing pieces: offset → whether a source was asked for it. The one asked for last is at the end."""
        self.is_answered = False
        """Whether a source has said that it sends the state."""
        self.state: HealState | None = None
        """The state, once all of it has arrived and is verified."""
        self._reasons: list[str] = []
        self.took_s = 0.0
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._take, args=(addresses, like), name="heal", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """Why the transfer has failed; empty if it is under way or complete."""
        if self._thread.is_alive() or self.state is not None:
            return ""
        return f"the state of step {self._wanted.step} could not be fetched: {'; '.join(self._reasons)}"

    def comes_soon(self) -> bool:
        """Wait up to SOON_S for the state. Return whether it came."""
        self._thread.join(SOON_S)
        return self.state is not None

    def _take(self, addresses: Sequence[str], like: Mapping[str, torch.Tensor]) -> None:
        """Fetch the state, if this host has memory for it besides what its other processes are about to use."""
        with room_for(self.nbytes) as has_room:
            try:
                if not has_room:
                    raise RuntimeError("less is free")
                self._tensors = {n: torch.empty(t.shape, dtype=t.dtype, device=HOST) for n, t in like.items()}
            except RuntimeError as error:
                self._reasons.append(f"this host has no memory for {self.nbytes} bytes: {error}".splitlines()[0])
                return
            self._sink = wire.Pieces(list(map(_memory_of, self._tensors.values())))
            sources = [threading.Thread(target=self._take_from, args=(one,), daemon=True) for one in addresses]
            for source in sources:
                source.start()
            for source in sources:
                source.join()

    def _take_from(self, address: str) -> None:
        """Receive from one source until the state is complete or the source fails: by a wrong token, step, history,
        rank or schema, bytes altered on the way, a refusal, death or silence."""
        try:
            with contextlib.closing(wire.connect(address, self._token, self._timeout, purpose=PURPOSE)) as channel:
                with self._lock:
                    if self._over:
                        return
                    self._channels.append(channel)
                schema = typed.parse(_Schema, channel.ask(self._wanted), "its answer")
                if (schema.of, schema.tensors) != (self._wanted, self._described):
                    other = [tensor for tensor in schema.tensors if tensor not in self._described]
                    raise UnfitError(f"it offers {schema.of}; its tensors that this rank does not have: {other[:3]}")
                self.is_answered = True
                self._take_pieces(channel)
                with self._turn:
                    if self.state is None:
                        self._complete(channel, schema)
        except (wire.WireError, UnfitError, MemoryError) as error:
            self._reasons.append(f"from {address} after {time.monotonic() - self._begun:.1f} s: {error}")

    def _take_pieces(self, channel: wire.Channel) -> None:
        """Receive pieces from a source until none is missing. Raises WireError."""
        asked: list[int] = []
        taken = memoryview(bytearray(min(PIECE_BYTES, self.nbytes)))
        while True:
            while len(asked) < AHEAD and (begin := self._next(asked)) is not None:
                channel.ask_range(begin, min(PIECE_BYTES, self.nbytes - begin))
                asked.append(begin)
            if not asked:
                return
            begin = asked.pop(0)
            piece = taken[: self.nbytes - begin]
            # Not received in place: another source may give the piece meanwhile, or its bytes may fail authentication.
            channel.receive_range(wire.Pieces([piece]), begin, len(piece), base=begin)
            with self._lock:
                for view in self._sink.views(begin, len(piece)) if begin in self._left else ():
                    view[:], piece = piece[: len(view)], piece[len(view) :]
                self._left.pop(begin, None)

    def _next(self, asked: list[int]) -> int | None:
        """Return the next piece to request from a source that owes the pieces `asked`; None for none. A piece that
        another source was asked for is requested only if this source owes none."""
        with self._lock:
            begin = next((begin for begin in self._left if begin not in asked), None)
            if begin is None or (asked and self._left[begin]):
                return None
            del self._left[begin]
            self._left[begin] = True
            return begin

    def _complete(self, channel: wire.Channel, schema: _Schema) -> None:
        """Receive the blobs from one source, which completes the state. Raises WireError."""
        blobs = {name: bytearray(length) for name, length in schema.blobs}
        rest = wire.Pieces(list(map(memoryview, blobs.values())))
        channel.ask_range(self.nbytes, rest.size)
        channel.receive_range(rest, self.nbytes, rest.size, base=self.nbytes)
        self.took_s = time.monotonic() - self._begun
        self.state = HealState(self._tensors, schema.meta, {name: bytes(blob) for name, blob in blobs.items()})
        self.let_go()

    def let_go(self) -> None:
        """End the transfer, because the state is complete or not wanted any more."""
        with self._lock:
            self._over = True
            for channel in self._channels:
                channel.cut()
