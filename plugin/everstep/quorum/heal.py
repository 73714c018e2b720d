"""The heal transport: a live group's state for a group that joins.

The source opens its state for one committed step (`HealServer.serve`), joiners read it (`fetch`) while the
source computes its slots, and the source takes its tensors back before its optimizer changes them (`release`).
Until then they are read in place; joiners that are not done by then read on from a copy, and nobody waits for them.
On the joiner the bytes land in their final buffers.

What travels is a schema (names, dtypes, shapes as JSON), raw tensor bytes, a JSON object and named byte
strings; nothing that is executed on arrival, as a pickle would be. `everstep.wire` authenticates every chunk with keys
of the connection. A request says what it is for: which run, rank and layout, which step and by which history it came
about; the source compares before it opens anything, the joiner compares the answer.

A transfer that broke off is taken up where it was, from the same source or from another one (`Fetch`).
"""

import bisect
import contextlib
import itertools
import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Annotated, Any

import psutil
import torch

from everstep import wire
from everstep.run import typed
from everstep.run.typed import Count, UnfitError

PURPOSE = "heal"
SCHEMA_VERSION = 2
DEFAULT_CONNECTIONS = 4
MEMORY_FACTOR = 1.5
"""Free host memory, in sizes of the state, that a copy of it for slow joiners needs."""
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


class _StateBytes(wire.Lender):
    """A state's tensors and blobs laid end to end (`wire.Lender`), read in place.

    What lies on a device is staged in a pinned buffer of the reading thread. Copies from a device run on a stream of
    their own that waits for what the serving thread's stream had queued when the state was opened: they see the
    committed values and do not hold up the computation.
    """

    def __init__(self, state: HealState) -> None:
        self._parts: list[memoryview | torch.Tensor] = []
        self._ready: torch.cuda.Event | None = None
        for name, tensor in state.tensors.items():
            if not tensor.is_contiguous():
                raise HealError(f"'{name}' is not contiguous: pass its contiguous local shard")
            if tensor.device.type == "cpu":
                self._parts.append(_memory_of(tensor))
            else:
                self._parts.append(tensor.detach().reshape(-1).view(torch.uint8))
                if self._ready is None:
                    self._device = tensor.device
                    self._ready = torch.cuda.Event()
                    self._ready.record(torch.cuda.current_stream(tensor.device))
        self._parts += [memoryview(blob) for blob in state.blobs.values()]
        self._parts = [p for p in self._parts if len(p)]
        self._ends = list(itertools.accumulate(len(p) for p in self._parts))
        self.size = self._ends[-1] if self._ends else 0
        self._own = threading.local()
        self._lock = threading.Condition()
        self._reading = 0
        self._detaching = False

    @contextlib.contextmanager
    def lend(self, offset: int, length: int) -> Iterator[list[memoryview]]:
        """See `wire.Lender`. `detach` waits until nothing is lent."""
        with self._lock:
            self._lock.wait_for(lambda: not self._detaching)
            self._reading += 1
        try:
            pieces = self._pieces(offset, length)
            if self._ready is None:
                yield [piece for piece in pieces if isinstance(piece, memoryview)]
                return
            staged = self._staged(pieces)
        finally:
            with self._lock:
                self._reading -= 1
                self._lock.notify_all()
        yield staged

    def wanted_back(self) -> bool:
        """See `wire.Lender`."""
        return self._detaching

    def detach(self) -> None:
        """Go on from a copy: when this returns the tensors may change."""
        with self._lock:
            self._detaching = True
            self._lock.wait_for(lambda: not self._reading)
        try:
            self._parts = [
                part.cpu() if isinstance(part, torch.Tensor) else memoryview(bytearray(part)) for part in self._parts
            ]
            self._parts = [_memory_of(part) if isinstance(part, torch.Tensor) else part for part in self._parts]
            self._ready = None
        finally:
            with self._lock:
                self._detaching = False
                self._lock.notify_all()

    def _pieces(self, offset: int, length: int) -> list[memoryview | torch.Tensor]:
        end, pieces = offset + length, []
        index = bisect.bisect_right(self._ends, offset)
        while offset < end:
            part, stop = self._parts[index], min(end, self._ends[index])
            start = self._ends[index] - len(part)
            pieces.append(part[offset - start : stop - start])
            offset, index = stop, index + 1
        return pieces

    def _staged(self, pieces: list[memoryview | torch.Tensor]) -> list[memoryview]:
        """Copies in the calling thread's buffer, good until its next call."""
        own, at = self._own, 0
        if not hasattr(own, "buffer"):
            own.buffer = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
            own.stream = torch.cuda.Stream(self._device)
            own.stream.wait_event(self._ready)
        for piece in pieces:
            target = own.buffer[at : at + len(piece)]
            if isinstance(piece, torch.Tensor):
                with torch.cuda.stream(own.stream):
                    target.copy_(piece, non_blocking=True)
            else:
                target.numpy().data[:] = piece
            at += len(piece)
        own.stream.synchronize()
        return [own.buffer[:at].numpy().data]


@dataclass(frozen=True)
class Whose:
    """Of which run, of which rank of a group, and how laid out over a group's ranks a state is."""

    run: str = ""
    rank: int = 0
    layout: str = ""


