"""How often each section of each layer is checked.

Section S of a layer does F_S FLOPs a step, its check costs t_S, λ errors happen per FLOP, and an error there
ruins training with probability φ_S. Checked at rate f_S it leaves (1 - f_S)·λ·F_S·φ_S harmful errors a step
unseen. The rates minimise Σ f_S t_S subject to Σ (1 - f_S) λ F_S φ_S <= ε: a fractional knapsack, solved
exactly by taking sections in the order of λ F_S φ_S / t_S until what is left unseen is ε. docs/attention.md
derives it, with units.
"""

import math
import statistics
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

PRIOR_ERRORS_PER_FLOP = 2e-25
"""6 silent corruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783), at 4e14 FLOP/s each."""

PRIOR_WEIGHT = 0.5
"""How many errors the prior counts for: little, so that the first own finding outweighs it."""

SLOTS_MEASURED = 3
"""Slots with checks of a section after which what they took is believed; the first ones are slow."""

REMEMBERED = 9
"""The last slots, and the last ones in which a section was checked, of which what they took is known."""

LEAST_RATE = 1 / 64
"""No section is checked less under `adaptive`: where nothing is looked at, no error rate is measured."""

GATHERED = 8
"""Under `adaptive`, the steps of which one is looked at, as long as no section is to be checked in more than that share
of slots. In the others a slot cannot be refused, so it need not be computed apart, and groups take equally long."""

HALF_LIFE_STEPS = 100
"""Steps in which the rate of a layer that had a finding falls by half."""

VULNERABILITY = {"y": 0.77, "dx": 0.78, "dw": 0.73, "forward": 0.44, "backward": 0.44, "rerun": 0.51}
"""Of single bits flipped in a section's results, the share that leaves some output beyond round-off; for `rerun`, the
share that does and that nothing but a second run sees. Measured by bench/attention_coverage.py, the larger of fp32's
and bf16's. Taken for the probability that an error ruins training, which it bounds: what leaves every output within
round-off cannot."""

RISK_STEPS = 1_000_000
"""Steps over which `residual_risk` counts."""


class Plan(NamedTuple):
    """What rates cost and leave.

    overhead: time of the checks by that of the slots. residual_risk: harmful errors expected to pass unseen in
    RISK_STEPS steps. least_rate: of any section.
    """

    overhead: float
    residual_risk: float
    least_rate: float


class Load(NamedTuple):
    """One section: FLOPs a step that it protects, what checking all of them costs (any one unit), and the
    probability that an error in it ruins training."""

    flops: float
    cost: float
    vulnerability: float = 1.0


def error_rate(errors: float, flops: float) -> float:
    """Errors per FLOP after `errors` in `flops` checked FLOPs: mean of the Gamma posterior."""
    return (PRIOR_WEIGHT + errors) / (PRIOR_WEIGHT / PRIOR_ERRORS_PER_FLOP + flops)


def allot(
    loads: list[Load], errors_per_flop: float, risk_per_step: float, least: float = 0.0, budget: float = math.inf
) -> list[float]:
    """The cheapest rates, in the order of `loads`, that leave at most `risk_per_step` harmful errors unseen.

    All rates are 1 when the risk cannot be met with less, and `least` where nothing more is needed. Together they
    never cost more than `budget`, in the unit of the loads' costs: then they leave as little unseen as it buys.
    """
    whole = sum(load.cost for load in loads)
    if least * whole > budget:
        return [budget / whole] * len(loads)
    harm = [errors_per_flop * load.flops * load.vulnerability for load in loads]
    rates = [least] * len(loads)
    unseen, left = sum((1 - least) * h for h in harm), budget - least * whole
    order = sorted(range(len(loads)), key=lambda i: harm[i] / max(loads[i].cost, 1e-30), reverse=True)
    for i in order:
        # The last digits of a difference of large sums are not worth a check.
        if unseen <= risk_per_step * (1 + 1e-9) or not harm[i]:
            break
        raised = min(1 - least, (unseen - risk_per_step) / harm[i], left / max(loads[i].cost, 1e-30))
        rates[i] = least + raised
        unseen -= raised * harm[i]
        left -= raised * loads[i].cost
    return rates


