"""Detects at once that a member of a process group died or left it, whatever the process group is doing.

A collective fails because of a dead peer only if it needs that peer just then. A survivor that waits for another
survivor, which has already left, would wait for its whole timeout. So as long as a process group lasts, rank r of every
group keeps silent TCP connections to rank r of every other group, two between any two ranks. If a process ends, its
kernel closes them; if a rank leaves the process group, it sends FAREWELL and closes them. The peers see that within a
millisecond, and break the process group GRACE_S later. A host that loses power closes nothing, so the kernel also
probes now and then whether the peer's kernel still answers (TCP keepalive).

Only members are admitted: a connection proves that it knows the run's token and names its process group.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from everstep import wire

GRACE_S = 0.1
"""Seconds between a loss and its announcement. Meanwhile the others may complete a sum that the lost member had already
done its part of; then no slot has to be computed again."""

PURPOSE = "watch"
FAREWELL = b"+"
"""Sent before a connection is closed on purpose. Without it, the process at the other end has died."""
REMEMBERED = 64
"""Number of ended process groups that are remembered, for members that connect late."""
KEEPALIVES = 2
"""Unanswered keepalive probes after which a peer is lost."""
CONNECTING = 32
"""Number of peers that are connected to at the same time."""


class PeerLost(ConnectionError):
    """Some members could not be reached, those at `places`."""

    def __init__(self, what: str, places: Iterable[int] = ()) -> None:
        super().__init__(what)
        self.places = frozenset(places)


class PeerWatch:
    """One rank's connections to the other members of its process groups.

    Args:
        host: address to listen on, under which peers reach this rank.
        on_loss: called once with the key of each process group that lost a member, in the watch's thread, which it must
            not hold up; possibly after `end` was called. It has to call `end`.
        token: the run's token.
        silence: longest silence of a peer's kernel before the peer is lost; rounded to a multiple of 3 s, at least 3 s.

    Raises:
        wire.WireError: the watch cannot listen on `host`.
    """

    def __init__(self, host: str, on_loss: Callable[[bytes], None], token: bytes, silence: timedelta) -> None:
        self._on_loss, self._token = on_loss, token
        asked_s = max(1, round(silence.total_seconds() / (1 + KEEPALIVES)))
        self._ask_every_s = min(asked_s, 32767)  # Linux takes no more
        self._lock = threading.Lock()
        self._connections: defaultdict[bytes, list[socket.socket]] = defaultdict(list)
        """Key of a process group → connections to and from its other members."""
        self._watched: set[bytes] = set()
        """Process groups that this rank has connected and that have lost no member."""
        self.died: frozenset[str] = frozenset()
        """Addresses of the members of the last process group that are known to have died."""
        self._over: deque[bytes] = deque(maxlen=REMEMBERED)
        self._selector = selectors.DefaultSelector()
        self._door = wire.Door(host, token, self._admit, purpose=PURPOSE)
        self.address = self._door.address
        """`host:port` that the other members connect to."""
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, key: bytes, peers: Mapping[int, str], timeout: timedelta) -> None:
        """Connect to the other members of a process group and watch them.

        Args:
            key: 32 bytes that name the process group on all members.
            peers: place of each other member → its address.
            timeout: longest time to connect to one member; CONNECTING of them at once.

        Raises:
            PeerLost: some members cannot be reached, or `end` was called for this process group meanwhile. The caller
                then has to call `end`, as other members may have connected to this rank.
        """

        def reach(address: str) -> socket.socket | wire.WireError:
            try:
                return wire.connect(address, self._token, timeout, purpose=PURPOSE, subject=key).sock
            except wire.WireError as error:
                return error

        with ThreadPoolExecutor(CONNECTING) as pool:
            found = dict(zip(peers, pool.map(reach, peers.values()), strict=True))
        connections = {place: made for place, made in found.items() if isinstance(made, socket.socket)}
        lost = {place: str(error) for place, error in found.items() if place not in connections}
        with self._lock:
            if lost or key in self._over:
                for connection in connections.values():
                    connection.close()
                raise PeerLost("; ".join(lost.values()) or "the process group was broken meanwhile", lost)
            self._watched.add(key)
            self.died = frozenset()
            for place, connection in connections.items():
                connection.setblocking(False)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._ask_every_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._ask_every_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES)
                self._keep(key, connection, peers[place])

    def end(self, key: bytes) -> None:
        """Leave a process group. Members that still use it lose this rank. Idempotent."""
        with self._lock:
            self._over.append(key)
            self._watched.discard(key)
            left = self._connections.pop(key, ())
            for connection in left:  # a sum may have failed because of a death that the watch has not yet seen
                self._hear(connection)
            self._drop(left)

    def _keep(self, key: bytes, connection: socket.socket, address: str = "") -> None:
        self._connections[key].append(connection)
        self._selector.register(connection, selectors.EVENT_READ, (key, address))

    def _hear(self, connection: socket.socket) -> None:
        """Note the peer's death if this connection was closed without FAREWELL."""
        _, address = self._selector.get_key(connection).data
        with contextlib.suppress(OSError):  # still open, or broken by the network or a silent host: no known death
            if address and connection.recv(1) != FAREWELL:
                self.died |= {address}

    def _drop(self, connections: Iterable[socket.socket]) -> None:
        for connection in connections:
            self._selector.unregister(connection)
            with contextlib.suppress(OSError):
                connection.send(FAREWELL)
                connection.shutdown(socket.SHUT_RDWR)  # closes it even if a forked child has a copy
            connection.close()

    def _admit(self, member: wire.Channel, key: bytes) -> None:
        with self._lock:
            self._keep(key, member.sock)
            if key in self._over:  # the member is late; the FAREWELL tells it that this rank has not died
                self._drop(self._connections.pop(key))

    def _watch(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                self._look(ready)

    def _look(self, ready: selectors.SelectorKey) -> None:
        # Peers send nothing before their FAREWELL, so a readable connection is a lost peer.
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
            if key not in self._watched:  # the peer left before this rank had connected
                return
            self._watched.remove(key)
        time.sleep(GRACE_S)
        self._on_loss(key)
