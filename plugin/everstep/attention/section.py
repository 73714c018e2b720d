"""`[attention_check]`: the section of a config that switches the checks on."""

from dataclasses import dataclass, field
from typing import Literal


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(kw_only=True, slots=True)
class Inject:
    """`[attention_check.inject]`: deliberate faults, to see the checks at work."""

    kind: Literal["", "bitflip", "inf", "nan", "near-inf", "scale", "row", "tile"] = ""
    """The fault that is written into a result: one flipped bit, an infinity, a NaN, a value near the dtype's largest,
    a value times 1000 (`scale`), a row or a 16 x 16 tile of values times 1000. Empty: no fault."""

    section: str = "*"
    """Names of the results that are hit, as a pattern, e.g. `*`, `*.dw`, `wo.y`, `context`, `dq`; on the explicit path
    also `scores`, `scores.backward` and `dp`."""

    rank: int = -1
    """The rank that is hit; -1: every rank."""

    first_step: int = 1
    """The first step that is hit."""

    every: int = 1
    """Steps from one hit to the next."""

    seed: int = 0
    """Seed from which the element, the layer and the section of each hit are drawn."""

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"attention_check.inject.every = {self.every}: must be 1 or more.")
        _require(
            self.first_step >= 1,
            f"attention_check.inject.first_step = {self.first_step}: steps count from 1.",
        )


@dataclass(kw_only=True, slots=True)
class AttentionCheck:
    """`[attention_check]`: check the attention's own arithmetic, forward and backward."""

    enable: bool = False
    """Whether the attention of every layer is checked. If not, the model is torchtitan's own, unchanged."""

    mode: Literal["correct", "detect"] = "correct"
    """`correct`: repair a wrong result in place if possible (on the explicit path; projections on CPUs), and refuse the
    slot otherwise. `detect`: refuse the slot on every finding."""

    frequency: Literal["adaptive"] | float = "adaptive"
    """Share of the slots in which a layer is checked, forward and backward: 0.0 to 1.0, or `adaptive`: the largest
    share that `max_overhead` allows."""

    max_overhead: float = 0.01
    """For frequency = "adaptive": the most time that checks take, as a share of the time that slots take without them,
    measured on the device. The cheap looks of every slot come first, whatever they take. The sampled checks get the
    rest, but check one layer in 64 slots at least."""

    path: Literal["explicit", "fused"] = "fused"
    """How attention is computed. `explicit`: scores, softmax and context as matrices, each checked and corrected.
    `fused`: the stock kernel. Its forward runs twice and is compared; its backward is checked by identities."""

    inject: Inject = field(default_factory=Inject)
    """Deliberate faults. Never use them in a run whose result matters."""

    def __post_init__(self) -> None:
        self.rate()
        _require(
            0 < self.max_overhead <= 10,
            f"attention_check.max_overhead = {self.max_overhead}: must be above 0 and at most 10.",
        )

    def rate(self) -> float | None:
        """Return the fixed share of slots in which a layer is checked, or None for `adaptive`.

        Raises:
            ValueError: frequency is neither `adaptive` nor a number from 0 to 1.
        """
        rate = None if self.frequency == "adaptive" else float(self.frequency)
        _require(
            rate is None or 0.0 <= rate <= 1.0,
            f'attention_check.frequency = {self.frequency!r}: must be "adaptive" or a number from 0 to 1.',
        )
        return rate
