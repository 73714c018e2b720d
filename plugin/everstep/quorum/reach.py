"""Which peers this rank cannot reach: found out when it connects, and asked again until they answer."""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from everstep import wire

FAILURES = 2
"""So often in a row connecting to a peer must fail before it counts: a busy one may be late once."""
LOOK_S = 0.2
MOST_S = 60.0
"""The longest wait before a peer is asked again."""
FORGOTTEN_S = 600.0
"""After so long without an answer a peer is connected to again, or is gone for good."""


@dataclass(slots=True)
class _Peer:
    """A peer that connecting failed to: how often in a row, since when it counts, and when it is asked next."""

    failures: int = 0
    since: float = 0.0
    due: float = 0.0
    missing: bool = False


class Reach:
    """Keeps account of peers by the addresses of their watches, for one rank.

    Args:
        timeout: for one answer of a peer.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def failed(self, addresses: Iterable[str]) -> None:
        """Connecting to these peers failed. One that has answered since the last time is asked half as soon again: the
        way to what answers may be open, and the way to what else is connected to not."""
        with self._lock:
            for address in addresses:
                peer = self._peers.setdefault(address, _Peer())
                peer.failures += 1
                if peer.failures >= FAILURES:
                    wait_s = min(MOST_S, LOOK_S * 2.0 ** (peer.failures - FAILURES))
                    peer.missing, peer.since, peer.due = True, time.monotonic(), time.monotonic() + wait_s
            if self._thread is None and any(peer.missing for peer in self._peers.values()):
                self._thread = threading.Thread(target=self._ask, name="reach", daemon=True)
                self._thread.start()

    def reached(self, addresses: Iterable[str]) -> None:
        """These peers are connected."""
        with self._lock:
            for address in addresses:
                self._peers.pop(address, None)

    def missing(self) -> frozenset[str]:
        """Addresses of the peers that cannot be reached."""
        with self._lock:
            return frozenset(address for address, peer in self._peers.items() if peer.missing)

    def close(self) -> None:
        """Ask nobody any more."""
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.wait(LOOK_S):
            with self._lock:
                now = time.monotonic()
                due = [address for address, peer in self._peers.items() if peer.missing and peer.due <= now]
            for address in due:
                answers = wire.answers(address, self._timeout)
                with self._lock:
                    peer = self._peers.get(address)
                    if peer is None:
                        continue
                    if answers:
                        peer.missing = False
                    elif time.monotonic() - peer.since > FORGOTTEN_S:
                        del self._peers[address]