def vulnerability(section: str) -> float:
    """φ of a section by the last part of its name; 1 where it was not measured."""
    return VULNERABILITY.get(section.rpartition(".")[2], 1.0)


def uniform(*key: int) -> float:
    """A number in [0, 1), the same for the same key (splitmix64)."""
    z = 0
    for part in key:
        z = (z ^ (part & 0xFFFFFFFFFFFFFFFF)) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        z = (z ^ z >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


@dataclass(slots=True)
class _Section:
    layer: int
    cost: float
    vulnerability: float
    flops: float = 0.0
    """In one slot: the last one in which it was asked whether it is checked."""
    slot: int = 0
    """Which that was, of all that were begun."""
    rate: float = 1.0
    drawn: bool = True
    """Whether it is checked in this slot. Until its first step is over a section's load is not known: it is checked."""
    taking: float = 0.0
    """Seconds that its checks took in this slot so far."""
    took: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    seconds: float = math.inf
    """What its checks take in a slot, with the sums that they find kept or make; inf: not measured."""


class _Line(NamedTuple):
    """Sections whose rates stand one behind the other."""

    always: list[_Section]
    """Those that are checked in every slot that is looked at."""
    others: list[_Section]
    ends: list[float]
    """Where the rate of each of the others ends, times `every`."""
    every: int
    """Steps of which one is looked at."""

    def drawn(self, point: float) -> list[_Section]:
        """Those on a grid of spacing 1 that begins here."""
        drawn = list(self.always)
        while self.ends and point < self.ends[-1]:
            drawn.append(self.others[bisect_right(self.ends, point)])
            point += 1.0
        return drawn


class Schedule:
    """Decides, slot by slot, which sections of which layers are checked.

    What is checked in a slot is drawn when it begins: the rates of all sections stand one behind the other on a line,
    and those are drawn that lie on a point of a grid of spacing 1, moved by one random number. Each is drawn as often
    as its rate says, and no slot has more than one check more than another. A layer of which nothing is drawn is idle:
    it runs as if it had no checks, and its load is the one of the last slot in which it was not. Where adaptive rates
    are low all round, checks are gathered: every GATHERED-th step has that many times as many, and the others none.

    Args:
        rate: the fixed share of calls, or None for adaptive rates. 1.0 checks every call and 0.0 none.
        residual_risk: harmful errors expected to pass unseen in RISK_STEPS steps, for adaptive rates.
        max_overhead: the most that adaptive checks take, as a share of the time that the slots take without them.
        seed: draws the calls.
    """

    def __init__(
        self, rate: float | None, residual_risk: float = 1e-5, max_overhead: float = math.inf, *, seed: int = 0
    ) -> None:
        self.fixed = rate
        self.max_overhead = max_overhead
        self.plan: Plan | None = None
        """What the present rates cost and leave, once that is measured."""
        self.risk_per_step = residual_risk / RISK_STEPS
        self.seed = seed
        self.weights_version = 0
        self.errors = 0.0
        self.checked_flops = 0.0
        self._step, self._whole = 1, False
        self._begun = self._committed = 0
        """Slots, by now and at the last commit."""
        self._slot_seconds: deque[float] = deque(maxlen=REMEMBERED)
        """Of the last slots, without checks."""
        self._sections: dict[tuple[int, str], _Section] = {}
        self._found: dict[int, int] = {}
        self._layers: set[int] = set()
        self._idle: set[int] = set()
        self._drawn: list[_Section] = []
        self._timed: list[_Section] = []
        """Those of which something was measured in this slot."""
        self._line: _Line | None = _Line([], [], [], 1)
        """None: not laid out since some rate changed."""
        self._times = 1
        """By how much rates are multiplied in this slot; 0: nothing is checked."""

    def begin(self, step: int, slot: int, *, whole: bool = False) -> None:
        """A slot's forward is about to run; whole: every call is checked, unless none ever is."""
        self._end_slot()
        self._whole = whole
        self._begun += 1
        line, self._times = self._line_of(step)
        if self.fixed is not None and self.fixed in (0.0, 1.0):
            return
        for section in self._drawn:
            section.drawn = False
        self._drawn = line.drawn(uniform(self.seed, step, slot)) if self._times else []
        for section in self._drawn:
            section.drawn = True
        self._idle = set() if whole else self._layers - {section.layer for section in self._drawn}

    def _line_of(self, step: int) -> tuple[_Line, int]:
        """The line of a step's slots, and by how much rates are multiplied in them."""
        if self._found and step != self._step:
            self._line = None  # layers with a finding are checked less as steps pass
        self._step = step
        if self._line is None:
            self._line = self._laid_out()
        return self._line, 0 if step % self._line.every else self._line.every

    def _laid_out(self) -> _Line:
        self._layers = {section.layer for section in self._sections.values()}
        rates = [(section, self._rate(section)) for section in self._sections.values()]
        # Until its first step is over it is not known what a rank checks; a pipeline's stage may have nothing.
        highest = max((rate for _, rate in rates), default=0.0 if self._committed else 1.0)
        low = self.fixed is None and highest * GATHERED <= 1
        every = GATHERED if low else 1
        always = [section for section, rate in rates if every * rate >= 1.0]
        others = [(section, every * rate) for section, rate in rates if every * rate < 1.0]
        return _Line(always, [section for section, _ in others], list(accumulate(rate for _, rate in others)), every)

    def looks(self, step: int, slot: int) -> bool:
        """Whether anything of a slot may be checked; asked before it begins."""
        if self.fixed is not None:
            return self.fixed > 0.0
        return self._line_of(step)[1] > 0

    def idle(self, layer: int) -> bool:
        """Whether nothing of this layer is checked in this slot."""
        return self.fixed == 0.0 or layer in self._idle

    def checking(self, layer: int, section: str, *, flops: float, cost: float) -> bool:
        """Whether this call is checked: the same answer for every call in one slot."""
        if self.fixed is not None and self.fixed in (0.0, 1.0):
            return self.fixed == 1.0
        entry = self._sections.get((layer, section))
        if entry is None:
            entry = _Section(layer, cost, vulnerability(section), drawn=self._times > 0)
            self._sections[layer, section] = entry
            self._drawn.append(entry)
            self._line = None
        if entry.slot != self._begun:
            entry.slot, entry.flops = self._begun, 0.0
        entry.flops += flops
        entry.cost = cost
        checked = entry.drawn or self._whole
        if checked:
            self.checked_flops += flops
        return checked

    def rate(self, layer: int, section: str) -> float:
        """The share of calls of this section that is checked now."""
        return self.fixed if self.fixed is not None else self._rate(self._sections[layer, section])

    def _rate(self, section: _Section) -> float:
        if self.fixed is not None:
            return self.fixed
        found = self._found.get(section.layer)
        raised = 0.0 if found is None else 0.5 ** (max(0, self._step - found) / HALF_LIFE_STEPS)
        return max(section.rate, raised)

    def found(self, layer: int) -> None:
        """A finding in `layer`: its sections are all checked from now on, less as steps pass."""
        self.errors += 1
        self._found[layer] = self._step
        self._line = None

    def committed(self) -> None:
        """The step is over: derive the rates of the next from the load of this one."""
        self.weights_version += 1
        self._end_slot()
        slots, self._committed = self._begun - self._committed, self._begun
        self._line = None
        sections = list(self._sections.values())
        if self.fixed is not None or not sections or not slots:
            return
        per_flop = error_rate(self.errors, self.checked_flops)
        known = [section.seconds for section in sections if section.seconds < math.inf]
        budget = self._budget(slots) if known else math.inf
        # A section that is checked so seldom that it was not measured yet takes what a usual one does.
        usual = statistics.median(known) if known else math.inf
        seconds = [usual if math.isinf(section.seconds) else section.seconds for section in sections]
        loads = [
            Load(
                slots * section.flops,
                section.cost if math.isinf(budget) else slots * each,
                section.vulnerability,
            )
            for section, each in zip(sections, seconds, strict=True)
        ]
        rates = allot(loads, per_flop, self.risk_per_step, LEAST_RATE, budget)
        for section, rate in zip(sections, rates, strict=True):
            section.rate = rate
        if not math.isinf(budget):
            took = sum(load.cost * rate for load, rate in zip(loads, rates, strict=True))
            unseen = sum(
                (1 - rate) * per_flop * load.flops * load.vulnerability for load, rate in zip(loads, rates, strict=True)
            )
            self.plan = Plan(took / budget * self.max_overhead if budget else 0.0, unseen * RISK_STEPS, min(rates))

    def took(self, layer: int, section: str, seconds: float) -> None:
        """A check of a section in this slot, or a part of one, took so long on the device."""
        entry = self._sections.get((layer, section))
        if entry is not None:
            entry.taking += seconds
            self._timed.append(entry)

    def _end_slot(self) -> None:
        for entry in self._timed:
            if entry.taking:
                entry.took.append(entry.taking)
                entry.taking = 0.0
            if len(entry.took) >= SLOTS_MEASURED:
                entry.seconds = statistics.median(entry.took)
        self._timed.clear()

    @property
    def whole(self) -> bool:
        """Whether every call of this slot is checked."""
        return self.fixed == 1.0 or (self._whole and self.fixed != 0.0)

    @property
    def crowded(self) -> bool:
        """Whether more of this slot is checked than of others."""
        return self._whole or self._times > 1

    def slot_took(self, seconds: float, *, crowded: bool = False) -> None:
        """A slot, its checks included, took so long."""
        if crowded:
            return
        # Checks may be as much of it as they may ever be: without them it took this at least.
        self._slot_seconds.append(seconds / (1 + self.max_overhead))

    def measuring(self, layer: int, section: str) -> bool:
        """Whether it is of use to know what a check of this section takes."""
        return self.fixed is None and (layer, section) in self._sections

    def _budget(self, slots: int) -> float:
        """Seconds of a step of so many slots that checks may take; inf as long as what slots take is not measured."""
        if math.isinf(self.max_overhead) or not self._slot_seconds:
            return math.inf
        # The fastest of the last slots has the least of checks and of other work in it.
        return self.max_overhead * slots * min(self._slot_seconds)

    def weights_changed(self) -> None:
        """Weights changed other than by a commit."""
        self.weights_version += 1


class SlotSchedule(Schedule):
    """Decides for slots and not for calls, where forward and backward are replays of recorded graphs, one with every
    check in it and one with none.

    All checks of a slot are one section. They take by how much a slot with them takes longer than one without.
    """

    def __init__(self, rate: float | None, residual_risk: float, max_overhead: float, *, seed: int = 0) -> None:
        super().__init__(rate, residual_risk, max_overhead, seed=seed)
        self._all = self._sections[-1, "slot"] = _Section(-1, 1.0, 1.0)
        self._turns = {True: 0, False: 0}
        self._took: dict[bool, deque[float]] = {True: deque(maxlen=REMEMBERED), False: deque(maxlen=REMEMBERED)}
        self._counted = 0.0

    def looks(self, step: int, slot: int) -> bool:
        """Whether this slot is to be checked.

        At first slots are and are not in turn: both graphs are warmed up, as what is recorded then keeps its memory,
        then recorded, then measured.
        """
        if self.fixed is not None and self.fixed in (0.0, 1.0):
            return self.fixed == 1.0
        checked, others = self._turns[True], self._turns[False]
        if min(checked, others) < 2 + SLOTS_MEASURED:
            return checked <= others
        return uniform(self.seed, step, slot, 0) < self.rate(-1, "slot")

    def begin(self, step: int, slot: int, *, whole: bool = False) -> None:
        super().begin(step, slot, whole=whole)
        self._turns[self.whole] += 1
        # A replay counts no calls.
        self._all.flops, self._counted = self._counted or self._all.flops, 0.0

    def idle(self, layer: int) -> bool:
        return not self.whole

    def checking(self, layer: int, section: str, *, flops: float, cost: float) -> bool:
        self._counted += flops
        return self.whole

    def found(self, layer: int) -> None:
        super().found(-1)

    @property
    def crowded(self) -> bool:
        return self.whole

    def slot_took(self, seconds: float, *, crowded: bool = False) -> None:
        self._all.flops = self._counted or self._all.flops
        self.checked_flops += crowded * self._all.flops
        self._took[crowded].append(seconds)
        if not crowded:
            self._slot_seconds.append(seconds)
        if min(map(len, self._took.values())) >= 2 + SLOTS_MEASURED:
            self._all.seconds = max(0.0, min(self._took[True]) - min(self._took[False]))
