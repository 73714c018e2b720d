"""Group-wide decisions: what one rank saw becomes what all ranks of the group know.

The rule of the ranks: an attempt is a fixed sequence of such decisions, and between two of them no rank may branch on
what only it saw. Each decision is one collective of the group, carries its place in the sequence, and is checked for
it: ranks that are not at the same decision end the group instead of pairing what does not belong together.
"""

import zlib
from collections.abc import Sequence

from everstep.quorum.errors import GroupBroken
from everstep.step.interfaces import Ranks

WORD = 7
"""Bytes in an int64 word that never touches its sign."""


class Decisions:
    """Takes decisions with the other ranks of the group."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._taken = 0

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def gather(self, point: str, words: Sequence[int]) -> list[list[int]]:
        """What each rank said at `point`, by rank.

        Raises:
            GroupBroken: a rank is gone, or at another decision.
        """
        self._taken += 1
        here = [self._taken, zlib.crc32(point.encode())]
        answers = self._ranks.gather([*here, *words])
        for rank, answer in enumerate(answers):
            if answer[:2] != here:
                raise GroupBroken(f"rank {rank} of this group is not at decision {self._taken}, '{point}'")
        return [answer[2:] for answer in answers]

    def all_true(self, point: str, flag: bool) -> bool:
        """Whether the flag holds on all ranks."""
        return all(answer[0] for answer in self.gather(point, [int(flag)]))

    def gather_bytes(self, point: str, mine: bytes) -> list[bytes]:
        """What each rank gave at `point`, by rank."""
        longest = max(length for [length] in self.gather(f"{point}, length", [len(mine)]))
        padded = mine.ljust(longest, b"\0")
        words = [int.from_bytes(padded[at : at + WORD], "little") for at in range(0, longest, WORD)]
        said = self.gather(point, [len(mine), *words])
        return [b"".join(word.to_bytes(WORD, "little") for word in packed)[:size] for size, *packed in said]

    def first(self, point: str, payload: bytes) -> bytes:
        """What rank 0 gave."""
        self.gather(point, [])
        return self._ranks.broadcast(payload)
