"""The loop of `everstep run` and of `everstep agent`: one thread that looks after a warm process and some groups.

    launcher ── warm process: torch and torchtitan imported once, forks what is asked for
      ├── lighthouse (`everstep run`)
      └── workers of its groups; all forked from the warm process, children of the launcher

What there is no room for (a full disk, no process, descriptor or memory to spare) ends neither the launcher nor a
group: it is named, and tried again after a pause.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

from everstep.launch import offspring
from everstep.launch.children import Children
from everstep.launch.group import Group
from everstep.launch.prepare import Prepared
from everstep.launch.scarce import Pause, backoff_s, is_scarce
from everstep.launch.warm import WarmProcess
from everstep.launch.watchdog import describe_exit
from everstep.report.live import Teller, Telling
from everstep.run.directory import LaunchError
from everstep.run.events import EventLog

TICK_S = 0.05
"""How often to look for all but deaths, which are seen at once."""
STARTS_WITHOUT_A_STEP = 3
"""Of the groups here, after which they are given up if each of them failed by itself."""
WARM_DEATHS = 3
"""Warm processes, one after the other, that may end by themselves before they have imported what the run needs."""


class Launcher:
    """Looks after its children and groups, one turn of the loop after the other.

    Args:
        children: of this process.
        events: where what concerns no group is told.
        stopping: whether a clean stop has been asked for.
        startup_timeout_s: how long imports may take.
        show: called with events that no log took.
    """

    def __init__(
        self,
        children: Children,
        events: EventLog,
        stopping: Callable[[], bool],
        startup_timeout_s: float,
        show: Callable[[list[dict]], None],
    ) -> None:
        self.groups: list[Group] = []
        self.jobs: dict[str, Callable[[], None]] = {"warm process": self._keep_warm}
        """What else is looked after at each turn, by name."""
        self._children, self._events, self._stopping = children, events, stopping
        self.startup_timeout_s, self._show = startup_timeout_s, show
        self._pauses: dict[str, Pause] = {}
        self._warm_deaths = 0
        """By themselves, since one was ready."""
        self._warm_not_before = 0.0
        self._why_not_warm = ""
        children.on_warm_end = self._warm_ended
        os.environ[offspring.RUN_MARK] = f"{os.getpid()}.{secrets.token_hex(8)}"

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`. Raises LaunchError when nobody can be started any more, and what a group's look raises."""
        while not over():
            self._children.wait(TICK_S)
            self.look()

    def look(self) -> None:
        """One turn."""
        for name, job in list(self.jobs.items()):
            pause = self._pauses.setdefault(name, Pause())
            if pause.is_over:
                failures = pause.failures
                try:
                    job()
                    if pause.failures == failures:
                        pause.worked()
                except OSError as error:
                    if not is_scarce(error):
                        raise
                    self.is_short(name, str(error))
        for group in self.groups:
            if group.end is None:
                try:
                    group.look()
                except OSError as error:
                    if not is_scarce(error):
                        raise
                    group.is_scarce(str(error))
        self._give_up_together()
        for log in {self._events, *(group.events for group in self.groups)}:
            if log.unwritten:
                self._show(log.unwritten)
                log.unwritten = []

    def is_short(self, name: str, why: str) -> None:
        """There was no room for something of a job: say so, and look after it again after a pause."""
        again_s = self._pauses.setdefault(name, Pause()).failed()
        self._events.emit("resource_shortage", reason=f"{name}: {why}", again_s=again_s)

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

    def _keep_warm(self) -> None:
        warm = self._children.warm
        if warm is None:
            if self._why_not_warm and not any(group.state == "running" for group in self.groups):
                raise LaunchError(self._why_not_warm)
            if time.monotonic() >= self._warm_not_before:
                self._children.start_warm()
        elif warm.hangs(self.startup_timeout_s):
            os.kill(warm.pid, signal.SIGKILL)

    def _warm_ended(self, warm: WarmProcess, exitcode: int) -> None:
        """Another one is started. A run that trains does without for as long as it takes."""
        self._warm_deaths = (0 if warm.ready else self._warm_deaths) + warm.crashed(exitcode)
        self._warm_not_before = time.monotonic() + backoff_s(self._warm_deaths - 1)
        if warm.fatal or self._warm_deaths >= WARM_DEATHS:
            died = f"the process that imports torch and torchtitan {describe_exit(exitcode)} before it was ready"
            said = warm.fatal or f"{died}, {self._warm_deaths} times"
            self._why_not_warm = f"{said}. More in {self._children.warm_log}."
        else:
            self._why_not_warm = ""


def tell(run_dir: Path, host: str, config: Prepared, page: bool, events: EventLog, at_end: contextlib.ExitStack) -> str:
    """Tell of a run while it goes, to Prometheus, TensorBoard and W&B as its config asks for, and by its page on this
    machine's loopback, until `at_end`; the page's address, "" without one."""
    metrics = config.metrics
    what = Telling(
        run_dir=run_dir,
        groups=config.groups,
        min_groups=config.fault_tolerance.min_groups,
        host=host,
        port=config.fault_tolerance.metrics_port,
        tensorboard=bool(metrics.get("enable_tensorboard", False)),
        tensorboard_folder=str(metrics.get("save_tb_folder", "tb")),
        wandb=bool(metrics.get("enable_wandb", False)),
        page=page,
    )
    teller = Teller(what)
    at_end.callback(teller.close)
    if page:
        events.emit("page", address=teller.address)
    return teller.address
