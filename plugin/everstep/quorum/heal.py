"""The heal transport: a live group's state for a group that joins.

The source opens its state for one committed step (`HealServer.serve`), joiners read it (`Fetch`) while the
source computes its slots, and the source takes its tensors back before its optimizer changes them (`release`).
Until then they are read in place; joiners that are not done by then read on from a copy, and nobody waits for them.

What travels is a schema (names, dtypes, shapes as JSON), raw tensor bytes, a JSON object and named byte
strings; nothing that is executed on arrival, as a pickle would be. `everstep.wire` authenticates every chunk with keys
of the connection. A request says what it is for: which run, rank and layout, which step and by which history it came
about; the source compares before it opens anything, the joiner compares the answer.

A transfer that broke off is taken up where it was, from the same source or from another one (`Fetch`).
"""

import bisect
import itertools
import math
import threading
import time
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
DEFAULT_CONNECTIONS = 4
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
class _Request:
    """Of a joiner, on each of its connections."""

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


class HealServer:
    """Serves one group rank's state to joiners, by threads of its own.

    A request for a step that is not open yet waits for `serve`; one for a step that is over is refused. So a
    joiner and its source need not agree on who is ready first.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        timeout: timedelta = timedelta(seconds=60),
        *,
        whose: Whose = Whose(),
        encrypt: bool = False,
    ) -> None:
        """`host`: address to listen on and advertise (fault_tolerance.bind_host). `timeout`: the longest
        silence of a joiner before its connection is given up, and the longest that a request waits for its
        step to be opened. `whose`: what is served here. `encrypt`: as of `wire.connect`."""
        self._whose = whose
        self._timeout = timeout
        self._changed = threading.Condition()
        self._step, self._history = -1, 0
        self._open = False
        self._source: _StateBytes | None = None
        self._schema: _Schema | None = None
        self._readers: dict[wire.Channel, _StateBytes] = {}
        """What each connection reads."""
        self._server = wire.Server(host, token, self._talk, timeout, purpose=PURPOSE, encrypt=encrypt)
        self.address = self._server.address
        """`host:port` to hand to `Fetch.run`."""

    def serve(self, step: int, state: HealState, history: int = 0) -> None:
        """Open `state` to readers as that of committed step `step`, which came about by `history`, until
        `release`.

        The tensors are read in place: none may change before `release` has returned.
        """
        with self._changed:
            # A step that is served again, in another attempt: who asks in between waits instead of being refused.
            self._step = min(self._step, step - 1)
        self.release()
        source = _StateBytes(state)
        schema = _schema(step, history, self._whose, state, source.size)
        with self._changed:
            self._step, self._history, self._open, self._source, self._schema = step, history, True, source, schema
            self._changed.notify_all()

    def release(self) -> bool:
        """The state is about to change: nobody new is let in, and joiners that are not done read on from a copy.

        Waits for no joiner. Where the host has no memory for a copy they are cut off and see a HealError. Returns
        whether nobody was.
        """
        with self._changed:
            source, self._open = self._source, False
            self._source = self._schema = None
            reading = source is not None and source in self._readers.values()
        if source is None or not reading:
            return True
        with memory.claimed(source.size) as granted:
            if granted:
                source.detach()
        if not granted:
            self._cut(source)
        return granted

    def _cut(self, source: _StateBytes | None) -> None:
        """End all transfers of a source, or all there are, and wait for that."""

        def reading() -> list[wire.Channel]:
            return [channel for channel, read in self._readers.items() if source in (None, read)]

        with self._changed:
            for channel in reading():
                channel.cut()
            self._changed.wait_for(lambda: not reading())

    def shutdown(self) -> None:
        """Cut every reader off and stop listening."""
        with self._changed:
            self._open = False
            self._source = self._schema = None
        self._cut(None)
        self._server.close()

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
            asked = typed.parse(_Request, request)
        except UnfitError as error:
            raise wire.RefusedError(f"the request is not understood: {error}") from error
        if asked.version != SCHEMA_VERSION or asked.whose != self._whose:
            raise wire.RefusedError(f"here is {self._whose} in version {SCHEMA_VERSION}; {asked} was asked for")
        patience_s = min(asked.patience_s, self._timeout.total_seconds())
        with self._changed:
            if not self._changed.wait_for(lambda: self._step >= asked.step, patience_s):
                raise wire.RefusedError(
                    f"step {asked.step} was not opened here within {patience_s:g} s; the last was {self._step}"
                )
            if self._step != asked.step:
                raise wire.RefusedError(f"step {asked.step} is over here: step {self._step} was opened since")
            if not self._open or self._source is None or self._schema is None:
                raise wire.RefusedError(f"step {asked.step} is being left here: its optimizer step has begun")
            if self._history != asked.history:
                raise wire.RefusedError(
                    f"step {asked.step} came about here by history {self._history}, {asked.history} was asked for"
                )
            self._readers[channel] = self._source
            return self._source, asdict(self._schema)


class Fetch:
    """One state on its way to this process: every byte authenticated, and none asked for twice.

    `run` may be called again when it has failed, with the same address or with another one that has the same step by
    the same history: what has arrived is kept. Tensors are, blobs and meta are taken from the source that is asked
    last, since each group keeps its own.

    Args:
        connections: parallel connections, fewer for a small state.
    """

    def __init__(
        self,
        token: bytes,
        step: int,
        *,
        history: int = 0,
        whose: Whose = Whose(),
        connections: int = DEFAULT_CONNECTIONS,
        encrypt: bool = False,
    ) -> None:
        self.step, self.history = step, history
        self._token, self._whose = token, whose
        self._connections, self._encrypt = connections, encrypt
        self._layout: list[tuple[str, str, list[int]]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensor_bytes = 0
        self._done: set[int] = set()
        """Where the ranges begin that have arrived."""

    @property
    def nbytes(self) -> int:
        """Of the state's tensors; 0 until the source has said."""
        return self._tensor_bytes

    def run(self, address: str, timeout: timedelta) -> HealState:
        """The whole state, from the `HealServer` at `address`.

        Args:
            timeout: the longest silence of the source, and the longest wait for it to open the step.

        Raises:
            HealError: wrong token, step, history, rank or schema, something that was altered on the way, a source that
                refused, died or fell silent.
        """
        channels: list[wire.Channel] = []
        started = time.monotonic()
        try:
            channels.append(self._connect(address, timeout))
            # A little less than our own patience, so that the source's reason arrives before we give up.
            request = _Request(self.step, self.history, self._whose, 0.9 * timeout.total_seconds())
            schema = typed.parse(_Schema, channels[0].ask(asdict(request)), "its answer:")
            self._compare(schema)
            blobs = {name: bytearray(size) for name, size in schema.blobs}
            sink = wire.Pieces([*map(_memory_of, self._tensors.values()), *map(memoryview, blobs.values())])
            missing = -(-sink.size // wire.RANGE_BYTES) - len(self._done)
            for _ in range(min(self._connections, missing) - 1):
                channels.append(self._connect(address, timeout))
                if not self._offers_the_same(channels[-1], request, schema):
                    channels.pop().close()
                    break
            wire.pull(channels, sink, self._done)
        except (wire.WireError, HealError, UnfitError) as error:
            waited_s = time.monotonic() - started
            raise HealError(f"no state of step {self.step} from {address} after {waited_s:.1f} s: {error}") from error
        finally:
            for channel in channels:
                channel.close()
        return HealState(self._tensors, schema.meta, {name: bytes(blob) for name, blob in blobs.items()})

    def _offers_the_same(self, channel: wire.Channel, request: _Request, schema: _Schema) -> bool:
        """Whether a further connection reads the same; else the step is over there, and those let in before read on."""
        try:
            return typed.parse(_Schema, channel.ask(asdict(request)), "its answer:") == schema
        except wire.RefusedError:
            return False

    def _connect(self, address: str, timeout: timedelta) -> wire.Channel:
        return wire.connect(address, self._token, timeout, purpose=PURPOSE, encrypt=self._encrypt)

    def _compare(self, schema: _Schema) -> None:
        """See that the answer is what was asked for, and have room for it. Raises HealError."""
        offered = (schema.version, schema.step, schema.history, schema.whose)
        asked = (SCHEMA_VERSION, self.step, self.history, self._whose)
        for what, theirs, ours in zip(("version", "step", "history", "state of"), offered, asked, strict=True):
            if theirs != ours:
                raise HealError(f"it offers {what} {theirs}, not {ours}")
        if not self._tensors or schema.tensors != self._layout:
            self._done.clear()
            self._tensors, self._layout = _room(schema.tensors), schema.tensors
            self._tensor_bytes = sum(t.nbytes for t in self._tensors.values())
        # Of another source, or of a later moment of the same.
        self._done = {begin for begin in self._done if begin + wire.RANGE_BYTES <= self._tensor_bytes}
        size = self._tensor_bytes + sum(length for _, length in schema.blobs)
        if size != schema.size:
            raise HealError(f"it announced {schema.size} bytes for a schema of {size}")


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
