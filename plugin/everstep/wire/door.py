"""Listening, and who is let in: processes that hold the run's token."""

import contextlib
import errno
import hashlib
import hmac
import math
import os
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from everstep.wire import sealing
from everstep.wire.channel import Channel, RefusedError, SilentError, WireError, format_address, parse_address
from everstep.wire.sealing import Sealer, Suite

MAGIC = b"everwir2"
NONCE_BYTES = 32
SUBJECT_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_TIMEOUT = timedelta(seconds=5)
"""For the whole handshake, and not for each part of it."""
STRANGERS = 128
"""Connections that have not shown yet that they hold the token. The oldest of more is closed: a member needs a
millisecond."""
TRIES = 3
"""How often a client tries that was closed before it could say anything, as one of too many strangers."""
_HELLO = struct.Struct(f"<{len(MAGIC)}sB{NONCE_BYTES}s")
_ANSWER = struct.Struct(f"<B{SUBJECT_BYTES}s{NONCE_BYTES}s{PROOF_BYTES}s")
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_PAUSE_S = 0.05


def _mac(token: bytes, role: bytes, hello: bytes, answer: bytes, purpose: str) -> bytes:
    """`answer`: the client's, without its proof."""
    name = purpose.encode()
    return hmac.digest(token, role + b"\0" + hello + answer + struct.pack("<H", len(name)) + name, hashlib.sha256)


@dataclass(frozen=True)
class Admitted:
    """A connection whose other side holds the run's token."""

    sock: socket.socket
    peer: str
    subject: bytes
    to_client: Sealer
    to_server: Sealer


def _sealers(token: bytes, suite: Suite, hello: bytes, answer: bytes, purpose: str) -> tuple[Sealer, Sealer]:
    """For what the server sends, and for what the client sends."""
    roles = (b"key to client", b"key to server")
    to_client, to_server = (Sealer(_mac(token, role, hello, answer, purpose), suite) for role in roles)
    return to_client, to_server


def connect(
    address: str,
    token: bytes,
    timeout: timedelta,
    *,
    purpose: str = "",
    subject: bytes = bytes(SUBJECT_BYTES),
    encrypt: bool | None = False,
) -> Channel:
    """An authenticated channel to a `Server` or a `Door` of this `purpose`.

    Args:
        timeout: the longest silence of the peer, then and later.
        subject: SUBJECT_BYTES bytes that the other side is told.
        encrypt: True refuses a server that would have us send in the clear; None does as the server wants, which
            proves with the token that it does.

    Raises:
        WireError: nobody listens there, the listener is none of ours, or it does not hold the same token.
    """
    host, port = parse_address(address)
    able = sealing.suites(encrypt)
    deadline = time.monotonic() + min(timeout, HANDSHAKE_TIMEOUT).total_seconds()
    for left in reversed(range(TRIES)):
        try:
            sock = socket.create_connection((host, port), timeout=max(0.001, deadline - time.monotonic()))
        except (OSError, ValueError) as error:  # ValueError: a name that the resolver cannot take
            raise WireError(f"no connection to {address}: {error}") from error
        channel = Channel(sock, address, min(timeout, HANDSHAKE_TIMEOUT))
        channel.set_deadline(deadline)
        try:
            try:
                hello = channel.receive(_HELLO.size)
            except WireError:
                if not left or time.monotonic() > deadline:
                    raise
                channel.close()
                time.sleep(_PAUSE_S)
                continue
            _shake_hands(channel, address, token, hello, able, purpose, subject)
        except WireError:
            channel.close()
            raise
        channel.set_deadline(math.inf)
        channel.set_timeout(timeout)
        return channel
    raise AssertionError("the last try returns or raises")


def answers(address: str, timeout: timedelta) -> bool:
    """Whether a `Door` at `address` says its name within the timeout, as one that hangs does not. Nothing is proved."""
    said, deadline = b"", time.monotonic() + timeout.total_seconds()
    try:
        with socket.create_connection(parse_address(address), timeout.total_seconds()) as sock:
            while len(said) < len(MAGIC) and (left_s := deadline - time.monotonic()) > 0:
                sock.settimeout(left_s)
                if not (more := sock.recv(len(MAGIC) - len(said))):
                    break
                said += more
    except (OSError, ValueError):  # ValueError: a name that the resolver cannot take
        return False
    return said == MAGIC


