"""Which peers this rank cannot reach: found out when it connects, and asked again until they answer."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from everstep import wire
from everstep.quorum.watch import PURPOSE

FAILURES = 2
"""So often in a row connecting to a peer must fail before it counts: a busy one may be late once."""
LOOK_S = 0.2
MOST_S = 60.0
"""The longest wait before a peer is asked again."""
FORGOTTEN_S = 600.0
"""After so long without an answer a peer is connected to again, or is gone for good."""


class Reach:
    """Keeps account of peers by the addresses of their watches, for one rank.

    Args:
        token: of the run.
        timeout: for one connection to a peer.
    """

    def __init__(self, token: bytes, timeout: timedelta) -> None:
        self._token, self._timeout = token, timeout
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        """How often in a row connecting to a peer failed."""
        self._missing: set[str] = set()

    def failed(self, addresses: Iterable[str]) -> None:
        """Connecting to these peers failed. One that has answered since the last time is asked half as soon again: the
        way to what answers may be open, and the way to what else is connected to not."""
        with self._lock:
            for address in addresses:
                self._failures[address] += 1
                again = self._failures[address] - FAILURES
                if again >= 0 and address not in self._missing:
                    self._missing.add(address)
                    wait_s = min(MOST_S, LOOK_S * 2.0**again)
                    threading.Thread(target=self._ask, args=(address, wait_s), name="reach", daemon=True).start()

    def reached(self, addresses: Iterable[str]) -> None:
        """These peers are connected."""
        with self._lock:
            for address in addresses:
                self._failures.pop(address, None)

    def missing(self) -> frozenset[str]:
        """Addresses of the peers that cannot be reached."""
        with self._lock:
            return frozenset(self._missing)

    def _ask(self, address: str, wait_s: float) -> None:
        """Until all of a connection can be made (a slow link may carry a part of it in time, and never the whole), or
        the peer is gone for good."""
        forgotten = time.monotonic() + FORGOTTEN_S
        while time.monotonic() < forgotten:
            time.sleep(wait_s)
            wait_s = LOOK_S
            with contextlib.suppress(wire.WireError):
                wire.connect(address, self._token, self._timeout, purpose=PURPOSE).close()
                break
        with self._lock:
            self._missing.discard(address)
