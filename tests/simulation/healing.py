"""The heal door of a rank and what joiners fetch through it, in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.judge import State

if TYPE_CHECKING:
    from simulation.groups import Rank
    from simulation.world import World

OPEN_PATIENCE_S = 60.0
"""How long a source keeps a joiner waiting for a step that it has not opened yet."""


class Serving:
    """A state that a door has opened. `read` is the state itself until the door closes, then a copy."""

    def __init__(self, step: int, history: int, read: Callable[[], State]) -> None:
        self.step, self.history = step, history
        self.opened_as = read()
        self._read = read
        self._copy: State | None = None

    def close(self) -> None:
        if self._copy is None:
            self._copy = self._read()

    def read(self) -> State:
        return self._read() if self._copy is None else self._copy


class Door:
    """HealDoor of one rank."""

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank
        self.address = f"door:{rank.name}"
        self.open: Serving | None = None
        self.newest = -1
        self.readers: list[Transfer] = []
        world.doors[self.address] = self
        rank.process.on_death.append(self._die)

    @property
    def process(self) -> Any:
        return self._rank.process

    def serve(self, step: int, history: int, state: Callable[[], State]) -> None:
        self._world.scheduler.check()
        self.close()
        self.open = Serving(step, history, state)
        self.newest = max(self.newest, step)
        waiting, self.readers = self.readers, []
        for reader in waiting:
            if reader.serving is None:
                reader.knock(self)
            else:
                self.readers.append(reader)

    def close(self) -> None:
        self._world.scheduler.check()
        if self.open is not None:
            self.open.close()
        self.open = None

    def fetch(self, address: str, step: int, history: int) -> Transfer:
        self._world.scheduler.check()
        return Transfer(self._world, self._rank, address, step, history)

    def _die(self) -> None:
        readers, self.readers = self.readers, []
        for reader in readers:
            self._world.scheduler.call_in(0.1, reader.fail, "the source is gone")


class Transfer:
    """Fetch: another group's state on its way to a rank."""

    def __init__(self, world: World, rank: Rank, address: str, step: int, history: int) -> None:
        self._world, self._rank, self._address = world, rank, address
        self.step, self.history = step, history
        self.error, self.took_s, self.nbytes = "", 0.0, 0
        self.serving: Serving | None = None
        self._state: State | None = None
        self._begun = world.scheduler.now
        self._over = False
        world.scheduler.call_in(world.scheduler.random.uniform(0.001, 0.01), self._reach)

    def state(self) -> State | None:
        self._world.scheduler.check()
        return self._state

    def room(self) -> contextlib.AbstractContextManager[bool]:
        """Now and then the host has no memory for another step's sums."""
        return contextlib.nullcontext(self._world.rumour.random() > 0.02)

    def cancel(self) -> None:
        self._world.scheduler.check()
        self._over = True

    def fail(self, reason: str) -> None:
        if not self._over and self._rank.process.alive:
            self._over, self.error = True, f"no state of step {self.step}: {reason}"

    def _reach(self) -> None:
        door = self._world.doors.get(self._address)
        if door is None or not door.process.alive:
            self.fail("nobody answers")
        elif door.process.stopped:
            self._world.scheduler.call_at(door.process.stopped_until, self._reach)
        else:
            door.readers.append(self)
            self.knock(door)
            if self.serving is None and not self._over:
                self._world.scheduler.call_in(OPEN_PATIENCE_S, self._unopened)

    def _unopened(self) -> None:
        if self.serving is None:
            self.fail("it was not opened")

    def knock(self, door: Door) -> None:
        """At the source: begin, if what this one wants is open."""
        if self._over:
            return
        if door.open is not None and (door.open.step, door.open.history) == (self.step, self.history):
            self.serving = door.open
            if self not in door.readers:
                door.readers.append(self)
            self._world.scheduler.call_in(self._world.heal_s(), self._arrive, door)
        elif door.newest > self.step or door.open is not None:
            self.fail("it is over there")
        elif self not in door.readers:
            door.readers.append(self)

    def _arrive(self, door: Door) -> None:
        if self._over or not self._rank.process.alive:
            return
        if door.process.stopped or self._rank.process.stopped:
            until = max(door.process.stopped_until, self._rank.process.stopped_until)
            self._world.scheduler.call_at(until, self._arrive, door)
            return
        if self in door.readers:
            door.readers.remove(self)
        if self._world.heal_fails():
            self.fail("the bytes are damaged")
            return
        assert self.serving is not None
        state = self.serving.read()
        if state.way != self.serving.opened_as.way:
            text = f"{self._rank.name} reads step {self.step} from {self._address} while it becomes {state}"
            self._world.judge.violate("state changed while it was read", text)
        self._over, self._state = True, state
        self.took_s, self.nbytes = self._world.scheduler.now - self._begun, 1
