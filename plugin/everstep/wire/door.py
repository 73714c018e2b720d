"""Listens for connections and admits processes that hold the run's token; connects to such listeners."""

import contextlib
import functools
import hashlib
import hmac
import math
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from everstep.wire.channel import Channel, RefusedError, WireError, format_address, parse_address
from everstep.wire.sealing import Sealer

MAGIC = b"everwir4"
NONCE_BYTES = SUBJECT_BYTES = PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = SUBJECT_BYTES + NONCE_BYTES + PROOF_BYTES
HANDSHAKE_TIMEOUT = timedelta(seconds=5)
"""Limit for the whole handshake, not for each part of it."""
STRANGERS = 128
"""Largest number of connections that are not authenticated yet. If there are more, the oldest is closed. It is hardly a
member's, because a member's handshake takes a millisecond."""
_PAUSE_S = 0.05


def _mac(token: bytes, purpose: str, said: bytes, role: bytes) -> bytes:
    """Return an HMAC under the token over the bytes of the handshake: the proof of one `role`, or a key.

    Args:
        said: the server's hello and the client's answer without its proof.
    """
    name = purpose.encode()
    return hmac.digest(token, role + b"\0" + said + struct.pack("<H", len(name)) + name, hashlib.sha256)


def connect(
    address: str, token: bytes, timeout: timedelta, *, purpose: str = "", subject: bytes = bytes(SUBJECT_BYTES)
) -> Channel:
    """Connect to a `Server` or a `Door` of this `purpose`, and return the authenticated channel.

    Args:
        timeout: the longest silence of the peer. Connecting and the handshake together may take the smaller of this
            and HANDSHAKE_TIMEOUT.
        subject: SUBJECT_BYTES bytes for the peer's `admit`.

    Raises:
        WireError: nothing answers in time, the listener speaks another protocol, or it holds another token.
    """
    until = time.monotonic() + min(timeout, HANDSHAKE_TIMEOUT).total_seconds()
    try:
        sock = socket.create_connection(parse_address(address), timeout=max(0.001, until - time.monotonic()))
    except (OSError, ValueError) as error:  # ValueError: the resolver cannot encode the name
        raise error if isinstance(error, WireError) else WireError(f"no connection to {address}: {error}") from error
    channel = Channel(sock, address, timeout)
    with contextlib.ExitStack() as failing:
        failing.callback(channel.close)
        channel.set_deadline(until)
        hello = channel.receive(HELLO_BYTES)
        if not hello.startswith(MAGIC):
            raise WireError(f"{address} does not speak this protocol")
        answer = subject + os.urandom(NONCE_BYTES)
        mac = functools.partial(_mac, token, purpose, hello + answer)
        channel.send(answer + mac(b"client"))
        try:
            proof = channel.receive(PROOF_BYTES)
        except WireError as error:
            if channel.hung_up():
                raise WireError(f"{address} did not accept the run's token: it may belong to another run") from error
            raise
        if not hmac.compare_digest(proof, mac(b"server")):
            raise WireError(f"{address} does not hold the run's token")
        channel.set_deadline(math.inf)
        channel.seal(Sealer(mac(b"key to server")), Sealer(mac(b"key to client")))
        failing.pop_all()
    return channel


@dataclass
class _Stranger:
    peer: str
    hello: bytes
    until: float
    said: bytes = b""


