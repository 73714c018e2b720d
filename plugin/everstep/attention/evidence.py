"""Whose fault it is that one slot is refused again and again.

A refusal has two explanations: the rank computes wrongly, or the bound is too narrow for the numbers it is given, and
then every healthy rank refuses the same slot. Nobody is sent away on the word of one rank. What a rank saw (`Evidence`)
is compared, place by place, with what the same rank of another group sees in the same slot, whose inputs, weights and
random numbers are the same:

    the other group saw nothing there          the rank is at fault
    it saw the same, finite                    the bound is: the section's bound is widened, and training goes on
    it saw the same, INF or NaN                neither: the numbers themselves are not finite
    it saw something else                      another witness is asked

Where every group refused the slot and no two alike, a place that two of them refused counts as one that both saw.

A run of one group has no witness. There a residual that is the same in every attempt is taken for the bound's fault,
since no transient error repeats itself, and one that differs for the rank's.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import combinations
from typing import Any, NamedTuple

ATTEMPTS = 2
"""Refusals of one slot on one rank before a witness is heard."""

ATTEMPTS_ALONE = 3
"""Refusals of one slot on one rank before it decides without a witness."""

SAME = 0.02
"""Residuals are the same that differ by less than this share: kernels may sum in another order, and another group's
devices may multiply with other tiles."""

CLEAR = 2.0
"""A residual of fewer bounds than this names nobody, whatever a witness says: where kernels do not repeat themselves to
the bit, another rank may be just within the bound that this one has just left."""

UNBOUNDED = 1e30
"""Stands for the ratio of a residual to a bound of 0."""

Place = tuple[int, str]
"""Layer and section."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What one section of one layer showed in a refused slot.

    kind: nan, inf, near-inf or moderate. magnitude: the largest finite residual. ratio: the largest finite residual in
    units of its bound, as that was before it was widened. own: whether operands and bound were finite, so that the
    error was made here.
    """

    layer: int
    section: str
    kind: str
    magnitude: float
    ratio: float
    own: bool

    @property
    def place(self) -> Place:
        return self.layer, self.section

    @property
    def finite(self) -> bool:
        """Whether it can be compared with a bound."""
        return self.own and self.kind in ("near-inf", "moderate")

    def agrees(self, other: "Sighting", within: float = SAME) -> bool:
        """Whether both ranks saw the same residual in the same place."""
        alike = (self.place, self.finite) == (other.place, other.finite)
        return alike and abs(self.magnitude - other.magnitude) <= within * max(self.magnitude, other.magnitude)


Evidence = tuple[Sighting, ...]
"""What one computation of a slot refused; empty: nothing."""


class Allowance(NamedTuple):
    """By how much a section's bounds were widened in this run: times `factor`, plus `floor`."""

    factor: float = 1.0
    floor: float = 0.0

    def wider(self, other: "Allowance") -> "Allowance":
        return Allowance(max(self.factor, other.factor), max(self.floor, other.floor))

    def explains(self, seen: Sighting) -> bool:
        """Whether a bound so wide takes the residual for round-off."""
        return seen.finite and (seen.ratio <= self.factor or seen.magnitude <= self.floor)

    @staticmethod
    def of(seen: Sighting) -> "Allowance":
        """Twice what was seen. A bound of 0 stays 0, however often it is taken."""
        return Allowance(floor=2 * seen.magnitude) if seen.ratio >= UNBOUNDED else Allowance(max(2 * seen.ratio, 1.0))


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


def shared(seen: Sequence[Evidence], within: float = SAME) -> Evidence:
    """The places in which two ranks, or more, saw the same residual; of each the smaller one, so that a bound is
    widened for what both have."""
    least: dict[Place, Sighting] = {}
    for one, other in combinations(seen, 2):
        for a in one:
            for b in (b for b in other if a.agrees(b, within)):
                least[a.place] = min([a, b, *filter(None, [least.get(a.place)])], key=lambda s: (s.finite, s.ratio))
    return tuple(least[place] for place in sorted(least))


def judge(own: Sequence[Evidence], *, witnessed: bool = False, alone: bool = False) -> Verdict:
    """Whose fault it is.

    Args:
        own: this rank's evidence, one for each time it computed the slot, oldest first, less what is explained by
            `shared` and by bounds that were widened.
        witnessed: another group computed the slot, looked at all of it, and saw nothing of this.
        alone: no other group can be asked.
    """
    refusals = [evidence for evidence in own if evidence]
    if not refusals or not own[-1] or len(refusals) < (ATTEMPTS_ALONE if alone and not witnessed else ATTEMPTS):
        return Verdict.AGAIN
    last = own[-1]
    if not witnessed and not alone:
        return Verdict.WITNESS
    if not witnessed and all(same(last, earlier) for earlier in refusals):
        return Verdict.BOUND if all(sighting.finite for sighting in last) else Verdict.NOT_FINITE
    if all(sighting.finite and sighting.ratio < CLEAR for sighting in last):
        return Verdict.BOUND
    if not any(sighting.own for evidence in refusals for sighting in evidence):
        return Verdict.NOT_FINITE
    return Verdict.UNFIT


@dataclass(frozen=True, slots=True)
class Statement:
    """What one rank tells the same rank of other groups.

    Attributes:
        seen: by slot what it refused when it last computed it; empty where it refused nothing.
        allowed: the bounds that it has widened.
    """

    seen: dict[int, Evidence] = field(default_factory=dict)
    allowed: dict[Place, Allowance] = field(default_factory=dict)

    def encode(self) -> bytes:
        seen = {str(slot): encode(evidence) for slot, evidence in self.seen.items()}
        return json.dumps([seen, [[*place, *allowance] for place, allowance in self.allowed.items()]]).encode()

    @staticmethod
    def decode(said: bytes) -> "Statement":
        """The inverse of `encode`. Raises ValueError for anything else, whatever its type."""
        try:
            seen, allowed = json.loads(said)
            slots = {int(slot): decode(evidence) for slot, evidence in seen.items()}
            places = {(layer, section): Allowance(factor, floor) for layer, section, factor, floor in allowed}
        except (TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"statement of attention checks: {error}") from None
        for (layer, section), allowance in places.items():
            if type(layer) is not int or type(section) is not str or not all(map(_is_size, allowance)):
                raise ValueError(f"statement of attention checks: {layer!r}, {section!r}, {allowance!r}")
        return Statement(slots, places)


def encode(evidence: Evidence) -> list[dict[str, Any]]:
    """Evidence as plain values, for statement or an event."""
    return [asdict(sighting) for sighting in evidence]


def decode(values: list[dict[str, Any]]) -> Evidence:
    """What `encode` made.

    Raises:
        ValueError: values are not what `encode` makes.
    """
    kinds = {"layer": int, "section": str, "kind": str, "own": bool}
    for value in values:
        if not isinstance(value, dict) or value.keys() != Sighting.__dataclass_fields__.keys():
            raise ValueError("evidence of attention findings: fields are missing or unknown")
        for name, given in value.items():
            if not (type(given) is kinds[name] if name in kinds else _is_size(given)):
                raise ValueError(f"evidence of attention findings: {name} = {given!r}")
    return tuple(Sighting(**value) for value in values)


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _sorted(evidence: Evidence) -> list[Sighting]:
    return sorted(evidence, key=lambda sighting: sighting.place)
