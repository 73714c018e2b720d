"""When all groups take a snapshot, and which one none of them gives up. Pure functions.

A snapshot is of use only when every group has its part. So whether one is taken is decided at a commit, by all groups
alike, from what each of them said before the vote (`Word`): the one before must have been settled by all, which is to
say verified, and coded or given up. Of the buffers one holds the *anchor*, the newest snapshot that all groups hold
and that is coded in every parity group; another is written. A group that cannot be coded, because its keeper is
frozen or its memory full, keeps the anchor where it is once, and not again: then it is what is unprotected, and the
others go on.

Verifying and coding costs the hosts more than copying does. Where keepers would spend more than `coding_share` of the
time on it, snapshots in between are *interim*: whoever restores one verifies it, and with a host it is lost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_FLAGS = 8
"""Bits of an encoded word that are yes or no."""


@dataclass(frozen=True)
class Word:
    """What a group says of the snapshot that was taken last."""

    published: bool = False
    """It holds its part, and has not found it damaged."""
    settled: bool = True
    """It is verified, and coded or given up: nothing more will come of it soon."""
    coded: bool = False
    """Parity over it is published, so that it survives the loss of this host."""
    able: bool = True
    """It had room for its last snapshot, or has not tried for a while."""
    busy_if_anchor: bool = False
    """Somebody reads, or is about to, the buffer that would be written next if the newest snapshot becomes the
    anchor."""
    busy_if_not: bool = False
    """The same of one that may be written next otherwise."""
    rested: bool = True
    """Its keeper has rested from the last snapshot that it verified and coded."""
    location: int = 0
    """Where its host is (`location.location_of`); 0: not known."""

    def encode(self) -> int:
        """As a number above 0, below 2^53."""
        busy = self.busy_if_anchor, self.busy_if_not
        bits = (True, self.published, self.settled, self.coded, self.able, *busy, self.rested)
        return sum(1 << place for place, bit in enumerate(bits) if bit) | self.location << _FLAGS

    @classmethod
    def decode(cls, number: int) -> "Word | None":
        """The inverse; None where nobody spoke."""
        flags = (bool(number >> place & 1) for place in range(1, _FLAGS))
        return cls(*flags, location=number >> _FLAGS) if number & 1 else None


@dataclass(frozen=True)
class Taken:
    """A snapshot that all members were to take."""

    step: int
    history: int
    members: tuple[int, ...]
    interim: bool = False
    """Keepers neither verify nor code it."""


@dataclass(frozen=True)
class Agreed:
    """What all groups of a run know alike of its snapshots. A joiner takes it over from the group it heals from."""

    taken: Taken | None = None
    """The newest."""
    anchor: tuple[int, int] | None = None
    """Step and history of the one that is not overwritten."""
    whole: tuple[int, int] | None = None
    """Of the newest that all groups have published. Where there is room for three it is not overwritten either."""
    unprotected: frozenset[int] = field(default_factory=frozenset)
    """Groups whose part of the newest settled one was not coded."""
    coders: tuple[int, ...] = ()
    """Members of the newest that was to be coded."""

    def to_json(self) -> list[Any]:
        taken = self.taken and [self.taken.step, self.taken.history, list(self.taken.members), self.taken.interim]
        ends = self.anchor and list(self.anchor), self.whole and list(self.whole)
        return [taken, *ends, sorted(self.unprotected), list(self.coders)]

    @classmethod
    def from_json(cls, body: Sequence[Any]) -> "Agreed":
        taken, anchor, whole, unprotected, coders = body
        return cls(
            taken and Taken(int(taken[0]), int(taken[1]), tuple(map(int, taken[2])), bool(taken[3])),
            anchor and (int(anchor[0]), int(anchor[1])),
            whole and (int(whole[0]), int(whole[1])),
            frozenset(map(int, unprotected)),
            tuple(map(int, coders)),
        )

    def take(self, step: int, history: int, members: tuple[int, ...], words: Mapping[int, Word]) -> "Agreed":
        """A snapshot is taken; to be coded if the keepers have rested, or no newer one than of other members is."""
        due = self.anchor is None or members != self.coders or all(word.rested for word in words.values())
        taken = Taken(step, history, members, interim=not due)
        return replace(self, taken=taken, coders=members)


def learn(agreed: Agreed, words: Mapping[int, Word]) -> tuple[Agreed, str]:
    """What is known once the groups have spoken, and why no snapshot may be taken yet; "" if one may.

    Args:
        words: by group, of those that took part in the commit and spoke.
    """
    taken = agreed.taken
    if taken is None:
        return agreed, _busy([group for group, word in words.items() if word.busy_if_anchor])
    spoke = {group: words[group] for group in taken.members if group in words}
    waiting = [group for group, word in spoke.items() if not word.settled]
    if waiting:
        return agreed, f"{_named(waiting)} still verify or code step {taken.step}"
    anchor, whole, unprotected = agreed.anchor, agreed.whole, agreed.unprotected
    # What is neither is what the next one overwrites.
    if len(spoke) == len(taken.members) and all(word.published for word in spoke.values()):
        whole = (taken.step, taken.history)
        if not taken.interim:
            uncoded = frozenset(group for group, word in spoke.items() if not word.coded)
            anchor = whole if uncoded <= unprotected else anchor
            unprotected = uncoded
    moved = anchor != agreed.anchor
    busy = [group for group, word in words.items() if (word.busy_if_anchor if moved else word.busy_if_not)]
    return replace(agreed, taken=None, anchor=anchor, whole=whole, unprotected=unprotected), _busy(busy)


def members_of(groups: Sequence[int], words: Mapping[int, Word]) -> tuple[int, ...]:
    """The groups that a snapshot is shared among: those that have room, and those that have not spoken yet. All, if
    none has room."""
    able = tuple(sorted(group for group in groups if group not in words or words[group].able))
    return able or tuple(sorted(groups))


def _busy(groups: Sequence[int]) -> str:
    return f"the buffer to be written is being read in {_named(groups)}" if groups else ""


def _named(groups: Sequence[int]) -> str:
    shown = ", ".join(map(str, groups[:8])) + (f" and {len(groups) - 8} more" if len(groups) > 8 else "")
    return f"group{'s' if len(groups) > 1 else ''} {shown}"
