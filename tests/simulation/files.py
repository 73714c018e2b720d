"""The run directory as one rank sees it, and its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.groups import Rank
    from simulation.world import World

STARTUP, DONE = "startup", "done"
AWAY = (STARTUP, DONE)


class SimFiles:
    """RunFiles of one rank."""

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank

    def beat(self, phase: str, step: int) -> None:
        self._world.scheduler.check()
        now = self._world.scheduler.now
        life = self._rank.life
        self._rank.beaten = now
        if self._rank.number == 0:
            life.group.beat = (now, phase, step)
            if step > 0:
                life.able_since = min(life.able_since, now)

    def fenced(self) -> bool:
        self._world.scheduler.check()
        return self._rank.life.group.life is not self._rank.life

    def asked_to_leave(self) -> bool:
        self._world.scheduler.check()
        return self._world.scheduler.now >= self._rank.leave_at

    def groups_with_state(self) -> list[int]:
        self._world.scheduler.check()
        now, stall_s = self._world.scheduler.now, self._world.plan.stall_s
        self._rank.looked = now
        return [
            group.id
            for group in self._world.groups.values()
            if group is not self._rank.life.group
            and group.beat[2] > 0
            and group.beat[1] not in AWAY
            and now - group.beat[0] < stall_s
        ]

    def finished_step(self) -> int:
        self._world.scheduler.check()
        return self._world.finished

    def ended_for_all(self) -> bool:
        return self._world.finished_for_all

    def mark_finished(self, step: int, *, for_all: bool) -> None:
        self._world.scheduler.check()
        self._world.finish(step, for_all)

    def is_over(self) -> bool:
        return self.finished_step() >= self._world.plan.steps


class SimEvents:
    """Events of one rank, into the trace."""

    def __init__(self, world: World, rank: Rank) -> None:
        self._world, self._rank = world, rank

    def emit(self, kind: str, step: int | None = None, **fields: Any) -> None:
        self._world.scheduler.check()
        if kind == "attempt":
            if fields["committed"] and self._rank.number == 0:
                self._world.judge_commit(self._rank, step or 0, fields["took_s"])
            truly, self._rank.work.recomputed = self._rank.work.recomputed, set()
            if not truly.issuperset(fields["recomputed"]):
                text = f"{self._rank.name}, step {step}: {fields['recomputed']} where {sorted(truly)} were"
                self._world.judge.violate("not recomputed", text)
        self._world.note(self._rank.name, kind, step, fields)


class SimClock:
    def __init__(self, world: World) -> None:
        self._scheduler = world.scheduler

    def now(self) -> float:
        return self._scheduler.now

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(seconds)
