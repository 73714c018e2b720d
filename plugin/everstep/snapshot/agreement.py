"""When all groups take a snapshot, and which snapshot all of them keep. Pure functions.

A snapshot is of use only if every group has its part. So all groups decide together, at a commit, whether to take one.
They decide from the `Status` that each group sent before the vote: every group must have settled the previous snapshot,
which means verified and coded it, or given it up. Of a rank's two buffers, one holds the *anchor*, the newest snapshot
that all groups have verified and coded. The next snapshot is written to the other.

If a snapshot was not coded, one member of each parity group that failed is left out of the next snapshots: the member
that most others waited for. The others share its part, as they do the part of a group that has no room.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from everstep.run import typed
from everstep.run.events import named
from everstep.snapshot.header import Moment
from everstep.snapshot.parity import LOCATION_BITS, Domains

_FLAGS = 4
"""Number of yes-or-no bits in an encoded status."""
_BLAMED_BITS = 8
assert _FLAGS + _BLAMED_BITS + LOCATION_BITS <= 53  # a float64 holds integers below 2^53 exactly


@dataclass(frozen=True)
class Status:
    """What a group says about the last snapshot that was taken."""

    settled: bool = True
    """Whether this group's work on the snapshot is over: it is coded or given up."""
    coded: bool = False
    """Whether the snapshot is verified and, if it has parity, this group's parity is published."""
    able: bool = True
    """Whether the group can share the next snapshot; False for `copier.RETRY_S` after it was left out or failed."""
    blamed_index: int = -1
    """Index in the parity group of the member because of which the snapshot is not coded; -1 for none."""
    location: int = 0
    """Location of the group's host (`parity.location_of`); 0 if unknown."""

    def encode(self) -> int:
        """Return the status as an integer above 0 and below 2^53."""
        bits = (True, self.settled, self.coded, self.able)
        flags = sum(1 << place for place, bit in enumerate(bits) if bit)
        return flags | self.blamed_index + 1 << _FLAGS | self.location << _FLAGS + _BLAMED_BITS

    @classmethod
    def decode(cls, number: int) -> "Status | None":
        """The inverse of `encode`; None for 0, which stands for a group that sent no status."""
        flags = (bool(number >> place & 1) for place in range(1, _FLAGS))
        blamed_index = (number >> _FLAGS & (1 << _BLAMED_BITS) - 1) - 1
        return cls(*flags, blamed_index=blamed_index, location=number >> _FLAGS + _BLAMED_BITS) if number & 1 else None


@dataclass(frozen=True)
class Agreed:
    """What all groups of a run know about its snapshots. A joiner copies it from the group that it heals from."""

    taken: Moment | None = None
    """The newest snapshot, until it is known whether it was coded; None after that."""
    anchor: Moment | None = None
    """The newest coded snapshot, which is not overwritten."""
    members: tuple[int, ...] = ()
    """Groups that share the newest snapshot."""
    locations: tuple[int, ...] = ()
    """Locations of the members' hosts, in the same order."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Any) -> "Agreed":
        """The inverse of `to_json`. Raises ValueError."""
        return typed.parse(cls, body, "what is agreed on snapshots")

    def take(self, taken: Moment, members: tuple[int, ...], statuses: Mapping[int, Status]) -> "Agreed":
        """Return what is agreed once these members take a snapshot. `statuses`: group id -> its status."""
        locations = tuple(statuses[member].location if member in statuses else 0 for member in members)
        return replace(self, taken=taken, members=members, locations=locations)

    def domains(self, size: int, parity: int) -> Domains:
        """Return the parity groups of the newest snapshot."""
        return Domains(self.members, size, parity, self.locations)


@dataclass(frozen=True)
class Conclusion:
    """What became of the newest snapshot."""

    agreed: Agreed
    waiting: str = ""
    """Why no snapshot may be taken now; "" if one may."""
    protected: bool = False
    """Whether the snapshot is coded, which makes it the new anchor."""
    left_out: frozenset[int] = frozenset()
    """The groups that are left out of the next snapshots because this one could not be coded."""


def conclude(agreed: Agreed, statuses: Mapping[int, Status], size: int, parity: int) -> Conclusion:
    """Return what became of the newest snapshot, from what the groups said.

    Args:
        statuses: group id -> status, of the groups that took part in the commit and sent a status.
        size, parity: [snapshot] parity_group and parity.
    """
    if agreed.taken is None:
        return Conclusion(agreed)
    spoke = {group: statuses[group] for group in agreed.members if group in statuses}
    waiting = [group for group, status in spoke.items() if not status.settled]
    if waiting:
        return Conclusion(agreed, waiting=f"step {agreed.taken[0]} is still being coded by {named(waiting)}")
    over = replace(agreed, taken=None)
    if len(spoke) < len(agreed.members):  # some members are gone, and their parts with them
        return Conclusion(over)
    if all(status.coded for status in spoke.values()):
        return Conclusion(replace(over, anchor=agreed.taken), protected=True)
    groups = agreed.domains(size, parity).groups
    return Conclusion(
        over, left_out=frozenset(blamed for group in groups if (blamed := _blamed(group, spoke)) is not None)
    )


def _blamed(group: tuple[int, ...], spoke: Mapping[int, Status]) -> int | None:
    """Return the member that most of a parity group waited for, the highest id on a tie; None if it waited for none."""
    failed = [spoke[member] for member in group if not spoke[member].coded]
    votes = Counter(group[status.blamed_index] for status in failed if 0 <= status.blamed_index < len(group))
    return max(votes, key=lambda member: (votes[member], member)) if votes else None


def members_of(groups: Sequence[int], statuses: Mapping[int, Status], left_out: frozenset[int]) -> tuple[int, ...]:
    """Return the groups that share the next snapshot: those that sent a status and can keep up, or all if none can."""
    able = [group for group in groups if group in statuses and statuses[group].able and group not in left_out]
    return tuple(sorted(able or groups))
