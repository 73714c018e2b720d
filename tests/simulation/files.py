"""The run directory as one rank sees it, and its events."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from simulation.groups import Rank
    from simulation.world import World

T = TypeVar("T")
STARTUP, DONE = "startup", "done"
AWAY = (STARTUP, DONE)


class Shared(Generic[T]):
    """A value in the run directory, with all of its versions over time."""

    def __init__(self, value: T) -> None:
        self._times, self._values = [-1.0], [value]

    def write(self, now: float, value: T) -> None:
        self._times.append(now)
        self._values.append(value)

    def read(self, when: float = math.inf) -> T:
        """Return the value of time `when`: a host may see the writes of others some seconds late."""
        return self._values[bisect_right(self._times, when) - 1]


class SimFiles:
    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank

    def beat(self, phase: str, step: int) -> None:
        self._world.scheduler.check()
        now = self._world.scheduler.now
        life = self._rank.life
        self._rank.beaten = now
        if phase == "vote":
            self._world.votes += 1
            self._world.voted.fire(self._world.scheduler)
            if self._rank.dies_at_vote:
                self._rank.process.die_after = 1
        if self._rank.number == 0:
            life.group.beat.write(now, (now, phase, step))
            life.able_since = min(life.able_since, now) if step > 0 else math.inf

    def _when(self) -> float:
        """Return the time as of which this rank now sees the run directory."""
        self._world.scheduler.check()
        return self._world.seen_at(self._rank.life.host)

    def fenced(self) -> bool:
        newest = self._rank.life.group.started.read(self._when())
        return newest is not None and newest.number > self._rank.life.number

    def asked_to_leave(self) -> bool:
        self._world.scheduler.check()
        return self._world.scheduler.now >= self._rank.leave_at

    def groups_with_state(self) -> list[int]:
        when, stall_s = self._when(), self._world.plan.stall_s
        self._rank.looked = when
        beats = {group.id: group.beat.read(when) for group in self._world.groups.values()}
        del beats[self._rank.life.group.id]
        return [
            group
            for group, (beaten, phase, step) in beats.items()
            if step > 0 and phase not in AWAY and self._world.scheduler.now - beaten < stall_s
        ]

    def finished_step(self) -> int:
        return self._world.end.read(self._when())[0]

    def ended_for_all(self) -> bool:
        return self._world.end.read(self._when())[1]

    def mark_finished(self, step: int, *, for_all: bool) -> None:
        self._world.scheduler.check()
        self._world.finish(step, for_all)

    def is_over(self) -> bool:
        return self.finished_step() >= self._world.plan.steps


class SimEvents:
    """The events of one rank, which go to the judge and into the trace."""

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank

    def emit(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self._world.scheduler.check()
        if kind == "quorum" and fields["attempt"] > 1:
            self._world.retried.add(step or 0)
        life = self._rank.life
        if kind == "quorum":
            life.able = [group for group in fields["groups"] if group not in fields["joiners"]]
        if kind == "attempt":
            life.committed = fields["committed"]
            if fields["committed"] and self._rank.number == 0:
                self._world.judge_commit(self._rank, step or 0, fields["took_s"])
            work, told = self._rank.work, fields["recomputed"]
            if fields["computed"] != work.computed or not work.recomputed.issuperset(told):
                text = f"step {step}: {fields['computed']}, {told}, but {work.computed}, {sorted(work.recomputed)}"
                self._world.judge.violate("computed otherwise", f"{self._rank.name}, {text}")
            work.computed, work.recomputed = [], set()
        self._world.note(self._rank.name, kind, step, fields)
