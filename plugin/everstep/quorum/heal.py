"""The heal transport: a live group's state for a group that joins.

The source opens its state for one committed step (`Door.serve`), joiners read it (`Fetch`) while the source computes
its slots, and the source takes its tensors back before its optimizer changes them (`Door.close`). Until then they are
read in place; joiners that are not done by then read on from a copy, and nobody waits for them.

What travels is a schema (names, dtypes, shapes as JSON), raw tensor bytes, a JSON object and named byte
strings; nothing that is executed on arrival, as a pickle would be. `everstep.wire` seals every chunk with keys
of the connection. A request says what it is for: which run, rank and layout, which step and by which history it came
about; the source compares before it opens anything, the joiner compares the answer. A transfer that broke off is over:
the next one begins anew.
"""

import bisect
import itertools
import math
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Annotated, Any

import torch

from everstep import wire
from everstep.quorum import memory
from everstep.run import typed
from everstep.run.typed import Count, UnfitError
from everstep.step.streams import streams_of

PURPOSE = "heal"
SCHEMA_VERSION = 3
HOST = torch.device("cpu")
CONNECTIONS = 4
"""In parallel for one state, fewer for a small one."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
"""By name, what a tensor may be made of."""


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


class _StateBytes:
    """A state's tensors and blobs laid end to end (`wire.Bytes`). What is read is copied into a buffer of the reading
    thread.

    For what lies on a device that buffer is pinned and filled by a stream of its own, which waits for what the serving
    thread's stream had been given when the state was opened: copies see the committed values and hold up no
    computation.
    """

    def __init__(self, state: HealState) -> None:
        self._parts: list[memoryview | torch.Tensor] = []
        self._device = next((t.device for t in state.tensors.values() if t.device.type != "cpu"), HOST)
        self._ready = streams_of(self._device).record()
        for name, tensor in state.tensors.items():
            if not tensor.is_contiguous():
                raise HealError(f"'{name}' is not contiguous: pass its contiguous local shard")
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            self._parts.append(_memory_of(flat) if tensor.device.type == "cpu" else flat)
        self._parts += [memoryview(blob) for blob in state.blobs.values()]
        self._parts = [p for p in self._parts if len(p)]
        self._ends = list(itertools.accumulate(len(p) for p in self._parts))
        self.size = self._ends[-1] if self._ends else 0
        self._own = threading.local()
        self._lock = threading.Condition()
        self._reading = 0
        self._detaching = False

    def views(self, offset: int, length: int) -> list[memoryview]:
        """See `wire.Bytes`. A copy: the tensors may change once this has returned, for which `detach` waits."""
        with self._lock:
            self._lock.wait_for(lambda: not self._detaching)
            self._reading += 1
        try:
            return [self._staged(self._pieces(offset, length))]
        finally:
            with self._lock:
                self._reading -= 1
                self._lock.notify_all()

    def detach(self) -> None:
        """Go on from a copy: when this returns the tensors may change."""
        with self._lock:
            self._detaching = True
            self._lock.wait_for(lambda: not self._reading)
        try:
            if self._device == HOST:
                self._parts = [memoryview(bytearray(part)) for part in self._parts]
            else:
                self._parts = [self._on_host()]
                self._ends, self._device = [self.size], HOST
        finally:
            with self._lock:
                self._detaching = False
                self._lock.notify_all()

    def _on_host(self) -> memoryview:
        """A copy of all of it, through page-locked memory: straight from a device to other memory takes several times
        as long, and the trainer waits for this."""
        whole = memoryview(bytearray(self.size))
        for begin in range(0, self.size, wire.CHUNK_BYTES):
            staged = self._staged(self._pieces(begin, min(wire.CHUNK_BYTES, self.size - begin)))
            whole[begin : begin + len(staged)] = staged
        return whole

    def _pieces(self, offset: int, length: int) -> list[memoryview | torch.Tensor]:
        end, pieces = offset + length, []
        index = bisect.bisect_right(self._ends, offset)
        while offset < end:
            part, stop = self._parts[index], min(end, self._ends[index])
            start = self._ends[index] - len(part)
            pieces.append(part[offset - start : stop - start])
            offset, index = stop, index + 1
        return pieces

    def _staged(self, pieces: list[memoryview | torch.Tensor]) -> memoryview:
        """Copies in the calling thread's buffer, good until its next call."""
        own, at = self._own, 0
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._device != HOST)
            own.streams = streams_of(self._device)
        with own.streams.of_sums():
            own.streams.wait(self._ready)
            for piece in pieces:
                target = own.buffer[at : at + len(piece)]
                if isinstance(piece, torch.Tensor):
                    target.copy_(piece, non_blocking=True)
                else:
                    target.numpy().data[:] = piece
                at += len(piece)
            if (done := own.streams.record()) is not None:
                done.synchronize()
        return own.buffer[:at].numpy().data


@dataclass(frozen=True)
class Whose:
    """Of which run, of which rank of a group, and how laid out over a group's ranks a state is."""

    run: str = ""
    rank: int = 0
    layout: str = ""


