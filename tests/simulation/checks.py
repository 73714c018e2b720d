"""What a group's checks refuse, and what its ranks make of what others saw: `everstep.titan.witness`, with words in the
place of residuals. "narrow" is what every group sees in a slot whose bound is too narrow; what a sick group sees, or
one with a transient error, is another word each time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from everstep.step.interfaces import Commit, Doubt, GroupBroken

if TYPE_CHECKING:
    from simulation.groups import Life
    from simulation.world import World

NARROW = "narrow"
TWICE, ALONE = 2, 3
"""Refusals after which a witness is heard, and after which a group decides that has none."""


class Checks:
    """Of one start of a group; its ranks see and hear the same."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life
        self.wide: set[int] = set()
        """Slots whose bound was widened."""
        self._looked: dict[int, str] = {}
        self._of = (0, 0)
        self._seen: defaultdict[int, list[str]] = defaultdict(list)
        self._asked: defaultdict[int, set[int]] = defaultdict(set)

    def at(self, step: int, history: int) -> None:
        """What was seen on another state, or at another step, counts no more."""
        if self._of != (step, history):
            self._of = step, history
            self._seen.clear()
            self._asked.clear()

    def look(self, number: int, slot: int) -> str:
        """What a computation, by its number in this life, refuses; the same answer on all ranks."""
        if number not in self._looked:
            world, group = self._world, self._life.group.id
            seen = ""
            if self._life.spoiled(("refused", number), world.refusing):
                seen = f"once {group} {number}"
            elif world.sick.get(group) == slot:
                seen = f"sick {group} {number}"
            elif slot in world.narrow and slot not in self.wide:
                seen = NARROW
            self._looked[number] = seen
            self._seen[slot].append(seen)
        return self._looked[number]

    def testify(self, slots: Sequence[int]) -> bytes:
        seen = {slot: self._seen[slot][-1] for slot in slots if self._seen[slot]}
        return json.dumps([seen, sorted(self.wide)]).encode()

    def weigh(self, doubts: Sequence[Doubt], said: Mapping[int, bytes]) -> None:
        told = {group: json.loads(words) for group, words in said.items()}
        for _, wide in told.values():
            self.wide.update(wide)
        for doubt in doubts:
            self._asked[doubt.slot].add(doubt.asked)
            seen = {group: words[str(doubt.slot)] for group, (words, _) in told.items() if str(doubt.slot) in words}
            if list(seen.values()).count(NARROW) > 1:
                self.wide.add(doubt.slot)
            own = self._refusals(doubt.slot)
            if not doubt.alone or len(own) < (TWICE if len(seen) > 1 else ALONE):
                continue
            if len(seen) == 1 and set(own) == {NARROW}:
                self.wide.add(doubt.slot)
            else:
                self._leave(own)

    def answered(self, commit: Commit) -> None:
        """Another group's slots are in a commit."""
        if (commit.step, commit.parent) != self._of:
            return
        for slot, asked in self._asked.items():
            own = self._refusals(slot)
            if commit.owners[slot] in asked - {self._life.group.id} and len(own) >= TWICE:
                self._leave(own)

    def _refusals(self, slot: int) -> list[str]:
        seen = [word for word in self._seen[slot] if word and not (word == NARROW and slot in self.wide)]
        return seen if self._seen[slot] and self._seen[slot][-1] in seen else []

    def _leave(self, own: list[str]) -> None:
        """This group is at fault: it goes on on another machine."""
        world, group = self._world, self._life.group.id
        if set(own) == {NARROW}:
            world.judge.violate("named in vain", f"{self._life.name} for {own}")
        world.unfit.add(self._life.name)
        world.sick.pop(group, None)
        raise GroupBroken(f"unfit: {own}")
