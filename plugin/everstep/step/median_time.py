"""Measures how long a slot takes this rank. Slots are dealt by that (`ledger.paces`)."""

import statistics
from collections import deque

SHARES = 5
"""Number of recent shares whose median counts: a pause or a short load in one of them changes nothing."""

KNOWN = 3
"""Number of shares after which a time is told: the first ones after a start compile and fill caches."""

STEADY = 0.1
"""Relative change from which a new time is told, so that noise does not move slots to and fro."""


class MedianTime:
    """One rank's time per slot, or its wait for sums, as the median over the last shares that it computed."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=SHARES)
        self.steady_us = 0
        """Microseconds per slot, as the other groups are told; 0 if it is not known yet."""

    @property
    def latest_s(self) -> float | None:
        """Seconds per slot in the last shares; None before the first share."""
        return statistics.median(self._took) if self._took else None

    def take(self, took_s: float, slots: int) -> None:
        """Take in that a share of `slots` slots took `took_s`."""
        self._took.append(took_s / slots)
        now_us = max(1, round(1e6 * statistics.median(self._took)))
        if len(self._took) >= KNOWN and abs(now_us - self.steady_us) > STEADY * self.steady_us:
            self.steady_us = now_us
