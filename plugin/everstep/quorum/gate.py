"""The gate in front of torchft's lighthouse: only replicas of this run get through, and only with what replicas say.

torchft's lighthouse takes every replica in, forms no quorum while a stranger's heartbeats say that more are to come,
and ends any group for whoever asks (`POST /replica/ID/kill`, and a page that shows the ids). So it listens on loopback,
where after the gate's own connections nobody else can connect (`shut`), and the gate listens where groups reach it:

    Heartbeat, Quorum    passed on as they are if the replica's id was made with the run's token, who was not in the
                         last quorum when it is their turn (`everstep.quorum.turns`)
    Status               answered here, for whoever wants to know whether the lighthouse lives
    everything else      refused
"""

import asyncio
import contextlib
import ctypes
import math
import os
import socket
import stat
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from everstep.quorum.identity import StrangerError, read_id
from everstep.quorum.turns import HEAD_START_S, LOOK_S, Turns
from everstep.wire import WireError, parse_address

SERVICE = "/torchft.LighthouseService/"
STATUS = "/everstep.Lighthouse/Status"
ALIVE = b"everstep lighthouse"
CHANNELS = 32
"""Connections for quorum requests, which last; the lighthouse takes 200 at once on each."""
LARGEST_MESSAGE = 4 << 20
KNOWN_IDS = 100_000
TELL_EVERY_S = 60.0
CONNECT_TIMEOUT_S = 10.0
_HOUR_MS = 3_600_000
_SERVER_OPTIONS = [
    ("grpc.so_reuseport", 0),  # a port that is taken is an error
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 60_000),
]
_CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # one connection each
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # never: there would be no second one
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
]


class GateError(RuntimeError):
    """The gate cannot stand, or its lighthouse is gone; in one sentence."""


def replica_of(method: str, message: bytes) -> str:
    """The id in a Heartbeat (its field 1) or Quorum (field 1 of its field 1). Raises ValueError."""
    if method == "Quorum":
        message = _first_field(message)
    return _first_field(message).decode()


def members_of(answer: bytes) -> list[str]:
    """The ids in the answer to a Quorum: field 1 of each field 2 of its field 1. Raises ValueError."""
    return [_first_field(member).decode() for tag, member in _fields(_first_field(answer)) if tag == 0x12]


def _first_field(message: bytes) -> bytes:
    """Field 1 of a protocol buffer, which must be bytes or text and come first, and once."""
    fields = list(_fields(message))
    if not fields or fields[0][0] != 0x0A:
        raise ValueError("it does not begin with its first field")
    if sum(tag == 0x0A for tag, _ in fields) > 1:  # the later one would count
        raise ValueError("its first field comes twice")
    return fields[0][1]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The tags and contents of a message's fields (protocol buffers, encoding of version 3); contents are empty for
    numbers. Raises ValueError for what is no message."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while at < len(message) and shift < 70:
            byte = message[at]
            value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
            if byte < 0x80:
                return value
        raise ValueError("it is cut off")

    while at < len(message):
        tag = number()
        content = b""
        match tag & 7:
            case 0:
                number()
            case 1:
                at += 8
            case 2:
                length = number()
                content = message[at : at + length]
                at += length
            case 5:
                at += 4
            case _:
                raise ValueError("a field is of no known kind")
        if at > len(message):
            raise ValueError("it is cut off")
        yield tag, content


