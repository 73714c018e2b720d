"""The heal transport: a live group's state for a group that joins.

The source opens its state for one committed step (`HealServer.serve`), joiners read it (`fetch`) while the
source computes its slots, and the source closes the gate before its optimizer changes the tensors
(`close_gate`). The tensors are read in place: no copy of the state is made on the source, and on the joiner
the bytes land in their final buffers.

What travels is a schema (names, dtypes, shapes as JSON), raw tensor bytes, a JSON object and named byte
strings; nothing that is executed on arrival, as a pickle would be. `everstep.wire` authenticates with the
run's token and checks every chunk in the destination's memory.
"""

import bisect
import itertools
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from everstep import wire

SCHEMA_VERSION = 1
DEFAULT_CONNECTIONS = 4


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
    """A state's tensors and blobs laid end to end (`wire.Bytes`), read in place.

    What lies on a device is staged through a pinned buffer of the reading thread, one chunk at a time. These
    copies run on a stream of their own that waits for what the serving thread's stream had queued when the
    state was opened: they see the committed values and do not hold up the computation.
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

    def views(self, offset: int, length: int) -> list[memoryview]:
        end, views, staged = offset + length, [], 0
        index = bisect.bisect_right(self._ends, offset)
        while offset < end:
            part, stop = self._parts[index], min(end, self._ends[index])
            start = self._ends[index] - len(part)
            piece = part[offset - start : stop - start]
            if isinstance(piece, torch.Tensor):
                views.append(self._stage(piece, staged))
                staged += len(piece)
            else:
                views.append(piece)
            offset, index = stop, index + 1
        if staged:
            self._own.stream.synchronize()
        return views

    def _stage(self, piece: torch.Tensor, at: int) -> memoryview:
        own = self._own
        if not hasattr(own, "stream"):
            own.stream = torch.cuda.Stream(self._device)
            own.stream.wait_event(self._ready)
            own.buffer = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8, pin_memory=True)
        target = own.buffer[at : at + len(piece)]
        with torch.cuda.stream(own.stream):
            target.copy_(piece, non_blocking=True)
        return target.numpy().data


def _schema(step: int, state: HealState) -> dict[str, Any]:
    return {
        "version": SCHEMA_VERSION,
        "step": step,
        "tensors": [[n, str(t.dtype).removeprefix("torch."), list(t.shape)] for n, t in state.tensors.items()],
        "blobs": [[n, len(b)] for n, b in state.blobs.items()],
        "meta": state.meta,
    }


class HealServer:
    """Serves one group rank's state to joiners, by threads of its own.

    A request for a step that is not open yet waits for `serve`; one for a step that is over is refused. So a
    joiner and its source need not agree on who is ready first.
    """

    def __init__(self, host: str, token: bytes, timeout: timedelta = timedelta(seconds=60)) -> None:
        """`host`: address to listen on and advertise (fault_tolerance.bind_host). `timeout`: the longest
        silence of a joiner before its connection is given up, and the longest that a request waits for its
        step to be opened."""
        self._timeout = timeout
        self._changed = threading.Condition()
        self._step = -1
        self._open = False
        self._source: _StateBytes | None = None
        self._answer: dict[str, Any] = {}
        self._readers: dict[wire.Channel, str] = {}  # the transfer that each connection belongs to
        self._server = wire.Server(host, token, self._talk, timeout)
        self.address = self._server.address
        """`host:port` to hand to `fetch`."""

    def serve(self, step: int, state: HealState) -> None:
        """Open `state` to readers as that of committed step `step`, until `close_gate`.

        The tensors are read in place: none may change before `close_gate` has returned.
        """
        with self._changed:
            # A step that is served again, in another attempt: who asks in between waits instead of being refused.
            self._step = min(self._step, step - 1)
        self.close_gate(self._timeout)
        source, answer = _StateBytes(state), _schema(step, state)
        with self._changed:
            self._step, self._open, self._source, self._answer = step, True, source, answer
            self._changed.notify_all()

    def close_gate(self, timeout: timedelta) -> bool:
        """Let no new reader in, wait for the ones there, and give the tensors back to the caller.

        Readers still there after `timeout` are cut off; they see a HealError. Afterwards no thread reads the
        tensors. Costs one lock when nothing is open. Returns whether every reader had what it came for.
        """
        with self._changed:
            self._open = False
            finished = self._changed.wait_for(lambda: not self._readers, timeout.total_seconds())
            if not finished:
                for channel in self._readers:
                    channel.cut()
                self._changed.wait_for(lambda: not self._readers)
            self._source, self._answer = None, {}
        return finished

    def shutdown(self) -> None:
        """Cut every reader off and stop listening."""
        self.close_gate(timedelta(0))
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
        with self._changed:
            if request.get("op") == "join":
                transfer = str(request.get("transfer"))
                if self._source is None or transfer not in self._readers.values():
                    raise wire.RefusedError("the transfer that this connection belongs to has ended")
                self._readers[channel] = transfer
                return self._source, {}
            step = int(request.get("step", -1))
            patience_s = min(float(request.get("patience_s", 0)), self._timeout.total_seconds())
            if not self._changed.wait_for(lambda: self._step >= step, patience_s):
                raise wire.RefusedError(
                    f"step {step} was not opened here within {patience_s:g} s; the last was {self._step}"
                )
            if self._step != step:
                raise wire.RefusedError(f"step {step} is over here: step {self._step} was opened since")
            if not self._open or self._source is None:
                raise wire.RefusedError(f"step {step} is being left here: its optimizer step has begun")
            transfer = uuid.uuid4().hex
            self._readers[channel] = transfer
            return self._source, {**self._answer, "transfer": transfer, "size": self._source.size}


def _place(answer: dict[str, Any], step: int, into: Mapping[str, torch.Tensor] | None) -> HealState:
    """The buffers for a schema: those of `into`, which must be as the schema says, or fresh ones."""
    if answer.get("version") != SCHEMA_VERSION:
        raise HealError(f"its schema has version {answer.get('version')}, not {SCHEMA_VERSION}")
    if answer["step"] != step:
        raise HealError(f"it offers step {answer['step']}, not {step}")
    state = HealState(meta=answer["meta"])
    for name, dtype_name, shape in answer["tensors"]:
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise HealError(f"'{name}' has the unknown dtype {dtype_name}")
        if into is None:
            state.tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        given = into.get(name)
        if given is None:
            raise HealError(f"it offers '{name}', which this group does not have")
        if (given.dtype, list(given.shape)) != (dtype, shape):
            raise HealError(f"'{name}' is {dtype} {shape} there and {given.dtype} {list(given.shape)} here")
        if given.device.type != "cpu" or not given.is_contiguous():
            raise HealError(f"the buffer for '{name}' must be contiguous and in host memory")
        state.tensors[name] = given
    for name in into or ():
        if name not in state.tensors:
            raise HealError(f"it does not offer '{name}'")
    return state


def fetch(
    address: str,
    token: bytes,
    step: int,
    into: Mapping[str, torch.Tensor] | None,
    timeout: timedelta,
    connections: int = DEFAULT_CONNECTIONS,
) -> HealState:
    """The state of committed step `step` from the `HealServer` at `address`, every byte verified.

    Args:
        into: host tensors to receive into, exactly the source's by name, dtype and shape. None: fresh ones.
        timeout: the longest silence of the source, and the longest wait for it to open the step.
        connections: parallel connections, fewer for a small state.

    Raises:
        HealError: wrong token, step or schema, a checksum that does not match, a source that refused, died
            or fell silent. What `into` holds is then undefined.
    """
    channels: list[wire.Channel] = []
    started = time.monotonic()
    try:
        channels.append(wire.connect(address, token, timeout))
        # A little less than our own patience, so that the source's reason arrives before we give up.
        answer = channels[0].ask({"op": "open", "step": step, "patience_s": 0.9 * timeout.total_seconds()})
        state = _place(answer, step, into)
        blobs = {name: bytearray(size) for name, size in answer["blobs"]}
        sink = wire.Pieces([*(_memory_of(t) for t in state.tensors.values()), *map(memoryview, blobs.values())])
        if sink.size != answer["size"]:
            raise HealError(f"it announced {answer['size']} bytes for a schema of {sink.size}")
        for _ in range(min(connections, -(-sink.size // wire.RANGE_BYTES)) - 1):
            channels.append(wire.connect(address, token, timeout))
            channels[-1].ask({"op": "join", "transfer": answer["transfer"]})
        wire.pull(channels, sink)
    except (wire.WireError, HealError) as error:
        waited_s = time.monotonic() - started
        raise HealError(f"no state of step {step} from {address} after {waited_s:.1f} s: {error}") from error
    finally:
        for channel in channels:
            channel.close()
    state.blobs = {name: bytes(blob) for name, blob in blobs.items()}
    return state
