"""Which layers are checked in which slots.

A layer is checked in a slot with everything there is, forward and backward, or not at all; then it runs as if it had no
checks. The share of slots in which a layer is checked, its rate, is fixed, or follows from what checks take on this
device: the highest one at which they, and what is looked at in every slot, take no more than `max_overhead` of the time
that slots take without them. At an adaptive rate a layer with a finding is
checked in every slot, and less from then on as steps pass.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

SLOTS_MEASURED = 3
"""Slots with checks after which what they took is believed; until then every layer is checked."""

REMEMBERED = 9
"""The last slots of which what they, and their checks, took is known."""

SELDOM = 64
"""An adaptive rate has some layer checked once in so many slots at least: what is not looked at cannot be measured."""

HALF_LIFE_STEPS = 100
"""Steps in which the rate of a layer that had a finding falls by half."""


class Plan(NamedTuple):
    """overhead: time of all checks by that of the slots without them. rate: share of slots in which a layer is
    checked."""

    overhead: float
    rate: float


def uniform(*key: int) -> float:
    """A number in [0, 1), the same for the same key (splitmix64)."""
    z = 0
    for part in key:
        z = (z ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def drawn(rates: Mapping[int, float], point: float) -> frozenset[int]:
    """The layers on a grid of spacing 1 that begins at `point`, with their rates laid end to end on a line.

    Each is drawn as often as its rate says if points are uniform, and no two draws differ by more than one layer.
    """
    found, end = set(), 0.0
    for layer, rate in rates.items():
        begin, end = end, end + rate
        if math.floor(begin - point) < math.floor(end - point) or rate >= 1.0:
            found.add(layer)
    return frozenset(found)


class Schedule:
    """Draws the layers that are checked, slot by slot.

    Args:
        rate: the fixed share of slots, or None for the one that `max_overhead` allows. 1.0 checks every call, 0.0 none.
        max_overhead: the most that checks take at an adaptive rate, those of every slot among them, by what slots take
            without them.
        seed: draws the layers.
    """

    def __init__(self, rate: float | None, max_overhead: float = math.inf, *, seed: int = 0) -> None:
        self.fixed = rate
        self.max_overhead = max_overhead
        self.seed = seed
        self._slots: deque[float] = deque(maxlen=REMEMBERED)
        """What slots take on this device without checks."""
        self._checks: deque[float] = deque(maxlen=REMEMBERED)
        """What the checks of one layer take in a slot."""
        self._looks: deque[float] = deque(maxlen=REMEMBERED)
        """What a slot takes for what is looked at in every one."""
        self.plan: Plan | None = None
        """What checks take, at an adaptive rate, once that is measured."""
        self.checked: frozenset[int] = frozenset()
        """The layers that are checked in this slot."""
        self._layers: list[int] = []
        self._found: dict[int, int] = {}

    def add(self, layer: int) -> None:
        """There is such a layer."""
        if layer not in self._layers:
            self._layers.append(layer)

    def begin(self, step: int, slot: int, *, whole: bool = False) -> None:
        """A slot's forward is about to run; whole: every layer is checked, whatever the rate."""
        rates = dict.fromkeys(self._layers, 1.0) if whole else {x: self.rate(x, step) for x in self._layers}
        self.checked = drawn(rates, uniform(self.seed, step, slot))

    def rate(self, layer: int, step: int) -> float:
        """The share of slots of a step in which this layer is checked."""
        if self.fixed is not None:
            return self.fixed
        usual = 1.0 if self.plan is None else self.plan.rate
        found = self._found.get(layer)
        return usual if found is None else max(usual, 0.5 ** (max(0, step - found) / HALF_LIFE_STEPS))

    def found(self, layer: int, step: int) -> None:
        """A finding in `layer`: it is checked in every slot from now on, less as steps pass."""
        self._found[layer] = step

    def slot_took(self, seconds: float, checks_s: float, layers: int, looks_s: float = 0.0) -> None:
        """A slot took so long, of which the checks of so many layers took `checks_s`, and what is looked at in every
        slot `looks_s`."""
        self._slots.append(max(0.0, seconds - checks_s - looks_s))
        self._looks.append(looks_s)
        if layers:
            self._checks.append(checks_s / layers)
        if len(self._checks) >= SLOTS_MEASURED:
            # The fastest of the last slots has the least of other work in it.
            slot_s = max(min(self._slots), 1e-9)
            whole = len(self._layers) * statistics.median(self._checks) / slot_s
            looks = statistics.median(self._looks) / slot_s
            rate = min(1.0, max(0.0, self.max_overhead - looks) / whole) if whole else 1.0
            rate = max(rate, 1 / (SELDOM * len(self._layers)))
            self.plan = Plan(looks + rate * whole, rate)
