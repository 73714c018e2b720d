"""Messages and byte ranges over an admitted connection."""

import bisect
import contextlib
import math
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from cryptography.exceptions import InvalidTag
from pydantic_core import from_json, to_json

from everstep.wire.sealing import TAG_BYTES, Sealer

CHUNK_BYTES = 1 << 18  # small enough to stay in the processor's cache while it is sealed or opened
FRAME_LIMIT_BYTES = 64 << 20
_FRAME, _CHUNK = 0, 1
_HEAD = struct.Struct("<BQI")  # kind of record, offset of a chunk, length of the content


class WireError(ConnectionError):
    """A connection or transfer failed. The message is one sentence."""


class RefusedError(WireError):
    """The peer understood the request and refuses it. The message is the peer's reason."""


class Bytes(Protocol):
    """A sequence of bytes in one or several buffers, such as concatenated tensors or a mapped file."""

    size: int

    def views(self, offset: int, length: int) -> Sequence[memoryview]:
        """Return the memory of [offset, offset + length), in order. A source is asked for at most CHUNK_BYTES, and its
        views are valid until this thread's next call."""
        ...


class Pieces:
    """Several buffers that are read or written as if they were concatenated."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [b.cast("B") for b in buffers if b.nbytes]
        self._ends: list[int] = []
        self.size = 0
        for b in self._buffers:
            self.size += b.nbytes
            self._ends.append(self.size)

    def views(self, offset: int, length: int) -> list[memoryview]:
        end, out = offset + length, []
        i = bisect.bisect_right(self._ends, offset)
        while offset < end:
            buffer, start = self._buffers[i], self._ends[i] - self._buffers[i].nbytes
            out.append(buffer[offset - start : min(end, self._ends[i]) - start])
            offset, i = self._ends[i], i + 1
        return out


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of an address `host:port`, `[v6]:port` or `v6:port`. Raises WireError for anything else."""
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    known = 0 < len(host) <= 255 and host.isascii() and host.isprintable() and not set(host) & set(" /@[]")
    if not known or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise WireError(f"{address[:300]!r} is not an address of the form host:port")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Return the address of host and port; the inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Channel:
    """One authenticated connection. Only `cut` and `hung_up` may be called while another thread uses it."""

    _outgoing: Sealer
    _incoming: Sealer

    def __init__(self, sock: socket.socket, peer: str, timeout: timedelta) -> None:
        self.sock, self.peer, self._deadline = sock, peer, math.inf
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeout(timeout)

    def seal(self, outgoing: Sealer, incoming: Sealer) -> None:
        """Set the sealers for the records that this side sends and receives. Called once the handshake is done."""
        self._outgoing, self._incoming = outgoing, incoming

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a send or receive waits without any progress before it fails."""
        # The kernel's timeouts, because Python's make the socket non-blocking, and then MSG_WAITALL does not wait.
        self._timeout_s = timeout.total_seconds()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._wait_at_most(self._timeout_s, option)

    def _wait_at_most(self, seconds: float, option: int) -> None:
        micros = max(1000, int(seconds * 1_000_000))
        self.sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(micros, 1_000_000)))

    def set_deadline(self, deadline: float) -> None:
        """Set a `time.monotonic()` at which a receive fails, even if the peer keeps sending; `math.inf` for none."""
        self._deadline = deadline
        self._wait_at_most(self._timeout_s, socket.SO_RCVTIMEO)

    def close(self) -> None:
        self.sock.close()

    def cut(self) -> None:
        """End the connection, from any thread. A send or receive in progress fails at once."""
        with contextlib.suppress(OSError):  # the connection may have ended already
            self.sock.shutdown(socket.SHUT_RDWR)

    def hung_up(self) -> bool:
        """Return whether the peer closed the connection or died; False while bytes of it are unread. For any thread."""
        try:
            return self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive_into(self, view: memoryview) -> None:
        """Fill `view` with received bytes. Raises WireError if the peer closes the connection, dies, or is silent for
        longer than the timeout, or if the deadline passes."""
        got = 0
        while got < view.nbytes:
            if self._deadline != math.inf:
                if (left_s := self._deadline - time.monotonic()) <= 0:
                    raise WireError(f"{self.peer} took too long")
                self._wait_at_most(min(left_s, self._timeout_s), socket.SO_RCVTIMEO)
            try:
                n = self.sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() > self._deadline - 0.1:  # the deadline, not silence
                    continue
                raise WireError(f"{self.peer} was silent for {self._timeout_s:g} s") from None
            except OSError as error:
                raise WireError(f"the connection to {self.peer} broke: {error}") from error
            if n == 0:
                raise WireError(f"{self.peer} closed the connection")
            got += n

    def receive(self, nbytes: int) -> bytes:
        """Return the next bytes, exactly so many. Raises like `receive_into`."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def send(self, data: bytes | bytearray) -> None:
        """Send bytes unsealed. Raises WireError if the connection breaks or the peer takes no byte for the timeout."""
        try:
            self.sock.sendall(data)
        except BlockingIOError:
            raise WireError(f"{self.peer} received nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise WireError(f"the connection to {self.peer} broke: {error}") from error

    def _send_record(self, kind: int, offset: int, views: Sequence[memoryview]) -> None:
        head = _HEAD.pack(kind, offset, sum(view.nbytes for view in views))
        self.send(self._outgoing.seal(head, views))

    def _open(self, head: bytes, sealed: memoryview, into: Sequence[memoryview]) -> None:
        try:
            self._incoming.open(head, sealed, into)
        except InvalidTag:
            raise WireError(f"a record from {self.peer} was altered on the way") from None

    def send_frame(self, message: Any) -> None:
        """Send a message, a dictionary or dataclass, or its JSON, so that one to many peers is encoded only once."""
        body = message if isinstance(message, bytes) else to_json(message)
        self._send_record(_FRAME, 0, [memoryview(body)])

    def receive_frame(self) -> dict[str, Any]:
        """Return the next message. Raises RefusedError if it is a refusal, WireError if it is no valid message."""
        return self._message(self.receive(_HEAD.size))

    def _message(self, head: bytes) -> dict[str, Any]:
        kind, _, length = _HEAD.unpack(head)
        if kind != _FRAME or length > FRAME_LIMIT_BYTES:
            raise WireError(f"{self.peer} did not send a message, or one of over {FRAME_LIMIT_BYTES} bytes")
        sealed = bytearray()
        while left := length + TAG_BYTES - len(sealed):  # memory for received bytes only, not for the announced length
            sealed += self.receive(min(CHUNK_BYTES, left))
        body = bytearray(length)
        self._open(head, memoryview(sealed), [memoryview(body)])
        try:
            message = from_json(body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise WireError(f"{self.peer} sent a message that is not a JSON object")
        if "refused" in message:
            raise RefusedError(str(message["refused"]))
        return message

    def ask(self, message: Any) -> dict[str, Any]:
        """Send a message and return the answer. Raises RefusedError with the peer's reason."""
        self.send_frame(message)
        return self.receive_frame()

    def ask_range(self, offset: int, length: int) -> None:
        """Request bytes, to be received with `receive_range`. Several ranges can be requested ahead."""
        self.send_frame({"op": "read", "offset": offset, "length": length})

    def send_range(self, source: Bytes, offset: int, length: int) -> None:
        """Answer a read with the bytes, as chunks. Raises RefusedError if the range is not within `source`."""
        if offset < 0 or length < 0 or offset + length > source.size:
            raise RefusedError(f"bytes {offset} to {offset + length} were requested, but there are {source.size}")
        for start in range(offset, offset + length, CHUNK_BYTES):
            n = min(CHUNK_BYTES, offset + length - start)
            self._send_record(_CHUNK, start, source.views(start, n))

    def receive_range(self, sink: Bytes, offset: int, length: int, base: int = 0) -> None:
        """Receive the answer to a read, or its next whole chunks, directly into `sink`. `base` is the offset of the
        sink's first byte. Raises RefusedError if the peer refuses, which it can do in place of any chunk, and
        WireError at the first wrong chunk."""
        memory = memoryview(bytearray(min(CHUNK_BYTES, length) + TAG_BYTES))
        for start in range(offset, offset + length, CHUNK_BYTES):
            n = min(CHUNK_BYTES, offset + length - start)
            head = self.receive(_HEAD.size)
            if head != _HEAD.pack(_CHUNK, start, n):
                self._message(head)
                raise WireError(f"{self.peer} sent a message instead of a chunk")
            sealed = memory[: n + TAG_BYTES]
            self.receive_into(sealed)
            self._open(head, sealed, sink.views(start - base, n))


def pull(channel: Channel, sink: Bytes) -> None:
    """Fill `sink` from the byte ranges that `channel` serves. Raises WireError."""
    channel.ask_range(0, sink.size)
    channel.receive_range(sink, 0, sink.size)


def serve_ranges(channel: Channel, source: Bytes) -> dict[str, Any] | None:
    """Answer reads until another message comes, and return it; None if receiving fails. Raises RefusedError for a range
    that `source` does not have, and WireError if sending fails."""
    while True:
        try:
            message = channel.receive_frame()
        except WireError:
            return None
        if message.get("op") != "read":
            return message
        offset, length = message.get("offset"), message.get("length")
        if type(offset) is not int or type(length) is not int:
            raise RefusedError("offset and length of a range must be integers")
        channel.send_range(source, offset, length)