def _shake_hands(
    channel: Channel, address: str, token: bytes, hello: bytes, able: Suite, purpose: str, subject: bytes
) -> None:
    magic, offered, _ = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise WireError(f"{address} does not speak this protocol")
    suite = sealing.choose(Suite(offered), able)
    if suite is None:
        raise WireError(
            f"{address} and this process have no protection of messages in common: fault_tolerance.encrypt "
            "must be the same everywhere"
        )
    answer = _ANSWER.pack(suite, subject, os.urandom(NONCE_BYTES), b"")[:-PROOF_BYTES]
    channel.send([answer, _mac(token, b"client", hello, answer, purpose)])
    try:
        proof = channel.receive(PROOF_BYTES)
    except SilentError:
        raise
    except WireError as error:
        raise WireError(f"{address} did not accept the run's token: is it another run's?") from error
    if not hmac.compare_digest(proof, _mac(token, b"server", hello, answer, purpose)):
        raise WireError(f"{address} does not hold the run's token")
    to_client, to_server = _sealers(token, suite, hello, answer, purpose)
    channel.begin_session(outgoing=to_server, incoming=to_client)


@dataclass
class _Stranger:
    host: str
    peer: str
    hello: bytes
    until: float
    said: bytes = b""


class Door:
    """Listens, and hands over the connections that prove to hold the run's token.

    One thread serves all who have not, without waiting for any of them: whoever connects and says nothing, or the wrong
    thing, costs a descriptor until it is closed, and there are never more than STRANGERS of these.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        admit: Callable[[Admitted], None],
        *,
        purpose: str = "",
        encrypt: bool = False,
        port: int = 0,
        on_stranger: Callable[[str], None] = lambda what: None,
    ) -> None:
        """
        Args:
            host: name or address to listen on and advertise; "" for the host name's.
            admit: called in the door's thread with each connection; must not wait.
            purpose: the service that it belongs to. Who was let in for another one is not let in here.
            port: 0 for a free one.
            on_stranger: called in the door's thread when somebody who speaks is not let in, with where it came from.

        Raises:
            WireError: it cannot listen there.
        """
        if len(token) < 16:
            raise ValueError("the run's token must have at least 16 bytes")
        host = host or socket.gethostname()
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family, backlog=1024)
        except (OSError, ValueError) as error:
            raise WireError(f"cannot listen on '{host}' (fault_tolerance.bind_host): {error}") from error
        self._listener.setblocking(False)
        self.address = format_address(host, self._listener.getsockname()[1])
        self._token, self._admit, self._purpose, self._suites = token, admit, purpose, sealing.suites(encrypt)
        self._on_stranger = on_stranger
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._listens_again = math.inf
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the connections that were not let in."""
        self._closed = True
        with contextlib.suppress(OSError):  # closed twice
            self._wake_write.send(b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _keep(self) -> None:
        try:
            while not self._closed:
                for ready, _ in self._selector.select(self._wait_s()):
                    if ready.fileobj is self._listener:
                        self._accept()
                    elif isinstance(ready.fileobj, socket.socket) and ready.fileobj in self._strangers:
                        self._hear(ready.fileobj)
                self._grow_tired(time.monotonic())
        finally:
            for sock in [*self._strangers, self._listener, self._wake_read, self._wake_write]:
                sock.close()
            self._strangers.clear()
            self._selector.close()

    def _wait_s(self) -> float | None:
        oldest = next(iter(self._strangers.values()), None)
        until = min(self._listens_again, oldest.until if oldest else math.inf)
        return None if until == math.inf else max(0.0, until - time.monotonic())

    def _grow_tired(self, now: float) -> None:
        while self._strangers and next(iter(self._strangers.values())).until <= now:
            self._refuse(next(iter(self._strangers)))
        if now >= self._listens_again:
            self._listens_again = math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            sock, place = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                if self._strangers:
                    self._dismiss(next(iter(self._strangers)))
                else:
                    # The connection stays in the kernel's queue, and the listener ready: not to look is to rest.
                    self._selector.unregister(self._listener)
                    self._listens_again = time.monotonic() + _PAUSE_S
            return  # otherwise: the client has gone again
        hello = _HELLO.pack(MAGIC, self._suites, os.urandom(NONCE_BYTES))
        try:
            sock.setblocking(False)
            if sock.send(hello) != len(hello):
                raise OSError
            self._selector.register(sock, selectors.EVENT_READ)
        except OSError:
            sock.close()
            return
        until = time.monotonic() + HANDSHAKE_TIMEOUT.total_seconds()
        self._strangers[sock] = _Stranger(place[0], format_address(*place[:2]), hello, until)
        if len(self._strangers) > STRANGERS:
            self._dismiss(self._one_of_too_many())

    def _one_of_too_many(self) -> socket.socket:
        """The oldest of those that come from where most come from: a crowd from one place keeps nobody else out."""
        hosts = Counter(stranger.host for stranger in self._strangers.values())
        most = hosts.most_common(1)[0][0]
        return next(sock for sock, stranger in self._strangers.items() if stranger.host == most)

    def _dismiss(self, sock: socket.socket) -> _Stranger:
        self._selector.unregister(sock)
        sock.close()
        return self._strangers.pop(sock)

    def _refuse(self, sock: socket.socket) -> None:
        stranger = self._dismiss(sock)
        if stranger.said:  # who says nothing may be looking whether somebody is here
            with contextlib.suppress(OSError):
                self._on_stranger(f"{stranger.peer} does not know the run's token, or is of another version")

    def _hear(self, sock: socket.socket) -> None:
        stranger = self._strangers[sock]
        try:
            said = sock.recv(_ANSWER.size - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said += said
        if said and len(stranger.said) < _ANSWER.size:
            return
        answer, proof = stranger.said[:-PROOF_BYTES], stranger.said[-PROOF_BYTES:]
        if not said or not hmac.compare_digest(
            proof, _mac(self._token, b"client", stranger.hello, answer, self._purpose)
        ):
            self._refuse(sock)
            return
        suite, subject, _, _ = _ANSWER.unpack(stranger.said)
        if suite not in list(Suite) or not suite & self._suites:
            self._refuse(sock)
            return
        self._selector.unregister(sock)
        del self._strangers[sock]
        try:
            if sock.send(_mac(self._token, b"server", stranger.hello, answer, self._purpose)) != PROOF_BYTES:
                raise OSError
            to_client, to_server = _sealers(self._token, Suite(suite), stranger.hello, answer, self._purpose)
            self._admit(Admitted(sock, stranger.peer, subject, to_client, to_server))
        except (OSError, RuntimeError):  # RuntimeError: no thread could be started for it
            sock.close()


class Server:
    """A door whose every connection gets a thread that runs `talk(channel)`.

    `talk` returns, or raises WireError, when the connection is over; a RefusedError that it raises is told to
    the peer first.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        talk: Callable[[Channel], None],
        timeout: timedelta,
        *,
        purpose: str = "",
        encrypt: bool = False,
        port: int = 0,
        on_stranger: Callable[[str], None] = lambda what: None,
    ) -> None:
        """`timeout`: the longest silence of a peer that was let in. The others: as of a `Door`."""
        self._talk, self._timeout = talk, timeout
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Channel] = {}
        self._closed = False
        self._door = Door(
            host, token, self._welcome, purpose=purpose, encrypt=encrypt, port=port, on_stranger=on_stranger
        )
        self.address = self._door.address

    def _welcome(self, guest: Admitted) -> None:
        channel = Channel(guest.sock, guest.peer, self._timeout, outgoing=guest.to_client, incoming=guest.to_server)
        thread = threading.Thread(target=self._run, args=(channel,), name="wire-peer", daemon=True)
        with self._lock:
            if self._closed:
                channel.close()
                return
            self._threads[thread] = channel
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._threads[thread]
            raise

    def _run(self, channel: Channel) -> None:
        try:
            try:
                self._talk(channel)
            except RefusedError as refusal:
                channel.send_frame({"refused": str(refusal)})
        except WireError:
            pass  # the peer ended or broke the connection; what that means is decided by whoever waits for it
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)
            channel.close()

    def shut(self) -> dict[threading.Thread, Channel]:
        """Stop listening and cut every connection; what served them, which may go on with what it is at."""
        with self._lock:
            self._closed = True
            running = dict(self._threads)
        self._door.close()
        for channel in running.values():
            channel.cut()
        return running

    def close(self) -> None:
        """Stop listening, cut every connection, and wait for their threads."""
        for thread in self.shut():
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(self._timeout.total_seconds())
