"""Injects the faults of a schedule into a run when they are due, and ends those that last."""

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGCONT
from typing import Any

from everstep.chaos.fault import Fault
from everstep.chaos.kinds import FAULTS
from everstep.chaos.schedule import Schedule
from everstep.chaos.target import LocalTarget, Target
from everstep.chaos.view import Proc, View
from everstep.run.directory import LaunchError, stop_file
from everstep.run.events import EventLog

TICK_S, AGAIN_S = 0.05, 5.0
"""Seconds between two looks at what is due, and until the end of a fault that failed is tried again."""


class Runner:
    """Injects faults into one run. The target's view must be brought up to date before each `tick`."""

    def __init__(self, target: Target, schedule: Schedule):
        self.target, self.schedule = target, schedule
        self.injected = 0
        self._events = EventLog(target.run_dir, None, None, "chaos")
        self._held: list[tuple[float, dict[str, Any], list[Proc]]] = []
        """Faults that last: when each ends (`time.monotonic()`), its end event's fields, and the stopped processes."""

    def tick(self, now: float) -> None:
        """Inject all faults that are due. `now` is `time.monotonic()`."""
        while (due := self.schedule.due(self.target, now)) is not None:
            try:
                self._inject(*due)
            except (LaunchError, OSError) as error:
                # The batch system refused, or a file is gone. The next fault may succeed.
                self.schedule.give_up(due[0], f": {error}")
                self._events.emit("fault_failed", fault=due[0].name, reason=str(error))

    def _inject(self, fault: Fault, choose: random.Random) -> None:
        injection = FAULTS[fault.name].plan(fault, self.target, choose)
        groups = injection.groups
        if not self.target.signal(injection.procs, 0):
            raise LaunchError("none of its processes is there any more")
        named = {"fault": fault.name, "target_group": groups[0] if len(groups) == 1 else groups or None}
        lasts: dict[str, Any] = {"lasts_s": injection.lasts_s} if injection.lasts_s else {}
        self.target.run.hit(groups)
        self._events.emit("fault", **named, pids=[proc.pid for proc in injection.procs], **injection.fields, **lasts)
        self.target.signal(injection.procs, injection.signum)
        for segment in injection.segments:
            segment.remove()
        self.injected += 1
        if injection.lasts_s:
            self._held.append((time.monotonic() + injection.lasts_s, named, injection.procs))

    def end_faults(self, now: float) -> bool:
        """End the faults whose time is up. Return whether others still last."""
        for one in [one for one in self._held if one[0] <= now]:
            self._held.remove(one)
            _, named, stopped = one
            try:
                self.target.signal(stopped, SIGCONT)
                self._events.emit("fault_undone", **named)
            except (LaunchError, OSError) as error:
                self._events.emit("fault_undo_failed", **named, reason=str(error))
                self._held.append((now + AGAIN_S, named, stopped))
        return bool(self._held)

    def close(self) -> None:
        """End every fault that still lasts."""
        self.end_faults(math.inf)
        self._events.close()


def kill_groups(every_s: float, run_dir: Path, seed: int) -> None:
    """Main function of `everstep run --chaos-every S`'s process: kill all workers of a random group every `every_s`
    seconds, until the run is to stop."""
    view = View(run_dir)
    view.catch_up()
    runner = Runner(LocalTarget(view), Schedule((), seed, every_s, [Fault(name="kill-group")]))
    drive(runner, lambda event: None, None, stop_file(run_dir).exists)


def drive(runner: Runner, say: Callable[[dict], None], for_s: float | None, stopping: Callable[[], bool]) -> str:
    """Inject faults until the schedule is finished or `for_s` seconds have passed since the first step (and no fault
    still lasts), or the run is over, or `stopping()`. Then end all faults that still last.

    `say` gets every new event of the run. Returns why it ended: "finished", "time", "over" (the run) or "stopped".
    """
    run, why = runner.target.run, ""
    try:
        while not why:
            now = time.monotonic()
            for event in run.follow():
                say(event)
            enough = for_s is not None and run.first_commit is not None and now - run.first_commit > for_s
            if stopping():
                why = "stopped"
            elif not runner.target.alive():
                why = "over"
            elif not enough:
                runner.tick(now)
            if not runner.end_faults(now) and not why:
                why = "finished" if runner.schedule.finished() else "time" if enough else ""
            time.sleep(TICK_S)
    finally:
        runner.close()
    for event in run.follow():
        say(event)
    return why
