"""Bytes between two processes of one run: authenticated, checksummed, in parallel, and without pickle.

The heal transport (a live group's state to a joiner) and the keepers (snapshot parts and parity) both speak
this.

A connection, from its first byte:

1. Server: magic, 32 random bytes. Client: 32 random bytes and HMAC-SHA256(token, "client", both). The server
   checks it in constant time and answers with HMAC-SHA256(token, "server", both), so that either side knows
   the other holds the run's token. The token itself never travels. Before this nothing of a peer is parsed.
2. Frames: JSON objects with a length and an XXH3 checksum in front. What they mean is the caller's business.
3. Ranges: the client asks for `{"op": "read", "offset": o, "length": n}`; the server answers with a frame
   (agreement or refusal) and then chunks, each with its offset, length and XXH3-64 in front, computed from
   the source's memory and checked in the destination's.

This keeps out strangers and notices every corruption. It is not encryption: someone who can read or alter the
network's packets can read or alter a transfer, as with the gradient sums beside it.
"""

import bisect
import contextlib
import hmac
import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import xxhash

MAGIC = b"everwir1"
NONCE_BYTES = 32
CHUNK_BYTES = 1 << 20  # small enough to be hashed while still in the cache that the socket filled
RANGE_BYTES = 8 << 20  # what one request asks for; the next is asked for before the last has arrived
FRAME_LIMIT_BYTES = 64 << 20
HANDSHAKE_TIMEOUT = timedelta(seconds=5)
_MAX_IOV = 512
_FRAME = struct.Struct("<IQ")
_CHUNK = struct.Struct("<QIQ")


class WireError(ConnectionError):
    """A transfer that did not succeed, in one sentence."""


class RefusedError(WireError):
    """The other side understood the request and refuses it; its reason is the message."""


class Bytes(Protocol):
    """A run of bytes that need not lie in one piece: tensors laid end to end, or a file's map."""

    size: int

    def views(self, offset: int, length: int) -> list[memoryview]:
        """The memory of [offset, offset + length), in order."""
        ...


