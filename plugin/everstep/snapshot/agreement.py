"""When all groups take a snapshot, and which one none of them gives up. Pure functions.

A snapshot is of use only when every group has its part. So whether one is taken is decided at a commit, by all groups
alike, from what each of them said before the vote (`Word`): the one before must have been settled by all, which is to
say verified and coded, or given up. Of the two buffers one holds the *anchor*, the newest snapshot that all groups have
verified and coded; the other is written.

When a snapshot was not coded, one member of each parity group that failed is left out of the next ones: the one that
most others waited for. The others share its part, as they do that of a group that has no room.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from everstep.run import typed
from everstep.snapshot.header import Moment
from everstep.snapshot.parity import LOCATION_BITS, Domains

_FLAGS = 4
"""Bits of an encoded word that are yes or no."""
_WAITS_BITS = 8
assert _FLAGS + _WAITS_BITS + LOCATION_BITS <= 53  # which a float64 has


@dataclass(frozen=True)
class Word:
    """What a group says of the snapshot that was taken last."""

    settled: bool = True
    """Nothing more will come of it here."""
    coded: bool = False
    """It is verified, and parity over it is published here, if there is to be parity."""
    able: bool = True
    """It could keep up with its last snapshot, or has not tried for a while."""
    waits_for: int = -1
    """Where in the parity group the member stands because of which it is not coded; -1 for none."""
    location: int = 0
    """Where its host is (`parity.location_of`); 0: not known."""

    def encode(self) -> int:
        """As a number above 0, below 2^53."""
        bits = (True, self.settled, self.coded, self.able)
        flags = sum(1 << place for place, bit in enumerate(bits) if bit)
        return flags | self.waits_for + 1 << _FLAGS | self.location << _FLAGS + _WAITS_BITS

    @classmethod
    def decode(cls, number: int) -> "Word | None":
        """The inverse; None where nobody spoke."""
        flags = (bool(number >> place & 1) for place in range(1, _FLAGS))
        waits_for = (number >> _FLAGS & (1 << _WAITS_BITS) - 1) - 1
        return cls(*flags, waits_for=waits_for, location=number >> _FLAGS + _WAITS_BITS) if number & 1 else None


@dataclass(frozen=True)
class Agreed:
    """What all groups of a run know alike of its snapshots. A joiner takes it over from the group it heals from."""

    taken: Moment | None = None
    """The newest, as long as not all have said what became of it."""
    anchor: Moment | None = None
    """The newest that is coded, which is not overwritten."""
    members: tuple[int, ...] = ()
    """Of the newest."""
    locations: tuple[int, ...] = ()
    """Of its members' hosts."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Any) -> "Agreed":
        """The inverse. Raises ValueError."""
        return typed.parse(cls, body, "what is agreed on snapshots")

    def take(self, taken: Moment, members: tuple[int, ...], words: Mapping[int, Word]) -> "Agreed":
        """A snapshot is taken."""
        places = tuple(words[member].location if member in words else 0 for member in members)
        return replace(self, taken=taken, members=members, locations=places)

    def domains(self, size: int, parity: int) -> Domains:
        """How the newest snapshot is coded."""
        return Domains(self.members, size, parity, self.locations)


@dataclass(frozen=True)
class Outcome:
    """What became of the newest snapshot."""

    agreed: Agreed
    waiting: str = ""
    """Why no snapshot may be taken now."""
    protected: bool = False
    """It is coded, and the anchor now."""
    left_out: frozenset[int] = frozenset()
    """The groups that are left out of the next snapshots because it could not be coded."""


def learn(agreed: Agreed, words: Mapping[int, Word], size: int, parity: int) -> Outcome:
    """What is known once the groups have spoken.

    Args:
        words: by group, of those that took part in the commit and spoke.
        size, parity: [snapshot] parity_group and parity.
    """
    if agreed.taken is None:
        return Outcome(agreed)
    spoke = {group: words[group] for group in agreed.members if group in words}
    waiting = [group for group, word in spoke.items() if not word.settled]
    if waiting:
        return Outcome(agreed, waiting=f"{named(waiting)} still verify or code step {agreed.taken[0]}")
    over = replace(agreed, taken=None)
    if len(spoke) < len(agreed.members):  # some are gone, and with them their parts
        return Outcome(over)
    if all(word.coded for word in spoke.values()):
        return Outcome(replace(over, anchor=agreed.taken), protected=True)
    groups = agreed.domains(size, parity).groups
    return Outcome(
        over, left_out=frozenset(blamed for group in groups if (blamed := _blamed(group, spoke)) is not None)
    )


def _blamed(group: tuple[int, ...], spoke: Mapping[int, Word]) -> int | None:
    """The member that most of a parity group waited for; of several the highest. None if all of it is coded."""
    failed = [spoke[member] for member in group if not spoke[member].coded]
    votes = Counter(group[word.waits_for] for word in failed if 0 <= word.waits_for < len(group))
    return max(votes, key=lambda member: (votes[member], member)) if votes else None


def members_of(groups: Sequence[int], words: Mapping[int, Word], left_out: frozenset[int]) -> tuple[int, ...]:
    """The groups that a snapshot is shared among: those that have spoken and can keep up; all, if none has."""
    able = [group for group in groups if group in words and words[group].able and group not in left_out]
    return tuple(sorted(able or groups))


def named(groups: Sequence[int]) -> str:
    """Groups for a reader, the first eight by number."""
    shown = ", ".join(map(str, sorted(groups)[:8])) + (f" and {len(groups) - 8} more" if len(groups) > 8 else "")
    return f"group{'s' if len(groups) > 1 else ''} {shown}"
