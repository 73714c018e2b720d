"""The errors that a group computes, and which of them its checks see. Only one of its ranks errs and sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulation.groups import Life
    from simulation.world import World


@dataclass(frozen=True, slots=True)
class Sick:
    """The slots that a group computes wrongly each time. finite: whether the wrong gradients are finite."""

    slots: frozenset[int]
    finite: bool


class Checks:
    """The errors and checks of one start of a group."""

    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life
        self._wrong: dict[int, bool] = {}
        self.erred: set[tuple[int, int]] = set()
        """Steps and slots that this start computed wrongly at least once."""

    def is_wrong(self, number: int, step: int, slot: int) -> bool:
        """Return whether computation `number` of this life is finite but wrong, which checks see. All ranks get one
        answer. A slot under a bound that is too narrow is never wrong: all groups refuse it, so it passes."""
        if number not in self._wrong and (step, slot) in self._world.narrow:
            self._wrong[number] = False
        if number not in self._wrong:
            sick = self._world.sick.get(self._life.group.id)
            once = self._life.spoiled(("refused", number), self._world.refusing)
            self._wrong[number] = once or (sick is not None and sick.finite and slot in sick.slots)
            if self._wrong[number]:
                self.erred.add((step, slot))
        return self._wrong[number]

    def is_not_finite(self, number: int, step: int, slot: int) -> bool:
        """Return whether the gradient of computation `number` is not finite, which checks do not see."""
        if (step, slot) in self._world.infinite:
            return True
        sick = self._world.sick.get(self._life.group.id)
        once = self._life.spoiled(("not finite", number), self._world.spoiling)
        if found := once or (sick is not None and not sick.finite and slot in sick.slots):
            self.erred.add((step, slot))
        return found