class Pieces:
    """Several buffers read or written as if they lay end to end."""

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
    """`host:port` or `[v6]:port` → (host, port). Raises WireError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise WireError(f"'{address}' is not an address of the form host:port")
    return host.strip("[]"), int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _timeval(timeout: timedelta) -> bytes:
    s = max(timeout.total_seconds(), 0.001)
    return struct.pack("@ll", int(s), int(s % 1 * 1_000_000))


class Channel:
    """One authenticated connection. Not for use by two threads at once, except `cut`."""

    def __init__(self, sock: socket.socket, peer: str, timeout: timedelta) -> None:
        self._sock = sock
        self.peer = peer
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """The longest silence of the peer that is borne in one send or receive."""
        # Kernel timeouts and not Python's: with those the socket is non-blocking, and MSG_WAITALL would not
        # wait.
        self._timeout_s = timeout.total_seconds()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))

    def close(self) -> None:
        self._sock.close()

    def cut(self) -> None:
        """End the connection from another thread: a send or receive in progress fails at once."""
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._sock.shutdown(socket.SHUT_RDWR)

    def _silent(self) -> WireError:
        return WireError(f"{self.peer} was silent for {self._timeout_s:g} s")

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises WireError when the peer closes, dies or is silent for longer than the
        timeout."""
        got = 0
        while got < view.nbytes:
            try:
                n = self._sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise self._silent() from None
            except OSError as error:
                raise WireError(f"the connection to {self.peer} broke: {error}") from error
            if n == 0:
                raise WireError(f"{self.peer} closed the connection")
            got += n

    def receive(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def send(self, views: Sequence[bytes | memoryview]) -> None:
        """Send the buffers in order, without joining them."""
        pending = [memoryview(v).cast("B") for v in views if len(v)]
        while pending:
            try:
                sent = self._sock.sendmsg(pending[:_MAX_IOV])
            except BlockingIOError:
                raise self._silent() from None
            except OSError as error:
                raise WireError(f"the connection to {self.peer} broke: {error}") from error
            while pending and sent >= pending[0].nbytes:
                sent -= pending.pop(0).nbytes
            if sent:
                pending[0] = pending[0][sent:]

    def send_frame(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        if len(body) > FRAME_LIMIT_BYTES:
            raise WireError(f"a message of {len(body)} bytes is over the limit of {FRAME_LIMIT_BYTES}")
        self.send([_FRAME.pack(len(body), xxhash.xxh3_64_intdigest(body)), body])

    def receive_frame(self) -> dict[str, Any]:
        """The next message. Raises RefusedError if it is a refusal, WireError if it is damaged or not a
        message."""
        length, digest = _FRAME.unpack(self.receive(_FRAME.size))
        if length > FRAME_LIMIT_BYTES:
            raise WireError(f"{self.peer} announced a message of {length} bytes, over the limit of {FRAME_LIMIT_BYTES}")
        body = self.receive(length)
        if xxhash.xxh3_64_intdigest(body) != digest:
            raise WireError(f"a message from {self.peer} does not match its checksum")
        try:
            message = json.loads(body)
        except ValueError as error:
            raise WireError(f"{self.peer} sent a message that is not JSON") from error
        if not isinstance(message, dict):
            raise WireError(f"{self.peer} sent {type(message).__name__} where an object was due")
        if "refused" in message:
            raise RefusedError(str(message["refused"]))
        return message

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer. Raises RefusedError with the peer's reason."""
        self.send_frame(message)
        return self.receive_frame()

    def send_range(self, source: Bytes, offset: int, length: int) -> None:
        """Answer a read: the bytes as checksummed chunks. Raises RefusedError when they are not all there."""
        if offset < 0 or length < 0 or offset + length > source.size:
            raise RefusedError(f"bytes {offset} to {offset + length} were asked for, of {source.size}")
        self.send_frame({"length": length})
        for start in range(offset, offset + length, CHUNK_BYTES):
            n = min(CHUNK_BYTES, offset + length - start)
            views = source.views(start, n)
            self.send([_CHUNK.pack(start, n, _digest(views)), *views])

    def receive_range(self, sink: Bytes, offset: int, length: int) -> None:
        """Take the answer to a read straight into its place. Raises WireError on the first chunk that is not
        right."""
        self.receive_frame()
        for start in range(offset, offset + length, CHUNK_BYTES):
            n = min(CHUNK_BYTES, offset + length - start)
            if _CHUNK.unpack_from(head := self.receive(_CHUNK.size))[:2] != (start, n):
                raise WireError(f"{self.peer} sent another chunk than the one asked for at byte {start}")
            views = sink.views(start, n)
            for view in views:
                self.receive_into(view)
            if _digest(views) != _CHUNK.unpack(head)[2]:
                raise WireError(f"the chunk at byte {start} from {self.peer} does not match its checksum")


def _digest(views: Sequence[memoryview]) -> int:
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return digest.intdigest()


def _proof(token: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, MAGIC + role + server_nonce + client_nonce, "sha256")


def connect(address: str, token: bytes, timeout: timedelta) -> Channel:
    """An authenticated channel to a `Server`.

    Raises:
        WireError: nobody listens there, the listener is none of ours, or it does not hold the same token.
    """
    host, port = parse_address(address)
    try:
        sock = socket.create_connection((host, port), timeout=min(timeout, HANDSHAKE_TIMEOUT).total_seconds())
    except OSError as error:
        raise WireError(f"no connection to {address}: {error}") from error
    channel = Channel(sock, address, min(timeout, HANDSHAKE_TIMEOUT))
    try:
        hello = channel.receive(len(MAGIC) + NONCE_BYTES)
        if not hello.startswith(MAGIC):
            raise WireError(f"{address} does not speak this protocol")
        theirs, ours = hello[len(MAGIC) :], os.urandom(NONCE_BYTES)
        channel.send([ours, _proof(token, b"client", theirs, ours)])
        try:
            proof = channel.receive(NONCE_BYTES)
        except WireError as error:
            raise WireError(f"{address} did not accept the run's token: is it another run's?") from error
        if not hmac.compare_digest(proof, _proof(token, b"server", theirs, ours)):
            raise WireError(f"{address} does not hold the run's token")
    except WireError:
        channel.close()
        raise
    channel.set_timeout(timeout)
    return channel


class Server:
    """Listens, authenticates, and gives each connection a thread that runs `talk(channel)`.

    `talk` returns, or raises WireError, when the connection is over; a RefusedError that it raises is told to
    the peer first.
    """

    def __init__(self, host: str, token: bytes, talk: Callable[[Channel], None], timeout: timedelta) -> None:
        """`host`: name or address to listen on and advertise; "" for the host name's. The port is a free
        one."""
        if len(token) < 16:
            raise ValueError("the run's token must have at least 16 bytes")
        host = host or socket.gethostname()
        try:
            family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family, backlog=128)
        except OSError as error:
            raise WireError(f"cannot listen on '{host}' (fault_tolerance.bind_host): {error}") from error
        self.address = format_address(host, self._listener.getsockname()[1])
        self._token, self._talk, self._timeout = token, talk, timeout
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="wire-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, place = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                continue  # the client gave up before it was accepted, or descriptors ran out for the moment
            thread = threading.Thread(
                target=self._run, args=(sock, format_address(*place[:2])), name="wire-peer", daemon=True
            )
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._threads.add(thread)
            thread.start()

    def _run(self, sock: socket.socket, peer: str) -> None:
        channel = Channel(sock, peer, min(self._timeout, HANDSHAKE_TIMEOUT))
        with self._lock:
            self._channels.add(channel)
        try:
            if not self._closed and self._authenticate(channel):
                channel.set_timeout(self._timeout)
                try:
                    self._talk(channel)
                except RefusedError as refusal:
                    channel.send_frame({"refused": str(refusal)})
        except WireError:
            pass  # the peer ended or broke the connection; what that means is decided by whoever waits for it
        finally:
            with self._lock:
                self._channels.discard(channel)
                self._threads.discard(threading.current_thread())
            channel.close()

    def _authenticate(self, channel: Channel) -> bool:
        ours = os.urandom(NONCE_BYTES)
        channel.send([MAGIC, ours])
        answer = channel.receive(2 * NONCE_BYTES)
        theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._token, b"client", ours, theirs)):
            return False
        channel.send([_proof(self._token, b"server", ours, theirs)])
        return True

    def close(self) -> None:
        """Stop listening, cut every connection, and wait for their threads."""
        with self._lock:
            self._closed = True
            channels, threads = list(self._channels), list(self._threads)
        with contextlib.suppress(OSError):  # wakes accept(); some kernels call that an error on a listener
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in channels:
            channel.cut()
        for thread in [self._acceptor, *threads]:
            if thread is not threading.current_thread():
                thread.join(self._timeout.total_seconds())


