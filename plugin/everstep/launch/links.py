"""How fast and how evenly the hosts of a run reach each other: what `everstep doctor` measures on a cluster.

Every doctor that runs at the same time with one run directory serves echoes, publishes where, and measures the others.
"""

import contextlib
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.run.files import read_json, write_json

PINGS, PING_BYTES = 50, 64
BULK_BYTES, CHUNK = 64 << 20, 1 << 20
MOST_PEERS = 8
"""Hosts that one doctor measures: drawn, so that a large cluster is covered by all of them together."""
JITTER_TICKS, TICK_S = 50, 0.1
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Link:
    """From here to another host."""

    name: str
    rtt_s: float
    """Median of a small message there and back."""
    worst_rtt_s: float
    bytes_per_s: float
    error: str = ""


class EchoServer:
    """Answers pings (every byte comes back) and swallows bulk, on a port of its own."""

    def __init__(self, host: str):
        self._socket = socket.create_server((host, 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="echo", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=_answer, args=(peer,), daemon=True).start()


def _answer(peer: socket.socket) -> None:
    """The first byte says what follows: pings (p) or BULK_BYTES to be acknowledged (b)."""
    with peer, contextlib.suppress(OSError):
        peer.settimeout(30.0)
        kind = peer.recv(1)
        left = BULK_BYTES
        while data := peer.recv(CHUNK):
            if kind == b"p":
                peer.sendall(data)
                continue
            left -= len(data)
            if left <= 0:
                peer.sendall(b"!")
                return


def measure(name: str, host: str, port: int) -> Link:
    """Latency and bandwidth of a connection to a host's EchoServer."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as pinged:
            pinged.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pinged.sendall(b"p")
            times = [_ping(pinged) for _ in range(PINGS)]
        with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as bulk:
            bulk.settimeout(30.0)
            begin = time.perf_counter()
            bulk.sendall(b"b")
            for _ in range(BULK_BYTES // CHUNK):
                bulk.sendall(bytes(CHUNK))
            bulk.recv(1)
            rate = BULK_BYTES / (time.perf_counter() - begin)
    except OSError as error:
        return Link(name, 0.0, 0.0, 0.0, error=f"{host}:{port}: {error.strerror or error}")
    return Link(name, statistics.median(times), max(times), rate)


def _ping(peer: socket.socket) -> float:
    begin, left = time.perf_counter(), PING_BYTES
    peer.sendall(bytes(PING_BYTES))
    while left:
        data = peer.recv(left)
        if not data:
            raise ConnectionResetError(0, "closed the connection")
        left -= len(data)
    return time.perf_counter() - begin


def heartbeat_jitter_s() -> float:
    """By how much the worst of JITTER_TICKS wake-ups came late, as a heartbeat's would: a busy host's own share."""
    late = 0.0
    for _ in range(JITTER_TICKS):
        begin = time.monotonic()
        time.sleep(TICK_S)
        late = max(late, time.monotonic() - begin - TICK_S)
    return late


def measure_others(folder: Path, name: str, host: str, wait_s: float, expected: int) -> list[Link]:
    """Links to the hosts that do the same now: found in `folder`, awaited until there are `expected` of them, this one
    included, or `wait_s` are over."""
    server = EchoServer(host)
    mine = folder / f"{name}.{os.getpid()}.echo"
    began = time.time()
    try:
        write_json(mine, {"name": name, "host": host, "port": server.port, "t": began})
        deadline = time.monotonic() + wait_s
        while len(others := _others(folder, mine, began - wait_s)) < expected - 1 and time.monotonic() < deadline:
            time.sleep(0.2)
        drawn = random.sample(others, min(MOST_PEERS, len(others)))
        links = [measure(found["name"], found["host"], found["port"]) for found in drawn]
        _await_the_slowest(folder, mine, deadline)
        return links
    finally:
        mine.unlink(missing_ok=True)
        server.close()


def _others(folder: Path, mine: Path, since: float) -> list[dict]:
    found = [read_json(path) for path in folder.glob("*.echo") if path != mine]
    return [entry for entry in found if entry.get("t", 0.0) >= since]


def _await_the_slowest(folder: Path, mine: Path, deadline: float) -> None:
    """Stay to answer the others until each has said that it is done, or the wait is over."""
    done = mine.with_suffix(".measured")
    done.touch()
    while time.monotonic() < deadline:
        waiting = [path for path in folder.glob("*.echo") if not path.with_suffix(".measured").exists()]
        if not waiting:
            break
        time.sleep(0.2)
    done.unlink(missing_ok=True)


@dataclass(frozen=True)
class Proposal:
    """Timeouts of [fault_tolerance] that fit what was measured, in seconds."""

    heartbeat_timeout_s: float
    reduce_timeout_s: float
    heal_timeout_s: float


def propose(links: Sequence[Link], jitter_s: float, gradient_bytes: float, state_bytes: float) -> Proposal:
    """Timeouts: of a heartbeat, ten times what delays one; of a gradient sum and of a heal, four times what the slowest
    link takes for them. Never less than what a quiet machine needs."""
    good = [link for link in links if not link.error]
    rtt_s = max((link.worst_rtt_s for link in good), default=0.0)
    rate = min((link.bytes_per_s for link in good), default=0.0)
    sum_s = 4 * 2 * gradient_bytes / rate if rate else 0.0
    heal_s = 4 * state_bytes / rate if rate else 0.0
    return Proposal(
        heartbeat_timeout_s=round(max(1.0, 10 * (jitter_s + rtt_s)), 1),
        reduce_timeout_s=float(round(max(10.0, sum_s))),
        heal_timeout_s=float(round(max(60.0, heal_s))),
    )