@dataclass(frozen=True)
class Wanted:
    """What a joiner asks for, on each of its connections."""

    step: int
    history: int
    whose: Whose
    patience_s: Annotated[float, typed.Within(0, 1e6)]
    version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class _Schema:
    """The answer: what the bytes mean that can be read from now on."""

    version: int
    step: int
    history: int
    whose: Whose
    tensors: list[tuple[str, str, list[Count]]]
    blobs: list[tuple[str, Count]]
    meta: dict[str, Any]
    size: Count


def _schema(step: int, history: int, whose: Whose, state: HealState, size: int) -> _Schema:
    tensors = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in state.tensors.items()]
    blobs = [(n, len(b)) for n, b in state.blobs.items()]
    return _Schema(SCHEMA_VERSION, step, history, whose, tensors, blobs, state.meta, size)


class Door:
    """Implements `everstep.step.interfaces.HealDoor` for one rank: serves its state to joiners, by threads of its own,
    and fetches another's.

    A request for a step that is not open yet waits for `serve`; one for a step that is over is refused. So a
    joiner and its source need not agree on who is ready first.

    Args:
        host: address to listen on and to be reached under (fault_tolerance.bind_host).
        token: of the run.
        timeout: longest silence of the other side, and longest that a request waits for its step to be opened.
        whose: which state is served here and wanted from others.
    """

    def __init__(self, host: str, token: bytes, timeout: timedelta, whose: Whose = Whose()) -> None:
        self._token, self._timeout, self._whose = token, timeout, whose
        self._changed = threading.Condition()
        self._step, self._history = -1, 0
        """Of the state that is served, or was last."""
        self._source: _StateBytes | None = None
        self._schema: _Schema | None = None
        """Of what is served; None while nothing is."""
        self._readers: dict[wire.Channel, _StateBytes] = {}
        """What each connection reads."""
        self._server = wire.Server(host, token, self._talk, timeout, purpose=PURPOSE)
        self.address = self._server.address
        """`host:port` to hand to `fetch`."""

    def serve(self, step: int, history: int, state: HealState) -> None:
        """Open `state` to joiners as that after committed step `step`, which came about by `history`, until `close`.

        The tensors are read in place: none may change before `close` has returned.
        """
        with self._changed:
            if self._schema is not None and (self._step, self._history) == (step, history):
                return
        self.close()
        state.meta["history"] = history
        source = _StateBytes(state)
        schema = _schema(step, history, self._whose, state, source.size)
        with self._changed:
            self._step, self._history, self._source, self._schema = step, history, source, schema
            self._changed.notify_all()

    def close(self) -> None:
        """The state is about to change: nobody new is let in, and joiners that are not done read on from a copy.

        Waits for no joiner. Where the host has no memory for a copy they are cut off and see a HealError.
        """
        with self._changed:
            source, self._source, self._schema = self._source, None, None
            if source is None or source not in self._readers.values():
                return
        with memory.claimed(source.size) as granted:
            if granted:
                source.detach()
        if not granted:
            self._cut(source)

    def fetch(self, address: str, step: int, history: int) -> "Fetch":
        """See `HealDoor.fetch`."""
        # A little less than our own patience, so that the source's reason arrives before we give up.
        wanted = Wanted(step, history, self._whose, 0.9 * self._timeout.total_seconds())
        return Fetch(address, wanted, self._token, self._timeout)

    def shutdown(self) -> None:
        """Cut every joiner off and stop listening."""
        with self._changed:
            self._source = self._schema = None
        self._cut(None)
        self._server.close()

    def _cut(self, source: _StateBytes | None) -> None:
        """End all transfers of a source, or all there are, and wait for that."""

        def reading() -> list[wire.Channel]:
            return [channel for channel, read in self._readers.items() if source in (None, read)]

        with self._changed:
            for channel in reading():
                channel.cut()
            self._changed.wait_for(lambda: not reading())

    def _talk(self, channel: wire.Channel) -> None:
        request = channel.receive_frame()
        try:
            source, answer = self._admit(channel, request)
            channel.send_frame(answer)
            wire.serve_ranges(channel, source)
        finally:
            with self._changed:
                self._readers.pop(channel, None)
                self._changed.notify_all()

    def _admit(self, channel: wire.Channel, request: dict[str, Any]) -> tuple[_StateBytes, dict[str, Any]]:
        try:
            wanted = typed.parse(Wanted, request)
        except UnfitError as error:
            raise wire.RefusedError(f"the request is not understood: {error}") from error
        if wanted.version != SCHEMA_VERSION or wanted.whose != self._whose:
            raise wire.RefusedError(f"here is {self._whose} in version {SCHEMA_VERSION}; {wanted} was asked for")
        patience_s = min(wanted.patience_s, self._timeout.total_seconds())
        with self._changed:
            if not self._changed.wait_for(lambda: self._step >= wanted.step, patience_s):
                raise wire.RefusedError(
                    f"step {wanted.step} was not opened here within {patience_s:g} s; the last was {self._step}"
                )
            if self._step != wanted.step:
                raise wire.RefusedError(f"step {wanted.step} is over here: step {self._step} was opened since")
            if self._source is None or self._schema is None:
                raise wire.RefusedError(f"step {wanted.step} is being left here: its optimizer step has begun")
            if self._history != wanted.history:
                raise wire.RefusedError(
                    f"step {wanted.step} came about here by history {self._history}, {wanted.history} was asked for"
                )
            self._readers[channel] = self._source
            return self._source, asdict(self._schema)