def pull(channels: Sequence[Channel], sink: Bytes, done: set[int] | None = None) -> None:
    """Fill `sink` from the byte ranges that `channels` serve, each channel in a thread of its own.

    `done` holds the offsets of the ranges that have arrived and passed their checksums, and grows: call again
    with the same set and new channels to resume. Uses RANGE_BYTES of unread data per channel and no buffers
    of its own.

    Raises:
        WireError: of the first channel that failed; the others are cut.
    """
    done = set() if done is None else done
    ranges: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for offset in range(0, sink.size, RANGE_BYTES):
        if offset not in done:
            ranges.put((offset, min(RANGE_BYTES, sink.size - offset)))
    errors: list[WireError] = []

    def ask(channel: Channel) -> tuple[int, int] | None:
        try:
            offset, length = ranges.get_nowait()
        except queue.Empty:
            return None
        channel.send_frame({"op": "read", "offset": offset, "length": length})
        return offset, length

    def work(channel: Channel) -> None:
        try:
            due = ask(channel)
            while due is not None and not errors:
                following = ask(channel)
                channel.receive_range(sink, *due)
                done.add(due[0])
                due = following
        except WireError as error:
            errors.append(error)
            for other in channels:
                other.cut()

    threads = [threading.Thread(target=work, args=(c,), name="wire-pull") for c in channels[1:]]
    for thread in threads:
        thread.start()
    work(channels[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    missing = [offset for offset in range(0, sink.size, RANGE_BYTES) if offset not in done]
    if missing:
        raise WireError(f"{len(missing)} ranges from byte {missing[0]} on did not arrive")


def serve_ranges(channel: Channel, source: Bytes) -> dict[str, Any] | None:
    """Answer reads until another message comes, which is returned, or the peer leaves (None)."""
    while True:
        try:
            message = channel.receive_frame()
        except WireError:
            return None
        if message.get("op") != "read":
            return message
        channel.send_range(source, int(message.get("offset", -1)), int(message.get("length", -1)))
