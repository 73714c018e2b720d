"""Sockets in virtual time, and links between hosts that lose, delay and refuse, in place of `socket` and `selectors`.
A connection keeps the order of its data. Data sent while its way is lost arrives when the way is open again, as with
TCP. A host that falls silent closes no connection. All that passes between hosts goes through `Network.carry`."""

from __future__ import annotations

import contextlib
import math
import selectors as real_selectors
import socket as real_socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from simulation.scheduler import TICK_S, Process, Scheduler, Signal
from simulation.system import HERE

LATENCY_S = (0.0001, 0.0015)
RETRANSMIT_S = 0.4
"""Longest time in seconds from the opening of a way to the sending of the data that waited for it."""
BULK_BYTES = 8192
"""Data sent in one piece of at least this size is taken for a part of a state."""

PROBES = real_socket.TCP_KEEPIDLE, real_socket.TCP_KEEPINTVL, real_socket.TCP_KEEPCNT
KEEPALIVE = {(real_socket.SOL_SOCKET, real_socket.SO_KEEPALIVE), *((real_socket.IPPROTO_TCP, one) for one in PROBES)}

Way = tuple[str, str]


class Flow:
    """A sequence of messages in one direction, which arrive in order. last: when the last of them arrives."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0.0


class Network:
    """All hosts. `bulk_s` draws how many seconds a piece of a state takes, `damaged` whether it is altered."""

    def __init__(self, scheduler: Scheduler, bulk_s: Callable[[], float], damaged: Callable[[], bool]) -> None:
        self.scheduler, self.bulk_s, self.damaged = scheduler, bulk_s, damaged
        self.lost: dict[Way, int] = defaultdict(int)
        self.lost_since: dict[Way, float] = {}
        self.closed: Counter[Way] = Counter()
        """Ways on which no new connection can be made."""
        self.filtered: Counter[Way] = Counter()
        """Ways on which no communicator can connect, as its port is closed."""
        self.delay_s: dict[Way, float] = {}
        self.held: dict[Way, list[tuple[Callable[[], None], Flow, float]]] = defaultdict(list)
        self.sockets: dict[Process, list[Socket]] = defaultdict(list)
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.dark: set[str] = set()
        """Hosts that lost power: they close no connection and refuse none."""
        self.breaks_off = False
        """Whether the connection over which the next state is sent breaks off."""
        self.silence_s = 0.0
        """Seconds for which a host may be silent before others take it for lost."""
        self.ports = 1000
        self.carried = self.connected = 0
        """Number of messages sent, and of connections asked for."""
        self.stores: dict[tuple[str, int], Any] = {}
        self.communicators: dict[Process, list[Any]] = defaultdict(list)
        """The stores and communicators of `simulation.services`."""

    def carry(self, way: Way, call: Callable[[], None], flow: Flow, extra_s: float = 0.0) -> None:
        """Have `call` called at the end of a way, after everything that was put into the same flow before."""
        self.carried += 1
        if way[0] != way[1] and (self.lost[way] or self.held.get(way)):
            self.held[way].append((call, flow, extra_s))
            return
        low, high = LATENCY_S
        wait_s = low + (high - low) * self.scheduler.random.random() + extra_s + self.delay_s.get(way, 0.0)
        flow.last = max(flow.last + 1e-7, self.scheduler.now + wait_s)
        self.scheduler.call_at(flow.last, call)

    def lose(self, ways: Sequence[Way], seconds: float) -> None:
        """Let nothing pass on these ways for some seconds."""
        for way in ways:
            self.lost[way] += 1
            self.lost_since.setdefault(way, self.scheduler.now)
            for sock in self._between(*way):
                if sock.keepalive_s:
                    self.scheduler.call_in(sock.keepalive_s, self._unheard, sock, way)
        self.scheduler.call_in(seconds, self._open, ways)

    def _between(self, one: str, other: str) -> list[Socket]:
        every, both = (sock for sockets in self.sockets.values() for sock in sockets), {one, other}
        return [sock for sock in every if sock.peer is not None and {sock.host, sock.peer.host} == both]

    def _unheard(self, sock: Socket, way: Way) -> None:
        """Reset a connection, as its kernel does if the keepalives found the way lost all the time."""
        if self.scheduler.now - self.lost_since.get(way, math.inf) > sock.keepalive_s - TICK_S:
            sock.is_reset()

    def _open(self, ways: Sequence[Way]) -> None:
        for way in ways:
            self.lost[way] -= 1
            if not self.lost[way]:
                self.lost_since.pop(way, None)
            if not self.lost[way] and way in self.held:
                self.scheduler.call_in(RETRANSMIT_S * self.scheduler.random.random(), self._send_held, way)

    def _send_held(self, way: Way) -> None:
        if not self.lost[way]:
            for call, flow, extra_s in self.held.pop(way, []):
                self.carry(way, call, flow, extra_s)

    def close(self, ways: Sequence[Way], seconds: float, *, communicators_only: bool) -> None:
        """Let no new connection be made on these ways for some seconds, or none of communicators."""
        closed = self.filtered if communicators_only else self.closed
        closed.update(ways)
        self.scheduler.call_in(seconds, closed.subtract, ways)

    def delay(self, ways: Sequence[Way], delay_s: float, seconds: float) -> None:
        """Delay everything on these ways by `delay_s` for some seconds."""
        for way in ways:
            self.delay_s[way] = delay_s
            self.scheduler.call_in(seconds, self.delay_s.pop, way, None)

    def is_open(self) -> bool:
        return not (any(self.lost.values()) or any((self.closed + self.filtered).values()) or self.delay_s)

    def reset(self, one: str, other: str) -> None:
        """Reset every connection between two hosts. Both ends see it."""
        if one == other:
            return
        for sock in self._between(one, other):
            sock.is_reset()
        for communicators in self.communicators.values():
            for communicator in communicators:
                communicator.is_reset(one, other)

    def process_died(self, process: Process) -> None:
        """Close all that a process had open, as the kernel does. If its host is dark, no peer hears of it."""
        for listener in list(self.listeners.values()):
            if listener.process is process:
                listener.close()
        silent = process.host in self.dark
        for sock in self.sockets.pop(process, []):
            if silent:
                sock.closed = True
                if sock.peer is not None and sock.peer.keepalive_s:
                    self.scheduler.call_in(sock.peer.keepalive_s, sock.peer.is_reset)
            else:
                sock.close()
        for communicator in self.communicators.pop(process, []):
            communicator.dies(silent)

    def listen(self, port: int = 0, *, process: Process | None = None) -> Listener:
        """Listen at a port of the host of `process`, or of the running process."""
        process = process or HERE.scheduler.check()
        if not port:
            self.ports += 1
            port = self.ports
        if (process.host, port) in self.listeners:
            raise OSError("the address is in use")
        listener = self.listeners[process.host, port] = Listener(self, process, port)
        return listener

    def connect(self, place: tuple[str, int], timeout: float) -> Socket:
        """Return a connection from the running process. Raises OSError."""
        process, scheduler = HERE.scheduler.check(), self.scheduler
        self.connected += 1
        ours, said = Socket(self, process), list[str]()
        there, back = (process.host, place[0]), (place[0], process.host)

        def arrive() -> None:
            listener = self.listeners.get(place)
            if listener is None:
                if place[0] not in self.dark:
                    self.carry(back, partial(answer, "refused"), Flow())
                return
            theirs = Socket(self, listener.process)
            theirs.peer, ours.peer, theirs.place = ours, theirs, (process.host, 1)
            listener.come(theirs)
            self.carry(back, partial(answer, "open"), theirs.flow)

        def answer(what: str) -> None:
            said.append(what)
            if ours.closed and ours.peer is not None:
                ours.peer.is_reset()
            ours.changed.fire(scheduler)

        if not (self.closed[there] or self.closed[back]):
            self.carry(there, arrive, ours.flow)
        if not scheduler.wait(ours.changed, lambda: bool(said), timeout):
            ours.close()
            raise TimeoutError("timed out")
        if said[0] == "refused":
            ours.close()
            raise ConnectionRefusedError("Connection refused")
        return ours


class _Readable:
    """The base of sockets and listeners, which a selector can watch."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process, self.host = network, process, process.host
        self.changed = Signal()
        self.looked_at: list[Selector] = []
        self.closed = False

    def wake(self) -> None:
        scheduler = self.network.scheduler
        if self.changed.waiters:
            self.changed.fire(scheduler)
        for selector in self.looked_at:
            if selector.changed.waiters:
                selector.changed.fire(scheduler)

    def setblocking(self, flag: bool) -> None:
        self.timeout = None if flag else 0.0

    def close(self) -> None:
        self.closed = True


