"""Group-wide decisions: what one rank saw becomes what all ranks of the group know.

The rule of the ranks: an attempt is a fixed sequence of such decisions, and between two of them no rank may branch on
what only it saw. Each decision is one collective of the group, carries its place in the sequence, and is checked for
it: ranks that are not at the same decision end the group instead of pairing what does not belong together.
"""

import json
from typing import Any

from everstep.quorum.errors import GroupBroken
from everstep.quorum.ranks import GroupRanks


class Decisions:
    """Takes decisions with the other ranks of the group."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks, self.rank = ranks, ranks.rank
        self._taken = 0

    def gather(self, point: str, mine: Any) -> list[Any]:
        """What each rank said at `point`, by rank: anything JSON can carry.

        Raises:
            GroupBroken: a rank is gone, or at another decision.
        """
        self._taken += 1
        here = [self._taken, point]
        said = [json.loads(each) for each in self._ranks.gather(json.dumps([here, mine]).encode())]
        for rank, (there, _) in enumerate(said):
            if there != here:
                raise GroupBroken(f"rank {rank} of this group is not at decision {self._taken}, '{point}'")
        return [word for _, word in said]

    def all_true(self, point: str, flag: bool) -> bool:
        """Whether the flag holds on all ranks."""
        return all(self.gather(point, flag))

    def first(self, point: str, mine: Any) -> Any:
        """What rank 0 said."""
        return self.gather(point, mine)[0]
