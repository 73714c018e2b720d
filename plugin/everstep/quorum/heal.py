"""The heal transport: the state of live groups for a group that joins.

A source opens its state after one committed step (`Door.serve`): once a joiner asks, a thread copies it, and joiners
read the copy (`Fetch`) while the source computes on. Before its optimizer makes another state of it (`Door.close`) the
source waits until the copy is whole, and lets nobody else in; present readers go on, and nobody waits for them.

A joiner takes the tensors, which are the same in all groups of one history, from several sources at once, piece by
piece: whichever is fast gives more, and what one that is slow, silent or gone owes is asked of another. A transfer
fails when no source is left. What only tells about a source (its data's position, its workers' own states) comes from
one.

What travels is a schema (names, dtypes, shapes as JSON), raw tensor bytes, a JSON object and named byte
strings; nothing that is executed on arrival, as a pickle would be. `everstep.wire` seals every chunk with keys
of the connection. A request says what it is for: which run, rank and layout, which step and by which history it came
about; the source compares before it opens anything, the joiner compares the answer. A transfer that broke off is over:
the next one begins anew.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from everstep import wire
from everstep.quorum.streams import Streams, bring, page_locked, streams_of
from everstep.run import typed
from everstep.run.memory import room_for
from everstep.run.typed import Count, UnfitError

PURPOSE = "heal"
HOST = torch.device("cpu")
STAGING_BYTES = 4 << 20
"""Of page-locked memory, for a copy."""
PIECE_BYTES = 4 << 20
"""What a source is asked for at once. A link takes much longer for it than a request does, and a source that is much
slower than others delays a state by little."""
AHEAD = 2
"""Pieces that a source is asked for before the first of them has come, so that its link is never idle."""


@dataclass
class HealState:
    """What a joiner needs to be like the source."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Local shards by name, on any device. A DTensor is passed as its local tensor."""

    meta: dict[str, Any] = field(default_factory=dict)
    """Anything JSON can carry: counters, schedules."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    """Opaque byte strings: random number states, a dataloader's position."""


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous CPU tensor's own memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class _Copy(threading.Thread):
    """A state's tensors and blobs laid end to end on the host (`wire.Bytes`), copied while the trainer computes on:
    from `begin` until `join` returns, they may not change.

    What lies on a device comes through page-locked memory, on a stream of its own that waits for what the trainer's
    stream was given when the state was opened.

    Args:
        patience_s: longest wait of a reader for what is not copied yet.
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
        """Bytes from the beginning."""
        self._error = ""
        self.begun = False

    def begin(self) -> None:
        """Copy, unless that has begun."""
        if not self.begun:
            self.start()
            self.begun = True

    def run(self) -> None:
        try:
            with room_for(self.size) as has_room:
                if not has_room:
                    raise MemoryError("this host has no memory for a copy")
                targets = [torch.empty(len(source), dtype=torch.uint8) for source in self._sources]
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
                bring([(some, staged)], self._streams, self._ready)
                there.copy_(staged)
            self._tell(self._copied + len(some))

    def _tell(self, copied: int, error: str = "") -> None:
        with self._changed:
            self._copied, self._error = copied, error
            self._changed.notify_all()

    def views(self, offset: int, length: int) -> list[memoryview]:
        """Once they are copied. Raises RefusedError."""
        with self._changed:
            self._changed.wait_for(lambda: self._copied >= offset + length or self._error, self._patience_s)
            if self._copied < offset + length:
                reason = self._error or f"not in {self._patience_s:g} s"
                raise wire.RefusedError(f"the state could not be copied: {reason}")
        return self._pieces.views(offset, length)


@dataclass(frozen=True)
class Wanted:
    """What a joiner asks for. `whose`: of which run and rank, and how laid out over a group's ranks."""

    step: int
    history: int
    whose: str


@dataclass(frozen=True)
class _Schema:
    """The answer: what the bytes mean that can be read from now on."""

    of: Wanted
    tensors: list[tuple[str, str, list[Count]]]
    blobs: list[tuple[str, Count]]
    meta: dict[str, Any]


def _described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    """Their names, dtypes and shapes."""
    return [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]


