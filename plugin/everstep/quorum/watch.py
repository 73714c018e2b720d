"""Notices at once that a member of a quorum died or gave up, whatever the process group is doing.

A collective tells of a dead peer only if it happens to need that peer just then; a survivor that waits for another
survivor, which has already given up, would wait for its whole timeout. So rank r of every group keeps a silent TCP
connection to rank r of every other for as long as a process group lasts, two between any two of them. The kernel closes
it when the peer's process ends, and a peer that breaks the process group says FAREWELL and closes it itself: the others
see that within a millisecond, and break it GRACE_S later. The kernel also asks now and then whether the peer's kernel
is there (TCP keepalive), since a host that loses power tells nobody.

Only members are let in: a connection proves the run's token and names its process group before it is kept.
"""

import contextlib
import selectors
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from everstep import wire

GRACE_S = 0.1
"""Between a loss and its announcement. A sum that the lost member had finished with may still complete between the
others, and then nobody has to compute anything again."""

PURPOSE = "watch"
FAREWELL = b"+"
"""What closes without it was closed by a kernel whose process has ended."""
REMEMBERED = 64
"""Process groups whose end is remembered, for callers that come late."""

KEEPALIVES = 2
"""How many questions of the kernel stay without an answer before a peer is lost."""

CONNECTING = 32
"""Peers that are connected to at the same time."""


class PeerLost(ConnectionError):
    """Members of the quorum could not be reached: `places` says which."""

    def __init__(self, what: str, places: Iterable[int] = ()) -> None:
        super().__init__(what)
        self.places = frozenset(places)


class PeerWatch:
    """Both ends of the connections of one rank.

    Args:
        host: address to listen on and to be reached under.
        on_loss: called with the key of a process group that lost a member, once for each, in a thread of its own;
            perhaps after `end` was called.
        token: of the run.
        silence: after so long without a sign of a peer's kernel the peer is lost; whole seconds, 3 at least.

    Raises:
        wire.WireError: it cannot listen on `host`.
    """

    def __init__(self, host: str, on_loss: Callable[[bytes], None], token: bytes, silence: timedelta) -> None:
        self._on_loss, self._token = on_loss, token
        asked_s = max(1, round(silence.total_seconds() / (1 + KEEPALIVES)))
        self._ask_every_s = min(asked_s, 32767)  # Linux takes no more
        self._lock = threading.Lock()
        self._connections: defaultdict[bytes, list[socket.socket]] = defaultdict(list)
        """By process group, to and from its other members."""
        self._watched: set[bytes] = set()
        """Process groups that this rank has connected for, and that have lost nobody."""
        self.ended: frozenset[str] = frozenset()
        """Addresses of members of the last process group that are known to have died."""
        self._over: deque[bytes] = deque(maxlen=REMEMBERED)
        self._selector = selectors.DefaultSelector()
        self._door = wire.Door(host, token, self._admit, purpose=PURPOSE)
        self.address = self._door.address
        """`host:port` that the other members connect to."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, key: bytes, peers: Mapping[int, str], timeout: timedelta) -> None:
        """Watch the members of a process group.

        Args:
            key: 32 bytes that name the process group on all members.
            peers: addresses of the other members, by their place.
            timeout: to reach one of them, CONNECTING at a time.

        Raises:
            PeerLost: some of them cannot be reached, or `end` was called for this process group meanwhile. Others may
                be connected already: `end` has to be called.
        """

        def reach(address: str) -> socket.socket | wire.WireError:
            try:
                return wire.connect(address, self._token, timeout, purpose=PURPOSE, subject=key).sock
            except wire.WireError as error:
                return error

        with ThreadPoolExecutor(min(len(peers), CONNECTING) or 1) as pool:
            found = dict(zip(peers, pool.map(reach, peers.values()), strict=True))
        connections = {place: made for place, made in found.items() if isinstance(made, socket.socket)}
        lost = {place: str(error) for place, error in found.items() if place not in connections}
        with self._lock:
            if lost or key in self._over:
                for connection in connections.values():
                    connection.close()
                raise PeerLost("; ".join(lost.values()) or "the process group was broken meanwhile", lost)
            self._watched.add(key)
            self.ended = frozenset()
            for place, connection in connections.items():
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._ask_every_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._ask_every_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
                self._keep(key, connection, peers[place])

    def end(self, key: bytes) -> None:
        """The process group is over for this rank; members that still use it lose this rank. Idempotent."""
        with self._lock:
            self._over.append(key)
            self._watched.discard(key)
            left = self._connections.pop(key, ())
            for connection in left:  # a sum may have told of a death before the watch looked
                self._hear(connection)
            self._drop(left)

    def _keep(self, key: bytes, connection: socket.socket, address: str = "") -> None:
        self._connections[key].append(connection)
        self._selector.register(connection, selectors.EVENT_READ, (key, address))

    def _hear(self, connection: socket.socket) -> None:
        """Take note of the peer's death, if this connection tells of one."""
        _, address = self._selector.get_key(connection).data
        with contextlib.suppress(OSError):  # it stands, was broken on its way, or for the silence of a host
            if address and connection.recv(1) != FAREWELL:
                self.ended |= {address}

    def _drop(self, connections: Iterable[socket.socket]) -> None:
        for connection in connections:
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.send(FAREWELL)
                connection.shutdown(socket.SHUT_RDWR)  # also for what a forked child has of it
            connection.close()

    def _admit(self, member: wire.Channel, key: bytes) -> None:
        with self._lock:
            self._keep(key, member.sock)
            if key in self._over:  # the caller is late, and is to know that nobody has died
                self._drop(self._connections.pop(key))

    def _watch(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                self._look(ready)

    def _look(self, ready: selectors.SelectorKey) -> None:
        # Peers say nothing until they are lost.
        (key, _), connection = ready.data, ready.fileobj
        with self._lock:
            left = self._connections.get(key, [])
            if connection not in left:
                return
            left.remove(connection)
            self._hear(connection)
            self._drop([connection])
            if not left:
                del self._connections[key]
            if key not in self._watched:  # it has left before this rank came
                return
            self._watched.remove(key)
        timer = threading.Timer(GRACE_S, self._lose, (key,))
        timer.daemon = True
        timer.start()

    def _lose(self, key: bytes) -> None:
        self.end(key)
        self._on_loss(key)
