"""How often each section of each layer is checked.

Section S of a layer does F_S FLOPs a step, its check costs t_S, λ errors happen per FLOP, and an error there
ruins training with probability φ_S. Checked at rate f_S it leaves (1 - f_S)·λ·F_S·φ_S harmful errors a step
unseen. The rates minimise Σ f_S t_S subject to Σ (1 - f_S) λ F_S φ_S <= ε: a fractional knapsack, solved
exactly by taking sections in the order of λ F_S φ_S / t_S until what is left unseen is ε. docs/attention.md
derives it, with units.
"""

from dataclasses import dataclass
from typing import NamedTuple

PRIOR_ERRORS_PER_FLOP = 2e-25
"""6 silent corruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783), at 4e14 FLOP/s each."""

PRIOR_WEIGHT = 0.5
"""How many errors the prior counts for: little, so that the first own finding outweighs it."""

LEAST_RATE = 1 / 64
"""No section is checked less under `adaptive`: where nothing is looked at, no error rate is measured."""

HALF_LIFE_STEPS = 100
"""Steps in which the rate of a layer that had a finding falls by half."""

VULNERABILITY = {"y": 0.77, "dx": 0.78, "dw": 0.73, "forward": 0.44, "backward": 0.44, "rerun": 0.51}
"""Of single bits flipped in a section's results, the share that leaves some output beyond round-off; for `rerun`, the
share that does and that nothing but a second run sees. Measured by bench/attention_coverage.py, the larger of fp32's
and bf16's. Taken for the probability that an error ruins training, which it bounds: what leaves every output within
round-off cannot."""

RISK_STEPS = 1_000_000
"""Steps over which `residual_risk` counts."""


class Load(NamedTuple):
    """One section: FLOPs a step that it protects, what checking all of them costs (any one unit), and the
    probability that an error in it ruins training."""

    flops: float
    cost: float
    vulnerability: float = 1.0


def error_rate(errors: float, flops: float) -> float:
    """Errors per FLOP after `errors` in `flops` checked FLOPs: mean of the Gamma posterior."""
    return (PRIOR_WEIGHT + errors) / (PRIOR_WEIGHT / PRIOR_ERRORS_PER_FLOP + flops)


def allot(loads: list[Load], errors_per_flop: float, risk_per_step: float, least: float = 0.0) -> list[float]:
    """The cheapest rates, in the order of `loads`, that leave at most `risk_per_step` harmful errors unseen.

    All rates are 1 when the risk cannot be met with less, and `least` where nothing more is needed.
    """
    harm = [errors_per_flop * load.flops * load.vulnerability for load in loads]
    rates = [least] * len(loads)
    unseen = sum((1 - least) * h for h in harm)
    order = sorted(range(len(loads)), key=lambda i: harm[i] / max(loads[i].cost, 1e-30), reverse=True)
    for i in order:
        # The last digits of a difference of large sums are not worth a check.
        if unseen <= risk_per_step * (1 + 1e-9) or not harm[i]:
            break
        raised = min(1 - least, (unseen - risk_per_step) / harm[i])
        rates[i] = least + raised
        unseen -= raised * harm[i]
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
    index: int
    layer: int
    cost: float
    vulnerability: float
    flops: float = 0.0
    step_flops: float = 0.0
    rate: float = 1.0


class Schedule:
    """Decides, for every call, whether it is checked.

    Args:
        rate: the fixed share of calls, or None for adaptive rates. 1.0 checks every call and 0.0 none.
        residual_risk: harmful errors expected to pass unseen in RISK_STEPS steps, for adaptive rates.
        seed: draws the calls.
    """

    def __init__(self, rate: float | None, residual_risk: float = 1e-5, *, seed: int = 0) -> None:
        self.fixed = rate
        self.risk_per_step = residual_risk / RISK_STEPS
        self.seed = seed
        self.weights_version = 0
        self.errors = 0.0
        self.checked_flops = 0.0
        self._step, self._slot = 1, 0
        self._sections: dict[tuple[int, str], _Section] = {}
        self._found: dict[int, int] = {}

    def begin(self, step: int, slot: int) -> None:
        """A slot's forward is about to run."""
        self._step, self._slot = step, slot

    def checking(self, layer: int, section: str, *, flops: float, cost: float) -> bool:
        """Whether this call is checked: a pure function of seed, step, slot, layer, section and the current
        rate."""
        if self.fixed is not None and self.fixed in (0.0, 1.0):
            return self.fixed == 1.0
        entry = self._sections.get((layer, section))
        if entry is None:
            # Until its first step is over a section's load is not known: it is checked.
            entry = self._sections[layer, section] = _Section(len(self._sections), layer, cost, vulnerability(section))
        checked = self.will_check(layer, section)
        entry.step_flops += flops
        entry.cost = cost
        if checked:
            self.checked_flops += flops
        return checked

    def will_check(self, layer: int, section: str) -> bool:
        """What `checking` answers, without a call counted."""
        if self.fixed is not None and self.fixed in (0.0, 1.0):
            return self.fixed == 1.0
        entry = self._sections.get((layer, section))
        if entry is None:
            return True
        return uniform(self.seed, self._step, self._slot, entry.index) < self.rate(layer, section)

    def rate(self, layer: int, section: str) -> float:
        """The share of calls of this section that is checked now."""
        if self.fixed is not None:
            return self.fixed
        entry = self._sections[layer, section]
        found = self._found.get(layer)
        raised = 0.0 if found is None else 0.5 ** (max(0, self._step - found) / HALF_LIFE_STEPS)
        return max(entry.rate, raised)

    def found(self, layer: int) -> None:
        """A finding in `layer`: its sections are all checked from now on, less as steps pass."""
        self.errors += 1
        self._found[layer] = self._step

    def committed(self, step: int) -> None:
        """The step is over: derive the rates of the next from the load of this one."""
        self.weights_version += 1
        sections = list(self._sections.values())
        for section in sections:
            section.flops, section.step_flops = section.step_flops or section.flops, 0.0
        if self.fixed is None and sections:
            loads = [Load(section.flops, section.cost, section.vulnerability) for section in sections]
            rates = allot(loads, error_rate(self.errors, self.checked_flops), self.risk_per_step, LEAST_RATE)
            for section, rate in zip(sections, rates, strict=True):
                section.rate = rate

    def weights_changed(self) -> None:
        """Weights changed other than by a commit."""
        self.weights_version += 1
