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
        self._looked: dict[int, list[str]] = {}
        self._of = (0, 0)
        self._seen: defaultdict[int, list[list[str]]] = defaultdict(list)
        self._doubted: set[int] = set()
        self._asked: dict[int, int] = {}

    def at(self, step: int, history: int) -> None:
        """What was seen on another state, or at another step, counts no more."""
        if self._of != (step, history):
            self._of = step, history
            self._seen.clear()
            self._doubted.clear()
            self._asked.clear()

    def look(self, number: int, slot: int) -> list[str]:
        """What a computation, by its number in this life, refuses; the same answer on all ranks."""
        if number not in self._looked:
            world, group = self._world, self._life.group.id
            seen = []
            if self._life.spoiled(("refused", number), world.refusing):
                seen.append(f"once {group} {number}")
            if world.sick.get(group) == slot:
                seen.append(f"sick {group} {number}")
            if slot in world.narrow and self._of[0] >= world.narrow[slot] and slot not in self.wide:
                seen.append(NARROW)
            self._looked[number] = seen
            if seen or slot in self._doubted:  # else it looked at a part
                self._seen[slot].append(seen)
        return self._looked[number]

    def testify(self, slots: Sequence[int]) -> bytes:
        seen = {slot: self._seen[slot][-1] for slot in slots if self._seen[slot]}
        return json.dumps([seen, sorted(self.wide)]).encode()

    def weigh(self, doubts: Sequence[Doubt], said: Mapping[int, bytes]) -> None:
        told = {group: json.loads(words) for group, words in said.items()}
        for _, wide in told.values():
            self.wide.update(wide)
        self._doubted = {doubt.slot for doubt in doubts}
        self._asked.clear()
        for doubt in doubts:
            if not doubt.held or told[doubt.asked][0].get(str(doubt.slot)) == []:
                self._asked[doubt.slot] = doubt.asked
            seen = [words[str(doubt.slot)] for words, _ in told.values() if str(doubt.slot) in words]
            if sum(NARROW in words for words in seen) > 1:
                self.wide.add(doubt.slot)
            own = self._refusals(doubt.slot)
            if not doubt.alone or len(own) < (TWICE if len(seen) > 1 else ALONE):
                continue
            if len(seen) == 1 and all(words == [NARROW] for words in own):
                self.wide.add(doubt.slot)
            else:
                self._leave(own)

    def answered(self, commit: Commit) -> None:
        """Another group's slots are in a commit."""
        if (commit.step, commit.parent) != self._of:
            return
        for slot, asked in self._asked.items():
            own = self._refusals(slot)
            if commit.owners[slot] == asked != self._life.group.id and len(own) >= TWICE:
                self._leave(own)

    def _refusals(self, slot: int) -> list[list[str]]:
        """What it refused each time, less what a bound that was widened since allows; none where the last time showed
        nothing else."""
        seen = [[word for word in words if word != NARROW or slot not in self.wide] for words in self._seen[slot]]
        return list(filter(None, seen)) if seen and seen[-1] else []

    def _leave(self, own: list[list[str]]) -> None:
        """This group is at fault: it goes on on another machine."""
        world, group = self._world, self._life.group.id
        if all(words == [NARROW] for words in own):
            world.judge.violate("named in vain", f"{self._life.name} for {own}")
        world.unfit.add(self._life.name)
        world.sick.pop(group, None)
        raise GroupBroken(f"unfit: {own}")
