"""Whose fault it is that one slot is refused again and again.

A refusal has two explanations: the rank computes wrongly, or the bound is too narrow for the numbers it is given, and
then every healthy rank refuses the same slot. Nobody is sent away on the word of one rank. What a rank saw (`Evidence`)
is compared with what another group sees in the same slot, whose inputs, weights and random numbers are the same:

    the other group saw nothing                the rank is at fault
    it saw the same, finite                    the bound is: the section's bound is widened, and training goes on
    it saw the same, INF or NaN                neither: the numbers themselves are not finite
    it saw something else                      another witness is asked; two that agree against the rank decide

A run of one group has no witness. There a residual that is the same in every attempt is taken for the bound's fault,
since no transient error repeats itself, and one that differs for the rank's.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

ATTEMPTS = 2
"""Refusals of one slot on one rank before a witness is asked."""

ATTEMPTS_ALONE = 3
"""Refusals of one slot on one rank before it decides without a witness."""

SAME = 0.02
"""Residuals are the same that differ by less than this share: kernels may sum in another order, and another group's
devices may multiply with other tiles."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one section of one layer showed in a refused slot.

    kind: nan, inf, near-inf or moderate. magnitude: the largest finite residual. ratio: the largest finite residual in
    units of its bound. own: whether operands and bound were finite, so that the error was made here.
    """

    layer: int
    section: str
    kind: str
    magnitude: float
    ratio: float
    own: bool

    @property
    def finite(self) -> bool:
        return self.kind in ("near-inf", "moderate")

    def agrees(self, other: "Sighting") -> bool:
        """Whether both ranks saw the same residual in the same place."""
        place = (self.layer, self.section, self.finite) == (other.layer, other.section, other.finite)
        return place and abs(self.magnitude - other.magnitude) <= SAME * max(self.magnitude, other.magnitude)


Evidence = tuple[Sighting, ...]
"""What one computation of a slot refused; empty: nothing."""


class Verdict(Enum):
    """What follows from evidence."""

    AGAIN = "compute the slot again"
    WITNESS = "another group must compute the slot"
    UNFIT = "this rank is at fault"
    BOUND = "the bound is at fault"
    NOT_FINITE = "the numbers themselves are not finite"


def same(a: Evidence, b: Evidence) -> bool:
    """Whether two computations of one slot refused the same residuals in the same places."""
    return len(a) == len(b) and all(x.agrees(y) for x, y in zip(_sorted(a), _sorted(b), strict=True))


def judge(own: Sequence[Evidence], witnesses: Sequence[Evidence] = (), *, alone: bool = False) -> Verdict:
    """Whose fault it is.

    Args:
        own: this rank's evidence, one for each time it refused the slot, oldest first.
        witnesses: that of the same rank column of other groups which computed the slot; an empty one computed it
            without a refusal.
        alone: no other group can be asked.
    """
    if len(own) < (ATTEMPTS_ALONE if alone and not witnesses else ATTEMPTS):
        return Verdict.AGAIN
    last = own[-1]
    if any(not witness for witness in witnesses):
        return Verdict.UNFIT
    agreeing = [witness for witness in witnesses if same(last, witness)]
    if agreeing or (alone and not witnesses and all(same(last, earlier) for earlier in own)):
        return Verdict.BOUND if all(sighting.finite for sighting in last) else Verdict.NOT_FINITE
    against = any(same(a, b) for i, a in enumerate(witnesses) for b in witnesses[i + 1 :])
    if against or (alone and not witnesses):
        return Verdict.UNFIT
    return Verdict.WITNESS


def encode(evidence: Evidence) -> list[dict[str, Any]]:
    """Evidence as plain values, for a row or an event."""
    return [asdict(sighting) for sighting in evidence]


def decode(values: list[dict[str, Any]]) -> Evidence:
    """What `encode` made.

    Raises:
        ValueError: values are not what `encode` makes.
    """
    kinds = {"layer": int, "section": str, "kind": str, "magnitude": (int, float), "ratio": (int, float), "own": bool}
    for value in values:
        if not isinstance(value, dict) or value.keys() != kinds.keys():
            raise ValueError("evidence of attention findings: fields are missing or unknown")
        for name, kind in kinds.items():
            if not isinstance(value[name], kind):
                raise ValueError(f"evidence of attention findings: {name} = {value[name]!r}")
    return tuple(Sighting(**value) for value in values)


def _sorted(evidence: Evidence) -> list[Sighting]:
    return sorted(evidence, key=lambda sighting: (sighting.layer, sighting.section))