class Fetch(threading.Thread):
    """Implements `everstep.step.interfaces.Fetch`: a thread of its own receives the state, every byte authenticated.

    Args:
        address: of the source's `Door`.
        wanted: what is asked for.
        token: of the run.
        timeout: the longest silence of the source, and the longest wait for it to open the step.
        connections: of the transfer.
    """

    def __init__(
        self,
        address: str,
        wanted: Wanted,
        token: bytes,
        timeout: timedelta,
        *,
        connections: int = CONNECTIONS,
    ) -> None:
        super().__init__(name="heal", daemon=True)
        self._address, self._wanted, self._token, self._timeout = address, wanted, token, timeout
        self._connections = connections
        self._state: HealState | None = None
        self.error = ""
        self.took_s = 0.0
        self.nbytes = 0
        """Of the state's tensors; 0 until the source has said."""
        self.start()

    def run(self) -> None:
        channels: list[wire.Channel] = []
        begun = time.monotonic()
        try:
            state = self._receive(channels)
        except (wire.WireError, HealError, UnfitError) as error:
            after = f"from {self._address} after {time.monotonic() - begun:.1f} s"
            self.error = f"no state of step {self._wanted.step} {after}: {error}"
        else:
            self.took_s, self._state = time.monotonic() - begun, state
        finally:
            for channel in channels:
                channel.close()

    def state(self) -> HealState | None:
        """See `Fetch.state`."""
        return self._state

    def room(self) -> AbstractContextManager[bool]:
        """See `Fetch.room`. The sums of a step are never larger than the state."""
        return memory.claimed(self.nbytes)

    def cancel(self) -> None:
        """See `Fetch.cancel`: what still arrives is not used."""
        self._state = None

    def _receive(self, channels: list[wire.Channel]) -> HealState:
        """The whole state, over connections that are added to `channels`.

        Raises:
            HealError, WireError, UnfitError: wrong token, step, history, rank or schema, something that was altered on
                the way, a source that refused, died or fell silent.
        """
        channels.append(self._connect())
        schema = self._ask(channels[0])
        self._compare(schema)
        tensors = _room(schema.tensors)
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        size = self.nbytes + sum(length for _, length in schema.blobs)
        if size != schema.size:
            raise HealError(f"it announced {schema.size} bytes for a schema of {size}")
        blobs = {name: bytearray(length) for name, length in schema.blobs}
        sink = wire.Pieces([*map(_memory_of, tensors.values()), *map(memoryview, blobs.values())])
        for _ in range(min(self._connections, -(-sink.size // wire.RANGE_BYTES)) - 1):
            further = self._connect()
            channels.append(further)
            try:
                same = self._ask(further) == schema
            except wire.RefusedError:  # the step is over there, and those let in before read on
                same = False
            if not same:
                channels.pop().close()
                break
        wire.pull(channels, sink)
        return HealState(tensors, schema.meta, {name: bytes(blob) for name, blob in blobs.items()})

    def _connect(self) -> wire.Channel:
        return wire.connect(self._address, self._token, self._timeout, purpose=PURPOSE)

    def _ask(self, channel: wire.Channel) -> _Schema:
        return typed.parse(_Schema, channel.ask(asdict(self._wanted)), "its answer:")

    def _compare(self, schema: _Schema) -> None:
        """See that the answer is what was asked for. Raises HealError."""
        wanted = self._wanted
        offered = (schema.version, schema.step, schema.history, schema.whose)
        asked = (wanted.version, wanted.step, wanted.history, wanted.whose)
        for what, theirs, ours in zip(("version", "step", "history", "state of"), offered, asked, strict=True):
            if theirs != ours:
                raise HealError(f"it offers {what} {theirs}, not {ours}")


def _room(schema: list[tuple[str, str, list[int]]]) -> dict[str, torch.Tensor]:
    """Buffers for a schema. Raises HealError."""
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype_name, shape in schema:
        dtype = DTYPES.get(dtype_name)
        if dtype is None or name in tensors:
            raise HealError(f"'{name}' has the unknown dtype {dtype_name}, or comes twice")
        tensors[name] = _fresh(name, dtype, shape)
    return tensors


def _fresh(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise HealError(f"'{name}' has the impossible shape {shape}")
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise HealError(f"there is no memory for '{name}' of shape {shape}: {error}".splitlines()[0]) from error
