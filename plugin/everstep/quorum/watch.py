"""Notices at once that a member of a quorum died or gave up, whatever the process group is doing.

A collective tells of a dead peer only if it happens to need that peer just then; a survivor that waits for another
survivor, which has already given up, would wait for its whole timeout. So every member keeps one silent TCP connection
to every other member for as long as a process group lasts. The kernel closes it when the peer's process ends, and a
peer that breaks the process group closes it itself: one broken member breaks them all, within a millisecond.
"""

import contextlib
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

KEY_BYTES = 32
"""Length of the key that says which process group a connection belongs to."""

GRACE_S = 0.1
"""Between a loss and its announcement. A sum that the lost member had finished with may still complete between the
others, and then nobody has to compute anything again."""

REMEMBERED = 64
"""Process groups whose end is remembered, for callers that come late."""


class PeerLost(ConnectionError):
    """A member of the quorum could not be reached."""


class PeerWatch:
    """Both ends of the connections of one rank.

    Args:
        host: address to listen on and to be reached under.
        on_loss: called in a thread of the watch with the key of a process group that lost a member, once for each.
    """

    def __init__(self, host: str, on_loss: Callable[[bytes], None]) -> None:
        self._on_loss = on_loss
        self._listener = socket.create_server((host, 0), backlog=1024)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """`host:port` that the other members connect to."""
        self._lock = threading.Lock()
        self._accepted: dict[bytes, list[socket.socket]] = {}
        self._watched: dict[bytes, list[socket.socket]] = {}
        self._over: deque[bytes] = deque(maxlen=REMEMBERED)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._closed = False
        threading.Thread(target=self._accept, name="watch-accept", daemon=True).start()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, key: bytes, peers: Sequence[str], timeout: timedelta) -> None:
        """Watch the members of a process group.

        Args:
            key: KEY_BYTES bytes that name the process group on all members.
            peers: addresses of the other members.
            timeout: to reach each of them.

        Raises:
            PeerLost: one of them cannot be reached, or `end` was called for this process group meanwhile.
        """
        connections = []
        for peer in peers:
            host, _, port = peer.rpartition(":")
            try:
                connection = socket.create_connection((host, int(port)), timeout.total_seconds())
                connections.append(connection)
                connection.sendall(key)
            except OSError as error:
                for connection in connections:
                    connection.close()
                raise PeerLost(f"{peer} does not answer: {error}") from error
        with self._lock:
            if key in self._over:
                for connection in connections:
                    connection.close()
                raise PeerLost("the process group was broken while it was being built")
            self._watched[key] = connections
            for connection in connections:
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ, key)
        self._wake_write.send(b"+")

    def end(self, key: bytes) -> None:
        """The process group is over for this rank; members that still use it lose this rank. Idempotent."""
        with self._lock:
            self._over.append(key)
            for connection in self._watched.pop(key, []):
                self._selector.unregister(connection)
                connection.close()
            for connection in self._accepted.pop(key, []):
                _hang_up(connection)
        self._wake_write.send(b"-")

    def close(self) -> None:
        """End all watches and stop listening."""
        self._closed = True
        _hang_up(self._listener)
        for key in [*self._watched, *self._accepted]:
            self.end(key)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Learn which process group a new connection is for."""
        connection.settimeout(10)
        try:
            key = connection.recv(KEY_BYTES, socket.MSG_WAITALL)
        except OSError:
            key = b""
        with self._lock:
            # The caller may be late for a process group that this rank has broken already.
            if len(key) == KEY_BYTES and key not in self._over:
                self._accepted.setdefault(key, []).append(connection)
                return
        _hang_up(connection)

    def _watch(self) -> None:
        while not self._closed:
            for ready, _ in self._selector.select():
                if ready.data is None:
                    self._wake_read.recv(4096)
                    continue
                # Peers never speak: readable means closed.
                with self._lock:
                    for connection in self._watched.pop(ready.data, []):
                        self._selector.unregister(connection)
                        connection.close()
                timer = threading.Timer(GRACE_S, self._lose, (ready.data,))
                timer.daemon = True
                timer.start()

    def _lose(self, key: bytes) -> None:
        self.end(key)
        self._on_loss(key)


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
