"""Keeps track of the peers that this rank cannot connect to, and tries these again until they answer."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from everstep import wire
from everstep.quorum.watch import PURPOSE

FAILURES = 2
"""Failures to connect in a row after which a peer is missing. One is not enough, as a busy peer may be late once."""
LOOK_S, DOUBLINGS = 0.2, 8
"""Seconds before a missing peer is tried, and how often they double at most."""
FORGOTTEN_S = 600.0
"""Seconds without an answer after which a peer is not missing any more. If it still exists, quorums try it again."""


class Reachability:
    """The peers that one rank cannot connect to, by the addresses of their watches.

    Args:
        token: the run's token.
        timeout: longest time to connect to a peer.
    """

    def __init__(self, token: bytes, timeout: timedelta) -> None:
        self._token, self._timeout = token, timeout
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        """Address → failures to connect in a row."""
        self._missing: set[str] = set()

    def note_failed(self, addresses: Iterable[str]) -> None:
        """Note that connecting to these peers failed. The wait before a peer is tried doubles with each failure in a
        row, also if it has answered since: its watch may be reachable while its other ports are not."""
        with self._lock:
            for address in addresses:
                self._failures[address] += 1
                again = self._failures[address] - FAILURES
                if again >= 0 and address not in self._missing:
                    self._missing.add(address)
                    wait_s = LOOK_S * 2.0 ** min(again, DOUBLINGS)
                    threading.Thread(target=self._ask, args=(address, wait_s), name="reachability", daemon=True).start()

    def note_reached(self, addresses: Iterable[str]) -> None:
        """Note that these peers were connected."""
        with self._lock:
            for address in addresses:
                self._failures.pop(address, None)

    def unreachable(self) -> frozenset[str]:
        """Return the addresses of the peers that cannot be reached."""
        with self._lock:
            return frozenset(self._missing)

    def _ask(self, address: str, wait_s: float) -> None:
        """Try to connect to a missing peer until that succeeds, or for FORGOTTEN_S. The whole handshake must succeed: a
        slow link may carry a part of it in time, and never all of it."""
        forgotten = time.monotonic() + FORGOTTEN_S
        while time.monotonic() < forgotten:
            time.sleep(wait_s)
            wait_s = LOOK_S
            with contextlib.suppress(wire.WireError):
                wire.connect(address, self._token, self._timeout, purpose=PURPOSE).close()
                break
        with self._lock:
            self._missing.discard(address)