class Door:
    """How states reach joiners, of one rank: serves its state to them, by threads of its own, and fetches another's.

    A request for a step that is not open yet waits for `serve`; one for a step that is over is refused. So a
    joiner and its source need not agree on who is ready first.

    Args:
        host: address to listen on and to be reached under (fault_tolerance.bind_host).
        token: of the run.
        timeout: longest silence of the other side, and longest that a request waits for its step to be opened.
        whose: which state is served here and wanted from others.
    """

    def __init__(self, host: str, token: bytes, timeout: timedelta, whose: str = "") -> None:
        self._token, self._timeout = token, timeout
        self._changed = threading.Condition()
        self._of = Wanted(-1, 0, whose)
        """What the state is of that is served, or was last."""
        self._open: tuple[_Copy, _Schema] | None = None
        """What is served; None while nothing is."""
        self._server = wire.Server(host, token, self._talk, timeout, purpose=PURPOSE)
        self.address = self._server.address
        """`host:port` to hand to `fetch`."""

    def serve(self, step: int, history: int, state: HealState) -> None:
        """Open `state` to joiners as that after committed step `step`, which came about by `history`, until `close`. It
        is copied once one asks. If the host has no memory for a copy they are refused."""
        of = replace(self._of, step=step, history=history)
        if self._open is not None and self._of == of:
            return
        self.close()
        device = next((tensor.device for tensor in state.tensors.values() if tensor.device != HOST), HOST)
        copy = _Copy(state, streams_of(device), self._timeout.total_seconds())
        blobs = [(name, len(blob)) for name, blob in state.blobs.items()]
        with self._changed:
            self._of = of
            self._open = copy, _Schema(of, _described(state.tensors), blobs, state.meta)
            self._changed.notify_all()

    def close(self) -> None:
        """The state is about to change: nobody new is let in, and a copy under way is waited for."""
        with self._changed:
            copying, self._open = self._open, None
        if copying is not None and copying[0].begun:
            copying[0].join()

    def fetch(self, addresses: Sequence[str], step: int, history: int, like: HealState) -> "Fetch":
        """Begin to take over the state after `step` of `history`, whose tensors are like these, from the ranks at
        `addresses`."""
        wanted = replace(self._of, step=step, history=history)
        return Fetch(addresses, wanted, like.tensors, self._token, self._timeout)

    def shutdown(self) -> None:
        """Cut every joiner off and stop listening."""
        self.close()
        self._server.close(wait=False)  # a joiner's thread may wait for a step that does not come

    def _talk(self, channel: wire.Channel) -> None:
        copy, schema = self._admit(channel.receive_frame())
        copy.views(0, min(1, copy.size))  # a host without memory says so before anything is expected of it
        channel.send_frame(asdict(schema))
        wire.serve_ranges(channel, copy)

    def _admit(self, request: dict[str, Any]) -> tuple[_Copy, _Schema]:
        try:
            wanted = typed.parse(Wanted, request)
        except UnfitError as error:
            raise wire.RefusedError(f"the request is not understood: {error}") from error
        # A little less than the joiner's patience, so that the reason arrives before it gives up.
        patience_s = 0.9 * self._timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._of.step >= wanted.step or self._of.whose != wanted.whose, patience_s)
            if self._open is None or self._of != wanted:
                over = ", and its optimizer step has begun" if self._open is None else ""
                raise wire.RefusedError(f"{wanted} was asked for; what was opened here last is {self._of}{over}")
            self._open[0].begin()
            return self._open


