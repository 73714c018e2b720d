"""How long a slot takes this rank: what slots are dealt by (`ledger.paces`)."""

import statistics
from collections import deque

SHARES = 5
"""How many of the last shares count: a stop or a moment's load in one of them changes nothing."""

KNOWN = 3
"""How many shares it takes to know: the first of a start compiles and fills caches."""

STEADY = 0.1
"""What is told stays until it is wrong by so much, so that noise does not move slots to and fro."""


class Pace:
    """Of one rank, from the shares that it computed."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=SHARES)
        self.slot_us = 0
        """Microseconds a slot, as the other groups are told; 0 while it is not known."""

    @property
    def slot_s(self) -> float | None:
        """Seconds that a slot took lately; None before the first share."""
        return statistics.median(self._took) if self._took else None

    def take(self, took_s: float, slots: int) -> None:
        """A share of so many slots has been computed."""
        self._took.append(took_s / slots)
        now_us = max(1, round(1e6 * statistics.median(self._took)))
        if len(self._took) >= KNOWN and abs(now_us - self.slot_us) > STEADY * self.slot_us:
            self.slot_us = now_us
