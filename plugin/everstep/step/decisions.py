"""Group-wide decisions, in which each rank of a group tells all others what it saw.

The rule of the ranks: an attempt is a fixed sequence of such decisions, and between two of them no rank may branch on
what only it saw. Each decision is one collective of the group and carries its number and name. If the ranks are at
different decisions, the group ends, instead of mixing the values of two decisions.
"""

from typing import Any

from pydantic_core import from_json, to_json

from everstep.quorum.errors import GroupBroken
from everstep.quorum.ranks import GroupRanks


class Decisions:
    """Takes decisions with the other ranks of the group."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks, self.rank = ranks, ranks.rank
        self._taken = 0

    def gather(self, point: str, mine: Any) -> list[Any]:
        """Return what each rank gave as `mine` at `point`, by rank: anything that JSON can represent.

        Raises:
            GroupBroken: a rank is gone, or is at another decision.
        """
        self._taken += 1
        here = [self._taken, point]
        said = [from_json(each) for each in self._ranks.gather(to_json([here, mine]))]
        for rank, (there, _) in enumerate(said):
            if there != here:
                raise GroupBroken(f"rank {rank} of this group is not at decision {self._taken}, '{point}'")
        return [word for _, word in said]

    def all_true(self, point: str, flag: bool) -> bool:
        """Whether `flag` is true on all ranks."""
        return all(self.gather(point, flag))