class Gate(grpc.GenericRpcHandler):
    """Admits requests by id and passes them to a lighthouse.

    Args:
        token: of the run.
        inner: `host:port` of the lighthouse.
        every_s: one replica's heartbeats are passed on this often at most; the others are answered here.
        heartbeat_timeout_s: a replica that is silent for so long is gone.
        tell: called now and then with how many requests of strangers were refused, and what the last one was.
    """

    def __init__(
        self, token: bytes, inner: str, every_s: float, heartbeat_timeout_s: float, tell: Callable[[int, str], None]
    ) -> None:
        self._token, self._every_s, self._tell = token, every_s, tell
        self._heard: dict[str, float] = {}
        self._turns = Turns(
            lambda replica: time.monotonic() - self._heard.get(replica, -math.inf) < heartbeat_timeout_s
        )
        self._turn = asyncio.Condition()
        self._held = 0
        """Requests that wait for their turn."""
        self._last_answer = b""
        self._known: dict[str, float] = {}
        """Replicas of the run, and when their heartbeats were last passed on."""
        self._refused, self._told = 0, -TELL_EVERY_S
        self._channels = [grpc.aio.insecure_channel(inner, options=_CHANNEL_OPTIONS) for _ in range(CHANNELS + 1)]
        calls = [channel.unary_unary(SERVICE + "Quorum") for channel in self._channels[1:]]
        self._quorum = dict(enumerate(calls))
        self._heartbeat = self._channels[0].unary_unary(SERVICE + "Heartbeat")
        self._waiting = Counter(dict.fromkeys(self._quorum, 0))
        self.lost = asyncio.Event()
        """Set when the lighthouse does not answer on its connection any more."""

    async def connect(self) -> None:
        """Raises GateError when the lighthouse is not there."""
        try:
            await asyncio.wait_for(
                asyncio.gather(*(channel.channel_ready() for channel in self._channels)), CONNECT_TIMEOUT_S
            )
        except TimeoutError:
            raise GateError("torchft's lighthouse does not answer behind its gate") from None

    def service(self, handler_call_details: Any) -> Any:
        """See `grpc.GenericRpcHandler`."""
        handlers = {
            SERVICE + "Heartbeat": self._on_heartbeat,
            SERVICE + "Quorum": self._on_quorum,
            STATUS: self._on_status,
        }
        found = handlers.get(handler_call_details.method)
        return grpc.unary_unary_rpc_method_handler(found) if found else None

    async def _on_status(self, message: bytes, context: Any) -> bytes:
        return ALIVE

    async def _on_heartbeat(self, message: bytes, context: Any) -> bytes:
        replica = await self._admit("Heartbeat", message, context)
        now = self._heard[replica] = time.monotonic()
        if now - self._known[replica] < self._every_s:
            return b""  # as the lighthouse answers
        self._known[replica] = now
        return await self._pass(self._heartbeat, message, context)

    async def _on_quorum(self, message: bytes, context: Any) -> bytes:
        replica = await self._admit("Quorum", message, context)
        self._heard[replica] = time.monotonic()
        await self._wait_for_turn(replica)
        number = min(self._waiting, key=self._waiting.__getitem__)
        self._waiting[number] += 1
        try:
            answer = await self._pass(self._quorum[number], message, context)
        finally:
            self._waiting[number] -= 1
        if answer != self._last_answer:  # all members get the same, with the time at which it was made
            self._last_answer = answer
            self._turns.formed(members_of(answer))
        return answer

    async def _wait_for_turn(self, replica: str) -> None:
        self._turns.asked(replica)
        if self._held and self._turns.may_pass():
            async with self._turn:
                self._turn.notify_all()
            await asyncio.sleep(HEAD_START_S)
        while not self._turns.may_pass():
            self._held += 1
            try:
                async with asyncio.timeout(LOOK_S), self._turn:
                    await self._turn.wait()
            except TimeoutError:
                pass  # those it waits for may have died
            finally:
                self._held -= 1

    async def _admit(self, method: str, message: bytes, context: Any) -> str:
        try:
            replica = replica_of(method, message)
            if replica not in self._known:
                read_id(self._token, replica)
                if len(self._known) >= KNOWN_IDS:
                    self._known.clear()
                    self._heard.clear()
                self._known[replica] = -math.inf
            return replica
        except (StrangerError, ValueError) as error:
            self._refused += 1
            if time.monotonic() - self._told > TELL_EVERY_S:
                self._told = time.monotonic()
                self._tell(self._refused, f"{context.peer()}: {error}")
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this lighthouse is of another run")
            raise AssertionError("abort raises") from error

    async def _pass(self, call: Callable[..., Awaitable[bytes]], message: bytes, context: Any) -> bytes:
        try:
            left_s = context.time_remaining()
            return await call(message, timeout=min(left_s, _HOUR_MS / 1000) if left_s is not None else None)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                self.lost.set()
            await context.abort(error.code(), error.details() or "")
            raise AssertionError("abort raises") from error

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def serve(gate: Gate, bind: str, on_listening: Callable[[], None]) -> None:
    """Listen on `bind` ("host:port") until cancelled.

    Raises:
        GateError: the address cannot be listened on, or the lighthouse is gone.
    """
    server = grpc.aio.server(handlers=[gate], options=_SERVER_OPTIONS)
    try:
        if server.add_insecure_port(bind) == 0:
            raise RuntimeError("no port")
    except RuntimeError as error:
        raise GateError(f"cannot listen on {bind}: {error}".partition("\n")[0]) from error
    await server.start()
    on_listening()
    try:
        await gate.lost.wait()
        raise GateError("torchft's lighthouse has gone from behind its gate")
    finally:
        await server.stop(grace=None)


def check_free(bind: str) -> None:
    """Raises GateError, with the kernel's reason, when `bind` ("host:port") cannot be listened on."""
    try:
        host, port = parse_address(bind)
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(place[:2], family=family).close()
    except (OSError, ValueError, WireError) as error:
        raise GateError(f"cannot listen on {bind}: {error}") from error


def shut(port: int) -> bool:
    """Let nobody else connect to a port of 127.0.0.1 that this process listens on and has connected to.

    The kernel drops what comes to the listening socket (SO_ATTACH_FILTER with a filter that takes nothing), and
    connections of others that came before are closed. Returns whether that worked, which it does not where the kernel
    knows no filters.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET | BPF_K, 0 bytes
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    own, shut_ones = set(), 0  # own: ports that this process has connected from
    sockets = list(_own_sockets())
    try:
        for sock in sockets:
            with contextlib.suppress(OSError):
                if sock.getpeername()[1] == port:
                    own.add(sock.getsockname()[1])
            if sock.getsockname()[1] == port and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
                shut_ones += 1
        for sock in sockets:
            with contextlib.suppress(OSError):
                if sock.getsockname()[1] == port and sock.getpeername()[1] not in own:
                    sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    finally:
        for sock in sockets:
            sock.close()
    return shut_ones > 0


def _own_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each under a descriptor of its own."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            fd = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
                continue
            sock = socket.socket(fileno=fd)
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
            else:
                sock.close()


def loopback_port(address: str) -> int:
    """The port of `http://host:port`."""
    return int(address.rstrip("/").rpartition(":")[2])
