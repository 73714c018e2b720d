"""The heal transport: a live group's state for a group that joins.

The source opens its state after one committed step (`Door.serve`): a thread copies it, and joiners read the copy
(`Fetch`) while the source computes on. Before its optimizer makes another state of it (`Door.close`) the source waits
until the copy is whole, and lets nobody else in; those that are there read on, and nobody waits for them.

What travels is a schema (names, dtypes, shapes as JSON), raw tensor bytes, a JSON object and named byte
strings; nothing that is executed on arrival, as a pickle would be. `everstep.wire` seals every chunk with keys
of the connection. A request says what it is for: which run, rank and layout, which step and by which history it came
about; the source compares before it opens anything, the joiner compares the answer. A transfer that broke off is over:
the next one begins anew.
"""

import contextlib
import math
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch

from everstep import wire
from everstep.quorum import memory
from everstep.quorum.streams import Streams, bring, page_locked, streams_of
from everstep.run import typed
from everstep.run.typed import Count, UnfitError

PURPOSE = "heal"
HOST = torch.device("cpu")
STAGING_BYTES = 4 << 20
"""Of page-locked memory, for a copy."""


class HealError(RuntimeError):
    """A state that could not be had whole and verified; the message says why and from whom."""


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
    """A state's tensors and blobs laid end to end on the host, copied while the trainer computes on; until `join`
    returns, they may not change.

    What lies on a device comes through page-locked memory, on a stream of its own that waits for what the trainer's
    stream was given when the state was opened.
    """

    def __init__(self, state: HealState, streams: Streams) -> None:
        super().__init__(name="heal copy", daemon=True)
        self._sources = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in state.tensors.values()]
        self._blobs = list(map(memoryview, state.blobs.values()))
        self.nbytes = sum(map(len, self._sources)) + sum(map(len, self._blobs))
        self._streams, self._ready = streams, streams.record()
        on_device = any(source.device != HOST for source in self._sources)
        self._staging = page_locked(STAGING_BYTES) if on_device else None
        self._pieces: wire.Pieces | None = None
        self._error = ""
        self.start()

    def run(self) -> None:
        try:
            with memory.room_for(self.nbytes) as has_room:
                if not has_room:
                    raise MemoryError("this host has no memory for a copy")
                copies = [_memory_of(self._on_host(source)) for source in self._sources]
            self._pieces = wire.Pieces(copies + self._blobs)
        except (MemoryError, RuntimeError, OSError) as error:
            self._error = str(error)
        self._sources.clear()

    def pieces(self, patience_s: float) -> wire.Pieces:
        """The copy, once it is whole. Raises RefusedError."""
        self.join(patience_s)
        if self._pieces is None:
            raise wire.RefusedError(f"the state could not be copied: {self._error or f'not in {patience_s:g} s'}")
        return self._pieces

    def _on_host(self, source: torch.Tensor) -> torch.Tensor:
        if self._staging is None:
            return source.clone()
        target = torch.empty(len(source), dtype=torch.uint8)
        for some, there in zip(source.split(STAGING_BYTES), target.split(STAGING_BYTES), strict=True):
            staged = self._staging[: len(some)]
            bring([(some, staged)], self._streams, self._ready)
            there.copy_(staged)
        return target


@dataclass(frozen=True)
class Wanted:
    """What a joiner asks for. `whose`: of which run and rank, and how laid out over a group's ranks."""

    step: int
    history: int
    whose: str


@dataclass(frozen=True)
class _Schema:
    """The answer: what the bytes mean that can be read from now on."""

    step: int
    history: int
    whose: str
    tensors: list[tuple[str, str, list[Count]]]
    blobs: list[tuple[str, Count]]
    meta: dict[str, Any]
    size: Count