@dataclass(frozen=True)
class _Request:
    """Of a joiner, on the first of its connections."""

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
    transfer: str = ""


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
        self._readers: dict[wire.Channel, tuple[str, _StateBytes]] = {}
        """The transfer that each connection belongs to, and what it reads."""
        self._server = wire.Server(host, token, self._talk, timeout, purpose=PURPOSE, encrypt=encrypt)
        self.address = self._server.address
        """`host:port` to hand to `fetch`."""

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
            reading = source is not None and any(read is source for _, read in self._readers.values())
        if source is None or not reading:
            return True
        if psutil.virtual_memory().available > MEMORY_FACTOR * source.size:
            source.detach()
            return True
        self._cut(source)
        return False

    def _cut(self, source: _StateBytes | None) -> None:
        """End all transfers of a source, or all there are, and wait for that."""

        def reading() -> list[wire.Channel]:
            return [channel for channel, (_, read) in self._readers.items() if source in (None, read)]

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
        if request.get("op") == "join":
            return self._join(channel, str(request.get("transfer"))), {}
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
            transfer = uuid.uuid4().hex
            self._readers[channel] = (transfer, self._source)
            return self._source, asdict(self._schema) | {"transfer": transfer}

    def _join(self, channel: wire.Channel, transfer: str) -> _StateBytes:
        with self._changed:
            sources = [source for known, source in self._readers.values() if known == transfer]
            if not sources:
                raise wire.RefusedError("the transfer that this connection belongs to has ended")
            self._readers[channel] = (transfer, sources[0])
            return sources[0]


class Fetch:
    """One state on its way to this process: every byte authenticated, and none asked for twice.

    `run` may be called again when it has failed, with the same address or with another one that has the same step by
    the same history: what has arrived is kept. Tensors are, blobs and meta are taken from the source that is asked
    last, since each group keeps its own.

    Args:
        into: host tensors to receive into, exactly the source's by name, dtype and shape. None: fresh ones.
        connections: parallel connections, fewer for a small state.
    """

    def __init__(
        self,
        token: bytes,
        step: int,
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        history: int = 0,
        whose: Whose = Whose(),
        connections: int = DEFAULT_CONNECTIONS,
        encrypt: bool = False,
    ) -> None:
        self.step, self.history = step, history
        self._token, self._into, self._whose = token, into, whose
        self._connections, self._encrypt = connections, encrypt
        self._layout: list[tuple[str, str, list[int]]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._tensor_bytes = 0
        self._done: set[int] = set()
        """Where the ranges begin that have arrived."""

    def run(self, address: str, timeout: timedelta) -> HealState:
        """The whole state, from the `HealServer` at `address`.

        Args:
            timeout: the longest silence of the source, and the longest wait for it to open the step.

        Raises:
            HealError: wrong token, step, history, rank or schema, something that was altered on the way, a source that
                refused, died or fell silent. What `into` holds is then undefined.
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
                channels[-1].ask({"op": "join", "transfer": schema.transfer})
            wire.pull(channels, sink, self._done)
        except (wire.WireError, HealError, UnfitError) as error:
            waited_s = time.monotonic() - started
            raise HealError(f"no state of step {self.step} from {address} after {waited_s:.1f} s: {error}") from error
        finally:
            for channel in channels:
                channel.close()
        return HealState(self._tensors, schema.meta, {name: bytes(blob) for name, blob in blobs.items()})

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
            self._tensors, self._layout = _room(schema.tensors, self._into), schema.tensors
            self._tensor_bytes = sum(t.nbytes for t in self._tensors.values())
        # Of another source, or of a later moment of the same.
        self._done = {begin for begin in self._done if begin + wire.RANGE_BYTES <= self._tensor_bytes}
        size = self._tensor_bytes + sum(length for _, length in schema.blobs)
        if size != schema.size:
            raise HealError(f"it announced {schema.size} bytes for a schema of {size}")


def _room(schema: list[tuple[str, str, list[int]]], into: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The buffers for a schema: those of `into`, which must be as the schema says, or fresh ones."""
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype_name, shape in schema:
        dtype = DTYPES.get(dtype_name)
        if dtype is None or name in tensors:
            raise HealError(f"'{name}' has the unknown dtype {dtype_name}, or comes twice")
        if into is None:
            tensors[name] = _fresh(name, dtype, shape)
            continue
        given = into.get(name)
        if given is None:
            raise HealError(f"it offers '{name}', which this group does not have")
        if (given.dtype, list(given.shape)) != (dtype, shape):
            raise HealError(f"'{name}' is {dtype} {shape} there and {given.dtype} {list(given.shape)} here")
        if given.device.type != "cpu" or not given.is_contiguous():
            raise HealError(f"the buffer for '{name}' must be contiguous and in host memory")
        tensors[name] = given
    for name in into or ():
        if name not in tensors:
            raise HealError(f"it does not offer '{name}'")
    return tensors


def _fresh(name: str, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise HealError(f"'{name}' has the impossible shape {shape}")
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise HealError(f"there is no memory for '{name}' of shape {shape}: {error}".splitlines()[0]) from error


def fetch(
    address: str,
    token: bytes,
    step: int,
    into: Mapping[str, torch.Tensor] | None,
    timeout: timedelta,
    connections: int = DEFAULT_CONNECTIONS,
    *,
    history: int = 0,
    whose: Whose = Whose(),
    encrypt: bool = False,
) -> HealState:
    """The state of committed step `step` in one go; see `Fetch` and `Fetch.run`."""
    wanted = Fetch(token, step, into, history=history, whose=whose, connections=connections, encrypt=encrypt)
    return wanted.run(address, timeout)
