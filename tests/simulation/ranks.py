"""The ranks of one group: their collectives, and that all of them take the same ones in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.quorum.errors import GroupBroken
from simulation.scheduler import Signal

if TYPE_CHECKING:
    from simulation.groups import Life
    from simulation.world import World

TIMEOUT_S = 100.0
"""torchtitan's timeout of a collective within a group."""


class _Meeting:
    __slots__ = ("signature", "values")

    def __init__(self, signature: tuple[Any, ...]) -> None:
        self.signature = signature
        self.values: dict[int, Any] = {}


class Collectives:
    """One process group within a group: pairs call number k of every rank, whatever they call."""

    def __init__(self, world: World, life: Life, name: str) -> None:
        self._world, self._life, self._name = world, life, name
        self._calls = [0] * life.size
        self._meetings: dict[int, _Meeting] = {}
        self.changed = Signal()

    def meet(self, rank: int, signature: tuple[Any, ...], value: Any) -> list[Any]:
        """What every rank gave, by rank. Raises GroupBroken."""
        scheduler, life = self._world.scheduler, self._life
        scheduler.check()
        number = self._note(rank, signature, value)
        meeting = self._meetings[number]
        if len(meeting.values) == life.size:
            self._meetings.pop(number)
            self.changed.fire(scheduler)
            return [meeting.values[place] for place in range(life.size)]
        in_time = scheduler.wait(self.changed, lambda: len(meeting.values) == life.size or life.broken, TIMEOUT_S)
        if len(meeting.values) < life.size or (life.broken and scheduler.random.random() < 0.5):
            raise GroupBroken("a rank of this group is gone" if in_time else f"no answer within {TIMEOUT_S:.0f} s")
        return [meeting.values[place] for place in range(life.size)]

    def note(self, rank: int, signature: tuple[Any, ...]) -> None:
        """A call that all ranks make in the same order, though none waits for the others."""
        self._world.scheduler.check()
        number = self._note(rank, signature, None)
        if len(self._meetings[number].values) == self._life.size:
            del self._meetings[number]

    def _note(self, rank: int, signature: tuple[Any, ...], value: Any) -> int:
        number = self._calls[rank]
        self._calls[rank] += 1
        meeting = self._meetings.setdefault(number, _Meeting(signature))
        meeting.values[rank] = value
        if meeting.signature != signature:
            text = f"{self._life.name}, {self._name} {number}: {signature} of rank {rank} meets {meeting.signature}"
            self._world.judge.violate("collectives paired", text)
            raise GroupBroken("the ranks of this group are at different calls")
        return number


class GroupRanks:
    def __init__(self, collectives: Collectives, rank: int, size: int) -> None:
        self._collectives, self.rank, self.size = collectives, rank, size

    def gather(self, mine: bytes) -> list[bytes]:
        return self._collectives.meet(self.rank, ("gather",), mine)