def _schema(step: int, history: int, whose: str, state: HealState, size: int) -> _Schema:
    tensors = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in state.tensors.items()]
    blobs = [(n, len(b)) for n, b in state.blobs.items()]
    return _Schema(step, history, whose, tensors, blobs, state.meta, size)


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
        self._token, self._timeout, self._whose = token, timeout, whose
        self._changed = threading.Condition()
        self._step, self._history = -1, 0
        """Of the state that is served, or was last."""
        self._open: tuple[_Copy, _Schema] | None = None
        """What is served; None while nothing is."""
        self._server = wire.Server(host, token, self._talk, timeout, purpose=PURPOSE)
        self.address = self._server.address
        """`host:port` to hand to `fetch`."""

    def serve(self, step: int, history: int, state: HealState) -> None:
        """Open a copy of `state` to joiners as that after committed step `step`, which came about by `history`, until
        `close`. If the host has no memory for a copy they see a HealError."""
        if self._open is not None and (self._step, self._history) == (step, history):
            return
        self.close()
        device = next((tensor.device for tensor in state.tensors.values() if tensor.device != HOST), HOST)
        copy = _Copy(state, streams_of(device))
        with self._changed:
            self._step, self._history = step, history
            self._open = copy, _schema(step, history, self._whose, state, copy.nbytes)
            self._changed.notify_all()

    def close(self) -> None:
        """The state is about to change: nobody new is let in, and a copy under way is waited for."""
        with self._changed:
            copying, self._open = self._open, None
        if copying is not None:
            copying[0].join()

    def fetch(self, address: str, step: int, history: int) -> "Fetch":
        """Begin to take over the state after `step` of `history` from the rank at `address`."""
        return Fetch(address, Wanted(step, history, self._whose), self._token, self._timeout)

    def shutdown(self) -> None:
        """Cut every joiner off and stop listening."""
        self.close()
        self._server.close()

    def _talk(self, channel: wire.Channel) -> None:
        copy, schema = self._admit(channel.receive_frame())
        pieces = copy.pieces(self._timeout.total_seconds())
        channel.send_frame(asdict(schema))
        wire.serve_ranges(channel, pieces)

    def _admit(self, request: dict[str, Any]) -> tuple[_Copy, _Schema]:
        try:
            wanted = typed.parse(Wanted, request)
        except UnfitError as error:
            raise wire.RefusedError(f"the request is not understood: {error}") from error
        if wanted.whose != self._whose:
            raise wire.RefusedError(f"here is {self._whose}; {wanted} was asked for")
        # A little less than the joiner's patience, so that the reason arrives before it gives up.
        patience_s = 0.9 * self._timeout.total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: self._step >= wanted.step, patience_s):
                raise wire.RefusedError(
                    f"step {wanted.step} was not opened here within {patience_s:g} s; the last was {self._step}"
                )
            if self._step != wanted.step:
                raise wire.RefusedError(f"step {wanted.step} is over here: step {self._step} was opened since")
            if self._open is None:
                raise wire.RefusedError(f"step {wanted.step} is not open here: its optimizer step has begun")
            if self._history != wanted.history:
                raise wire.RefusedError(
                    f"step {wanted.step} came about here by history {self._history}, {wanted.history} was asked for"
                )
            return self._open


class Fetch(threading.Thread):
    """Another group's state on its way here: a thread of its own receives it, every byte authenticated.

    Args:
        address: of the source's `Door`.
        wanted: what is asked for.
        token: of the run.
        timeout: the longest silence of the source, and the longest wait for it to open the step.
    """

    def __init__(
        self,
        address: str,
        wanted: Wanted,
        token: bytes,
        timeout: timedelta,
    ) -> None:
        super().__init__(name="heal", daemon=True)
        self._address, self._wanted, self._token, self._timeout = address, wanted, token, timeout
        self._state: HealState | None = None
        self.error = ""
        """Why it failed for good; empty while it is under way or done."""
        self.took_s = 0.0
        self.nbytes = 0
        """Of the state's tensors; 0 until the source has said."""
        self.start()

    def run(self) -> None:
        begun = time.monotonic()
        try:
            state = self._receive()
        except (wire.WireError, HealError, UnfitError) as error:
            after = f"from {self._address} after {time.monotonic() - begun:.1f} s"
            self.error = f"no state of step {self._wanted.step} {after}: {error}"
        else:
            self.took_s, self._state = time.monotonic() - begun, state

    def state(self) -> HealState | None:
        """The state, once all of it is here and verified; None before."""
        return self._state

    def room(self) -> contextlib.AbstractContextManager[bool]:
        """Whether this host has memory for the sums of another step, which are copied in the context. They are never
        larger than the state."""
        return memory.room_for(self.nbytes)

    def _receive(self) -> HealState:
        """The whole state.

        Raises:
            HealError, WireError, UnfitError: wrong token, step, history, rank or schema, something that was altered on
                the way, a source that refused, died or fell silent.
        """
        channel = wire.connect(self._address, self._token, self._timeout, purpose=PURPOSE)
        try:
            schema = typed.parse(_Schema, channel.ask(asdict(self._wanted)), "its answer:")
            if (offered := Wanted(schema.step, schema.history, schema.whose)) != self._wanted:
                raise HealError(f"it offers {offered}, not {self._wanted}")
            tensors = _room(schema.tensors)
            self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
            size = self.nbytes + sum(length for _, length in schema.blobs)
            if size != schema.size:
                raise HealError(f"it announced {schema.size} bytes for a schema of {size}")
            blobs = {name: bytearray(length) for name, length in schema.blobs}
            sink = wire.Pieces([*map(_memory_of, tensors.values()), *map(memoryview, blobs.values())])
            wire.pull(channel, sink)
        finally:
            channel.close()
        return HealState(tensors, schema.meta, {name: bytes(blob) for name, blob in blobs.items()})


def _room(schema: list[tuple[str, str, list[int]]]) -> dict[str, torch.Tensor]:
    """Buffers for a schema. Raises HealError."""
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype_name, shape in schema:
        dtype = vars(torch).get(dtype_name)
        if not isinstance(dtype, torch.dtype) or name in tensors:
            raise HealError(f"'{name}' has the unknown dtype {dtype_name}, or comes twice")
        if math.prod(shape) * dtype.itemsize >= 1 << 63:
            raise HealError(f"'{name}' has the impossible shape {shape}")
        try:
            tensors[name] = torch.empty(shape, dtype=dtype)
        except (RuntimeError, MemoryError) as error:
            raise HealError(f"there is no memory for '{name}' of shape {shape}: {error}".splitlines()[0]) from error
    return tensors