class Listener(_Readable):
    def __init__(self, network: Network, process: Process, port: int) -> None:
        super().__init__(network, process)
        self.port = port
        self.backlog: list[Socket] = []
        self.shut = False

    def come(self, sock: Socket) -> None:
        self.backlog.append(sock)
        self.wake()

    def readable(self) -> bool:
        return bool(self.backlog) or self.shut

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def shutdown(self, how: int) -> None:
        self.shut = True
        self.wake()

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        if not self.backlog:
            raise BlockingIOError
        sock = self.backlog.pop(0)
        return sock, sock.place

    def close(self) -> None:
        super().close()
        self.network.listeners.pop((self.host, self.port), None)
        for waiting in self.backlog:
            waiting.close()


class Socket(_Readable):
    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        self.peer: Socket | None = None
        self.place = (process.host, 0)
        self.flow = Flow()
        self.inbox = bytearray()
        self.ended = self.broken = self.shut = False
        """Whether the other side has closed; whether the connection is reset; whether this side has shut down."""
        self.timeout: float | None = None
        self._receive_s = 0.0
        self._keepalive: dict[int, int] = {}
        self.keepalive_s = 0.0
        """Seconds without a sign of the peer's kernel after which this end is reset; 0: never."""
        network.sockets[process].append(self)

    def _arrive(self, data: bytes) -> None:
        if self.closed:
            if self.host not in self.network.dark and self.peer is not None:
                self.network.carry((self.host, self.peer.host), self.peer.is_reset, self.flow)
            return
        self.inbox += data
        self.wake()

    def _end(self) -> None:
        self.ended = True
        self.wake()

    def is_reset(self) -> None:
        self.broken = True
        self.wake()

    def readable(self) -> bool:
        return bool(self.inbox) or self.ended or self.broken or self.shut

    def settimeout(self, timeout: float | None) -> None:
        self.timeout = timeout

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) in KEEPALIVE:
            self._keepalive[option] = value
            if len(self._keepalive) == len(KEEPALIVE):
                idle_s, interval_s, count = (self._keepalive[probe] for probe in PROBES)
                self.keepalive_s = float(idle_s + interval_s * count)
                if self.keepalive_s < self.network.silence_s:
                    HERE.judge.violate("lost too early", f"{self.host} waits {self.keepalive_s} s for a silent host")
        elif (level, option) == (real_socket.SOL_SOCKET, real_socket.SO_RCVTIMEO):
            seconds, micros = struct.unpack("@ll", value)
            self._receive_s = seconds + micros / 1e6

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` is true. Raises what a socket raises."""
        HERE.scheduler.check()
        if self.closed:
            raise OSError("Bad file descriptor")
        seconds = 0.0 if self.timeout == 0.0 else self.timeout or self._receive_s or 1e9
        if not HERE.scheduler.wait(self.changed, holds, seconds):
            raise TimeoutError if self.timeout else BlockingIOError

    def _take(self, count: int, *, keep: bool = False) -> bytes:
        if not self.inbox and self.broken:
            raise ConnectionResetError("Connection reset by peer")
        data = bytes(self.inbox[:count])
        if not keep:
            del self.inbox[:count]
        return data

    def recv(self, count: int, flags: int = 0) -> bytes:
        if flags & real_socket.MSG_DONTWAIT:
            HERE.scheduler.check()
            if self.closed:
                raise OSError("Bad file descriptor")
            if not self.readable():
                raise BlockingIOError
        else:
            self._wait(self.readable)
        return self._take(count, keep=bool(flags & real_socket.MSG_PEEK))

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        wanted = view.nbytes
        if len(self.inbox) >= wanted and not self.closed:
            HERE.scheduler.check()
            view[:] = self.inbox[:wanted]
            del self.inbox[:wanted]
            return wanted
        try:
            self._wait(lambda: len(self.inbox) >= wanted or self.ended or self.broken or self.shut)
        except BlockingIOError:
            if not self.inbox:
                raise
        data = self._take(wanted)
        view[: len(data)] = data
        return len(data)

    def send(self, data: bytes | memoryview) -> int:
        HERE.scheduler.check()
        if self.closed or self.shut or self.broken or self.peer is None:
            raise BrokenPipeError("Broken pipe")
        network, peer, data = self.network, self.peer, bytes(data)
        slow_s = 0.0
        if len(data) >= BULK_BYTES:
            slow_s = network.bulk_s()
            if network.breaks_off:
                network.breaks_off = False
                for end in (self, peer):
                    network.scheduler.call_in(slow_s, end.is_reset)
                return len(data)
            if network.damaged():
                data = data[:-1] + bytes([data[-1] ^ 1])
        network.carry((self.host, peer.host), partial(peer._arrive, data), self.flow, slow_s)
        return len(data)

    sendall = send

    def shutdown(self, how: int) -> None:
        if self.closed or self.peer is None:
            raise OSError("Transport endpoint is not connected")
        if not self.shut:
            self.shut = True
            self.network.carry((self.host, self.peer.host), self.peer._end, self.flow)
            self.wake()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        own = self.network.sockets.get(self.process)
        if own is not None:
            own.remove(self)
        if self.peer is not None and not self.shut:
            self.network.carry((self.host, self.peer.host), self.peer._end, self.flow)
        self.wake()


class Selector:
    def __init__(self) -> None:
        self.changed = Signal()
        self._keys: dict[_Readable, real_selectors.SelectorKey] = {}

    def register(self, thing: _Readable, events: int, data: Any = None) -> None:
        if thing in self._keys:
            raise KeyError("registered already")
        self._keys[thing] = real_selectors.SelectorKey(thing, 0, events, data)
        thing.looked_at.append(self)
        thing.wake()

    def unregister(self, thing: _Readable) -> None:
        del self._keys[thing]
        thing.looked_at.remove(self)

    def get_key(self, thing: _Readable) -> real_selectors.SelectorKey:
        return self._keys[thing]

    def _ready(self) -> list[tuple[real_selectors.SelectorKey, int]]:
        # As in reality, a closed descriptor is not reported.
        return [(key, 1) for thing, key in self._keys.items() if not thing.closed and thing.readable()]

    def select(self, timeout: float | None = None) -> list[tuple[real_selectors.SelectorKey, int]]:
        HERE.scheduler.wait(self.changed, lambda: bool(self._ready()), 1e9 if timeout is None else max(0.0, timeout))
        return self._ready()

    def close(self) -> None:
        for thing in list(self._keys):
            self.unregister(thing)


def create_connection(place: tuple[str, int], timeout: float | None = None) -> Socket:
    return HERE.network.connect(tuple(place), 1e9 if timeout is None else timeout)


def create_server(place: tuple[str, int], **options: Any) -> Listener:
    return HERE.network.listen(place[1])


def getaddrinfo(host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
    return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 0, "", (host, port))]


def gethostname() -> str:
    return HERE.scheduler.check().host


_CONSTANTS = {name: int(n) for name, n in vars(real_socket).items() if name.isupper() and isinstance(n, int)}
_FUNCTIONS = {one.__name__: one for one in (create_connection, create_server, getaddrinfo, gethostname)}
socket = SimpleNamespace(**_CONSTANTS, **_FUNCTIONS, socket=Socket)
selectors = SimpleNamespace(
    DefaultSelector=Selector, SelectorKey=real_selectors.SelectorKey, EVENT_READ=real_selectors.EVENT_READ
)

memory = SimpleNamespace(room_for=lambda nbytes: contextlib.nullcontext(HERE.room(nbytes)))