class Fetch:
    """Another group's state on its way here. For each source a thread receives pieces, every byte authenticated.

    All pieces that are not here yet stand in one row. A source is asked for the first one, which goes to the row's end.
    So another one is asked for it too if it is not here after everything else.

    Args:
        addresses: of the sources' `Door`s.
        wanted: what is asked for.
        like: tensors with the names, dtypes and shapes that the state's are to have.
        token: of the run.
        timeout: the longest silence of a source, and the longest wait for it to open the step.
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
        """Whether nobody wants anything more of a source."""
        self._described = _described(like)
        self.nbytes = sum(tensor.nbytes for tensor in like.values())
        """Of the state's tensors."""
        self._left = dict.fromkeys(range(0, self.nbytes, PIECE_BYTES), False)
        """Where the pieces begin that are not here, and whether a source was asked for them; the last one at the
        end."""
        self.state: HealState | None = None
        """Once all of it is here and verified."""
        self._reasons: list[str] = []
        self.took_s = 0.0
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._take, args=(addresses, like), name="heal", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """Why it failed for good; empty while it is under way or done."""
        if self._thread.is_alive() or self.state is not None:
            return ""
        return f"no state of step {self._wanted.step} {'; '.join(self._reasons)}"

    def room(self, nbytes: int) -> contextlib.AbstractContextManager[bool]:
        """Whether this host has memory for so many bytes besides the state, which are copied in the context."""
        return room_for(nbytes)

    def _take(self, addresses: Sequence[str], like: Mapping[str, torch.Tensor]) -> None:
        """Take the state, if this host has memory for it besides what others on it are about to take."""
        with room_for(self.nbytes) as has_room:
            try:
                if not has_room:
                    raise RuntimeError("this host has less free")
                self._tensors = {n: torch.empty(t.shape, dtype=t.dtype, device=HOST) for n, t in like.items()}
            except RuntimeError as error:
                self._reasons.append(f"without memory for {self.nbytes} bytes: {error}".splitlines()[0])
                return
            self._sink = wire.Pieces(list(map(_memory_of, self._tensors.values())))
            sources = [threading.Thread(target=self._take_from, args=(one,), daemon=True) for one in addresses]
            for source in sources:
                source.start()
            for source in sources:
                source.join()

    def _take_from(self, address: str) -> None:
        """Take what one source gives, until the state is whole or the source fails: wrong token, step, history, rank or
        schema, something that was altered on the way, a refusal, death or silence."""
        try:
            with contextlib.closing(wire.connect(address, self._token, self._timeout, purpose=PURPOSE)) as channel:
                with self._lock:
                    if self._over:
                        return
                    self._channels.append(channel)
                schema = typed.parse(_Schema, channel.ask(asdict(self._wanted)), "its answer")
                if (schema.of, schema.tensors) != (self._wanted, self._described):
                    other = [tensor for tensor in schema.tensors if tensor not in self._described]
                    raise UnfitError(f"it offers {schema.of}, with other tensors than this rank has: {other[:3]}")
                self._take_pieces(channel)
                with self._turn:
                    if self.state is None:
                        self._complete(channel, schema)
        except (wire.WireError, UnfitError, MemoryError) as error:
            self._reasons.append(f"from {address} after {time.monotonic() - self._begun:.1f} s: {error}")

    def _take_pieces(self, channel: wire.Channel) -> None:
        """Take pieces from a source, as long as any is not here. Raises WireError."""
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
            # Not in its place yet: another source may give it meanwhile, and what does not open is no state.
            channel.receive_range(wire.Pieces([piece]), begin, len(piece), base=begin)
            with self._lock:
                for view in self._sink.views(begin, len(piece)) if begin in self._left else ():
                    view[:], piece = piece[: len(view)], piece[len(view) :]
                self._left.pop(begin, None)

    def _next(self, asked: list[int]) -> int | None:
        """The next piece to ask a source for; one that another source owes, only if this one owes none."""
        with self._lock:
            begin = next((begin for begin in self._left if begin not in asked), None)
            if begin is None or (asked and self._left[begin]):
                return None
            del self._left[begin]
            self._left[begin] = True
            return begin

    def _complete(self, channel: wire.Channel, schema: _Schema) -> None:
        """Take the rest from one source. Raises WireError."""
        blobs = {name: bytearray(length) for name, length in schema.blobs}
        rest = wire.Pieces(list(map(memoryview, blobs.values())))
        channel.ask_range(self.nbytes, rest.size)
        channel.receive_range(rest, self.nbytes, rest.size, base=self.nbytes)
        self.took_s = time.monotonic() - self._begun
        self.state = HealState(self._tensors, schema.meta, {name: bytes(blob) for name, blob in blobs.items()})
        self.let_go()

    def let_go(self) -> None:
        """End the transfer, as the state is here or wanted no more."""
        with self._lock:
            self._over = True
            for channel in self._channels:
                channel.cut()