class Door:
    """Listens, and passes on the connections of peers that prove that they hold the run's token.

    One thread does all handshakes, without waiting for any single peer. A peer that sends nothing, or the wrong bytes,
    costs one descriptor until its connection is closed. There are never more than STRANGERS such connections.
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        admit: Callable[[Channel, bytes], None],
        timeout: timedelta = HANDSHAKE_TIMEOUT,
        *,
        purpose: str = "",
        port: int = 0,
        on_stranger: Callable[[str], None] = lambda what: None,
    ) -> None:
        """
        Args:
            host: name or address to listen on and advertise; "" for this machine's host name.
            admit: called in the door's thread with each admitted channel and its subject; must not block. An OSError or
                RuntimeError of it closes the channel; any other error would end the door.
            timeout: the longest silence of an admitted peer.
            purpose: the service's name. A client must prove the token for this name, not for another service's.
            port: the port to listen on; 0 for a free one.
            on_stranger: called in the door's thread if a peer that sent bytes is refused, with a sentence that has its
                address.

        Raises:
            WireError: it cannot listen there.
        """
        if len(token) < 16:
            raise ValueError("the run's token must have at least 16 bytes")
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each of hundreds of members may take one
        host = host or socket.gethostname()
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family, backlog=1024)
        except (OSError, ValueError) as error:
            where = format_address(host, port)
            raise WireError(f"cannot listen on {where} (fault_tolerance.bind_host): {error}") from error
        self._listener.setblocking(False)
        self.address = format_address(host, self._listener.getsockname()[1])
        self._token, self._admit, self._purpose, self._timeout = token, admit, purpose, timeout
        self._on_stranger = on_stranger
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the connections that are not admitted."""
        self._closed = True
        with contextlib.suppress(OSError):  # it was closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # this wakes the thread
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _keep(self) -> None:
        try:
            while not self._closed:
                oldest = next(iter(self._strangers.values()), None)
                wait_s = max(0.0, oldest.until - time.monotonic()) if oldest else None
                for ready, _ in self._selector.select(wait_s):
                    if ready.fileobj is self._listener:
                        self._accept()
                    elif isinstance(ready.fileobj, socket.socket) and ready.fileobj in self._strangers:
                        self._hear(ready.fileobj)
                while self._strangers and next(iter(self._strangers.values())).until <= time.monotonic():
                    self._refuse(next(iter(self._strangers)))
        finally:
            for sock in [*self._strangers, self._listener]:
                sock.close()
            self._strangers.clear()
            self._selector.close()

    def _accept(self) -> None:
        try:
            sock, place = self._listener.accept()
        except OSError:
            if not self._closed:  # without descriptors or memory the connection stays in the kernel's queue
                time.sleep(_PAUSE_S)
            return
        hello = MAGIC + os.urandom(NONCE_BYTES)
        try:
            sock.setblocking(False)
            sock.send(hello)  # it fits the kernel's empty buffer
            self._selector.register(sock, selectors.EVENT_READ)
        except OSError:
            sock.close()
            return
        until = time.monotonic() + HANDSHAKE_TIMEOUT.total_seconds()
        self._strangers[sock] = _Stranger(format_address(*place[:2]), hello, until)
        if len(self._strangers) > STRANGERS:
            self._refuse(next(iter(self._strangers)))

    def _refuse(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()
        stranger = self._strangers.pop(sock)
        if stranger.said:  # a peer that sends nothing may only check whether the port is open
            with contextlib.suppress(OSError):
                self._on_stranger(f"{stranger.peer} does not know the run's token, or is of another version")

    def _hear(self, sock: socket.socket) -> None:
        stranger = self._strangers[sock]
        try:
            more = sock.recv(ANSWER_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        stranger.said += more
        if more and len(stranger.said) < ANSWER_BYTES:
            return
        answer, proof = stranger.said[:-PROOF_BYTES], stranger.said[-PROOF_BYTES:]
        mac = functools.partial(_mac, self._token, self._purpose, stranger.hello + answer)
        if not more or not hmac.compare_digest(proof, mac(b"client")):
            self._refuse(sock)
            return
        self._selector.unregister(sock)
        del self._strangers[sock]
        try:
            sock.send(mac(b"server"))
            channel = Channel(sock, stranger.peer, self._timeout)
            channel.seal(Sealer(mac(b"key to client")), Sealer(mac(b"key to server")))
            self._admit(channel, answer[:SUBJECT_BYTES])
        except (OSError, RuntimeError):  # RuntimeError: no thread could be started for it
            sock.close()


class Server(Door):
    """A door that runs `talk(channel)` in a thread of its own for each admitted connection.

    The connection ends when `talk` returns or raises WireError. A RefusedError of `talk` is first sent to the peer.
    """

    def __init__(
        self, host: str, token: bytes, talk: Callable[[Channel], None], timeout: timedelta, **more: Any
    ) -> None:
        """`more`: keyword arguments of `Door`."""
        self._talk = talk
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Channel] = {}
        super().__init__(host, token, self._welcome, timeout, **more)

    def _welcome(self, channel: Channel, subject: bytes) -> None:
        thread = threading.Thread(target=self._run, args=(channel,), name="wire-peer", daemon=True)
        with self._lock:
            thread.start()
            self._threads[thread] = channel

    def _run(self, channel: Channel) -> None:
        try:
            try:
                self._talk(channel)
            except RefusedError as refusal:
                channel.send_frame({"refused": str(refusal)})
        except WireError:
            pass  # the peer ended or broke the connection; code that waits for the peer decides what to do
        finally:
            with self._lock:
                self._threads.pop(threading.current_thread(), None)
            channel.close()

    def close(self, *, wait: bool = True) -> None:
        """Stop listening and cut every connection. `wait`: whether to wait for the connections' threads to end."""
        super().close()  # from now on no thread is added
        with self._lock:
            running = dict(self._threads)
        for channel in running.values():
            channel.cut()
        for thread in running if wait else ():
            if thread is not threading.current_thread():
                thread.join(self._timeout.total_seconds())
