"""Draws the layers that are checked in each slot.

In a slot a layer either runs all of its checks, forward and backward, or none. A *look* is a cheap test for lost,
extreme or non-finite values that runs in every slot. The rate of a layer is the share of slots in which it is checked.
A rate is fixed or adaptive. The adaptive rate is the highest at which checks and looks together take no more than
`max_overhead` of the time that slots take without them, measured on this device, but never below one layer in SELDOM
slots. After a finding an adaptive rate checks that layer in every slot, and less often as steps pass.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

SLOTS_MEASURED = 3
"""Slots with checks that are timed before the rate adapts. Until then every layer is checked."""

REMEMBERED = 9
"""Number of the last slots whose times are kept."""

SELDOM = 64
"""Slots per check of one layer, on average, at the lowest adaptive rate: checks that never run cannot be timed."""

HALF_LIFE_STEPS = 100
"""Steps in which the raised rate of a layer with a finding falls by half."""


class CheckRate(NamedTuple):
    """overhead: expected time of checks and looks at this rate, divided by the time of the slots without them. rate:
    share of slots in which a layer is checked."""

    overhead: float
    rate: float


def uniform(*key: int) -> float:
    """Return a number in [0, 1) that depends on `key` alone (splitmix64)."""
    z = 0
    for part in key:
        z = (z ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def drawn(rates: Mapping[int, float], point: float) -> frozenset[int]:
    """Lay the layers' rates end to end on a line, and return the layers that contain one of the points `point` + 0, 1,
    2, … With a uniform `point` each layer is drawn as often as its rate says. Draws differ in size by one at most."""
    found, end = set(), 0.0
    for layer, rate in rates.items():
        begin, end = end, end + rate
        if math.floor(begin - point) < math.floor(end - point) or rate >= 1.0:
            found.add(layer)
    return frozenset(found)


class Schedule:
    """Draws the layers that are checked, slot by slot.

    Args:
        rate: the fixed share of slots in which a layer is checked (1.0: all, 0.0: none), or None for an adaptive rate.
        max_overhead: time for checks and looks at an adaptive rate, as a share of the time that slots take without
            them. The first slots, the lowest rate and findings may exceed it.
        seed: the layers are drawn from it.
    """

    def __init__(self, rate: float | None, max_overhead: float = math.inf, *, seed: int = 0) -> None:
        self.fixed = rate
        self.max_overhead = max_overhead
        self.seed = seed
        self._slots: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that each of the last slots took without checks and looks."""
        self._checks: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that the checks of one layer took in each of the last slots with checks."""
        self._looks: deque[float] = deque(maxlen=REMEMBERED)
        """Seconds that the looks took in each of the last slots."""
        self.check_rate: CheckRate | None = None
        """The rate that the measured times allow, and the overhead expected at it; None before times are measured."""
        self.checked: frozenset[int] = frozenset()
        """The layers that are checked in the current slot."""
        self._layers: list[int] = []
        self._found: dict[int, int] = {}

    def add(self, layer: int) -> None:
        """Add a layer; nothing changes if it is known."""
        if layer not in self._layers:
            self._layers.append(layer)

    def begin(self, step: int, slot: int, *, check_all: bool = False) -> None:
        """Draw the layers of a slot, before its forward. check_all: all layers, whatever their rates."""
        rates = dict.fromkeys(self._layers, 1.0) if check_all else {x: self.rate(x, step) for x in self._layers}
        self.checked = drawn(rates, uniform(self.seed, step, slot))

    def rate(self, layer: int, step: int) -> float:
        """Return the share of slots in which this layer is checked during a step."""
        if self.fixed is not None:
            return self.fixed
        usual = 1.0 if self.check_rate is None else self.check_rate.rate
        found = self._found.get(layer)
        return usual if found is None else max(usual, 0.5 ** (max(0, step - found) / HALF_LIFE_STEPS))

    def found(self, layer: int, step: int) -> None:
        """Note a finding in `layer`. An adaptive rate checks it in every slot at first, less often as steps pass."""
        self._found[layer] = step

    def slot_took(self, seconds: float, checks_s: float, layers: int, looks_s: float = 0.0) -> None:
        """Note that a slot took `seconds`, of which the checks of `layers` layers took `checks_s` and the looks
        `looks_s`; then adapt the rate."""
        self._slots.append(max(0.0, seconds - checks_s - looks_s))
        self._looks.append(looks_s)
        if layers:
            self._checks.append(checks_s / layers)
        if len(self._checks) >= SLOTS_MEASURED:
            # The fastest of the last slots was disturbed least by other work.
            slot_s = max(min(self._slots), 1e-9)
            whole = len(self._layers) * statistics.median(self._checks) / slot_s
            looks = statistics.median(self._looks) / slot_s
            rate = min(1.0, max(0.0, self.max_overhead - looks) / whole) if whole else 1.0
            rate = max(rate, 1 / (SELDOM * len(self._layers)))
            self.check_rate = CheckRate(looks + rate * whole, rate)
