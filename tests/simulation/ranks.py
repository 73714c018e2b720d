"""The collectives within one group. All of its ranks must call the same ones in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.quorum.errors import GroupBroken
from simulation.scheduler import Signal

if TYPE_CHECKING:
    from simulation.groups import Life
    from simulation.world import World

TIMEOUT_S = 100.0
"""Seconds of torchtitan's timeout of a collective within a group."""


class Collectives:
    """One process group within a group. It pairs the calls with the same number of all ranks."""

    def __init__(self, world: World, life: Life, name: str) -> None:
        self._world, self._life, self._name = world, life, name
        self._calls = [0] * life.size
        self._meetings: dict[int, tuple[tuple[Any, ...], dict[int, Any]]] = {}
        """Number of a call that some rank has still to make -> its signature, and the values of the other ranks."""
        self.changed = Signal()

    def meet(self, rank: int, signature: tuple[Any, ...], value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Raises GroupBroken if a rank is gone, late or at another call."""
        scheduler, life = self._world.scheduler, self._life
        scheduler.check()
        number = self._note(rank, signature, value)
        _, values = self._meetings[number]
        if len(values) == life.size:
            self._meetings.pop(number)
            self.changed.fire(scheduler)
            return [values[place] for place in range(life.size)]
        in_time = scheduler.wait(self.changed, lambda: len(values) == life.size or life.broken, TIMEOUT_S)
        if len(values) < life.size or (life.broken and scheduler.random.random() < 0.5):
            raise GroupBroken("a rank of this group is gone" if in_time else f"no answer within {TIMEOUT_S:.0f} s")
        return [values[place] for place in range(life.size)]

    def note(self, rank: int, signature: tuple[Any, ...]) -> None:
        """Note a call that all ranks make in the same order, without waiting for each other."""
        self._world.scheduler.check()
        number = self._note(rank, signature, None)
        if len(self._meetings[number][1]) == self._life.size:
            del self._meetings[number]

    def _note(self, rank: int, signature: tuple[Any, ...], value: Any) -> int:
        number = self._calls[rank]
        self._calls[rank] += 1
        first, values = self._meetings.setdefault(number, (signature, {}))
        values[rank] = value
        if first != signature:
            text = f"{self._life.name}, {self._name} {number}: {signature} of rank {rank} meets {first}"
            self._world.judge.violate("collectives paired", text)
            raise GroupBroken("the ranks of this group are at different calls")
        return number


class GroupRanks:
    def __init__(self, collectives: Collectives, rank: int, size: int) -> None:
        self._collectives, self.rank, self.size = collectives, rank, size

    def gather(self, mine: bytes) -> list[bytes]:
        return self._collectives.meet(self.rank, ("gather",), mine)
