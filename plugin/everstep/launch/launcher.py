"""The loop of `everstep run` and of `everstep agent`: one thread that looks after some groups.

    launcher: torch and torchtitan are imported once, and everything is forked from it
      ├── lighthouse (`everstep run`)
      ├── workers of its groups
      └── what tells of the run: figures, curves, its page

What there is no room for (a full disk, no process, descriptor or memory to spare) ends neither the launcher nor a
group: it is named, and tried again after a pause.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from everstep.launch.children import Children
from everstep.launch.forking import preload
from everstep.launch.group import Group
from everstep.launch.prepare import Prepared
from everstep.launch.scarce import Pause, is_scarce
from everstep.report.live import Telling
from everstep.run.directory import LaunchError
from everstep.run.events import EventLog

TICK_S = 0.05
"""How often to look for all but deaths, which are seen at once."""
STARTS_WITHOUT_A_STEP = 3
"""Of the groups here, after which they are given up if each of them failed by itself."""


class Launcher:
    """Looks after its children and groups, one turn of the loop after the other.

    Args:
        children: of this process.
        events: where what concerns no group is told.
        show: called with events that no log took.
    """

    def __init__(self, children: Children, events: EventLog, show: Callable[[list[dict]], None]) -> None:
        self.groups: list[Group] = []
        self.jobs: dict[str, Callable[[], None]] = {}
        """What else is looked after at each turn, by name."""
        self._children, self._events, self._show = children, events, show
        self._pauses: dict[str, Pause] = {}

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`. Raises LaunchError when a group cannot be started on this machine."""
        while not over():
            self._children.wait(TICK_S)
            self.look()

    def look(self) -> None:
        """One turn."""
        for name, job in list(self.jobs.items()):
            pause = self._pauses.setdefault(name, Pause())
            if pause.is_over:
                try:
                    job()
                    pause.worked()
                except OSError as error:
                    if not is_scarce(error):
                        raise
                    again_s = pause.failed()
                    self._events.emit("resource_shortage", reason=f"{name}: {error}", again_s=again_s)
        for group in self.groups:
            if group.end is None:
                try:
                    group.look()
                except OSError as error:
                    if not is_scarce(error):
                        raise
                    group.tell_scarce(str(error))
        self._give_up_together()
        for log in {self._events, *(group.events for group in self.groups)}:
            if log.unwritten:
                self._show(log.unwritten)
                log.unwritten = []

    def _give_up_together(self) -> None:
        """Groups all of which have failed by themselves, and were started three times or more, are given up: nobody has
        committed a step meanwhile."""
        live = [group for group in self.groups if group.end is None]
        failures = [group.failures for group in live]
        if all(failures) and sum(failures) >= STARTS_WITHOUT_A_STEP:
            for group in live:
                count = f"its workers were started {group.failures} times"
                if len(live) > 1:
                    count = f"workers of {len(live)} groups were started {sum(failures)} times"
                why = f"{count} and failed each time before any group had committed a step; last: {group.last_reason}"
                group.finish("failed", f"group {group.settings.group} is given up, {why}")


def import_all(modules: Sequence[str], log: Path, stopping: Callable[[], bool]) -> None:
    """Import what will be forked, with what that says in `log`, until `stopping`. Raises LaunchError for what cannot be
    imported."""
    try:
        with _output_to(log):
            preload(modules, stopping)
    except Exception as error:
        raise LaunchError(f"{type(error).__name__}: {error}. More in {log}.") from error


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(1), os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        for fd, old in enumerate(before, 1):
            os.dup2(old, fd)
            os.close(old)


def telling(run_dir: Path, host: str, config: Prepared, page: bool) -> Telling:
    """How to tell of a run while it goes: to Prometheus, TensorBoard and W&B as its config asks for, and by its page on
    this machine's loopback."""
    metrics = config.metrics
    return Telling(
        run_dir=run_dir,
        groups=config.groups,
        min_groups=config.fault_tolerance.min_groups,
        host=host,
        port=config.fault_tolerance.metrics_port,
        tensorboard=bool(metrics.get("enable_tensorboard", False)),
        tensorboard_folder=str(metrics.get("save_tb_folder", "tb")),
        wandb=bool(metrics.get("enable_wandb", False)),
        page=page,
        notify=bool(config.fault_tolerance.notify),
    )
