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
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from everstep.launch.children import Children
from everstep.launch.forking import preload, redirect_output
from everstep.launch.group import Group
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.prepare import Prepared
from everstep.launch.scarce import LONGEST_S, backoff_s, is_scarce
from everstep.launch.settings import GroupSettings
from everstep.launch.view import OnEvents
from everstep.report.live import Teller
from everstep.run.directory import LaunchError, stop_file
from everstep.run.events import EventLog
from everstep.run.lifeline import adopt_orphans
from everstep.run.stops import STOPS, collect_stops

TICK_S = 0.05
"""How often to look for all but deaths, which are seen at once."""
STARTS_WITHOUT_A_STEP = 3
"""Of the groups here, after which they are given up if each of them failed by itself."""
Job = Callable[[], None]


class Launcher:
    """Looks after its children and groups, one turn of the loop after the other. As a context: when it is left, nothing
    that was started lives. To be made in the main thread, before the first file: whoever sees one may ask for a stop.

    Args:
        run_dir: of the run.
        role: whose events its own are; `group`: of which group, if of one.
        show: called with events that no log took.

    Raises:
        OSError: there is no room for its log.
    """

    def __init__(self, run_dir: Path, role: str, show: OnEvents, group: int | None = None) -> None:
        self._old_handlers = {signum: signal.getsignal(signum) for signum in STOPS}
        self.stops = collect_stops()
        """Requests to stop that have come so far."""
        self.events, self.children = EventLog(run_dir, group, None, role), Children()
        self.groups: list[Group] = []
        self.jobs: dict[str, Job] = {}
        """What else is looked after at each turn, by name."""
        self.page = ""
        """Its address."""
        self._run_dir, self._show = run_dir, show
        self._shortages: dict[str, tuple[int, float]] = {}
        """By job for which there is no room: how often in a row, and until when it is not tried."""
        self._teller: Teller | None = None

    def __enter__(self) -> "Launcher":
        adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        self.children.kill_everything()
        if self._teller is not None:
            self._teller.close()
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)

    def is_stopping(self) -> bool:
        """Whether a clean stop was asked for, by a signal or by the run's stop file."""
        return bool(self.stops) or stop_file(self._run_dir).exists()

    def serve(self, host: str, config: Prepared, page: bool) -> Lighthouse:
        """Keep a lighthouse up on `host`, and tell of the run while it goes: to Prometheus, TensorBoard and W&B as its
        config asks for, and with `page` on this machine's loopback."""
        ft, metrics = config.fault_tolerance, config.metrics
        lighthouse = Lighthouse(self._run_dir, host, ft, self.children, self.events)
        self.jobs["lighthouse"] = lighthouse.keep
        if page or ft.metrics_port or ft.notify or metrics.get("enable_tensorboard") or metrics.get("enable_wandb"):
            self._teller = Teller(self._run_dir, host, ft, metrics, page)
            self.jobs["page and figures"] = self._teller.keep
            self.page = self._teller.address
        if self.page:
            self.events.emit("page", address=self.page)
        return lighthouse

    def add_group(self, settings: GroupSettings, events: EventLog) -> Group:
        """Look after one more group from now on."""
        self.groups.append(Group(settings, self.children, self.is_stopping, events))
        return self.groups[-1]

    def import_all(self, modules: Sequence[str], log: Path) -> None:
        """Import what will be forked, with what that says in `log`, until asked to stop. Raises LaunchError for what
        cannot be imported."""
        try:
            with _output_to(log):
                preload(modules, self.is_stopping)
        except Exception as error:
            raise LaunchError(f"{type(error).__name__}: {error}. More in {log}.") from error

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`. Raises LaunchError when a group cannot be started on this machine."""
        while not over():
            self.children.wait(TICK_S)
            for name, job in list(self.jobs.items()):
                self._try(name, job, self.events, f"{name}: ")
            for group in [group for group in self.groups if group.end is None]:
                self._try(f"group {group.settings.group}", group.look, group.events)
            self._give_up_together()
            for log in {self.events, *(group.events for group in self.groups)}:
                if log.unwritten:
                    self._show(log.unwritten)
                    log.unwritten = []

    def _try(self, name: str, job: Job, log: EventLog, whose: str = "") -> None:
        """Do a part of a turn. If there is no room for it, it is told, and not tried again for a while. `whose`: before
        the reason, where the log does not say it."""
        failures, again_mono = self._shortages.get(name, (0, 0.0))
        if time.monotonic() < again_mono:
            return
        try:
            job()
            self._shortages.pop(name, None)
        except OSError as error:
            if not (is_scarce(error) or isinstance(error, TimeoutError)):  # of a lock that somebody holds
                raise
            again_s = backoff_s(failures + 1, LONGEST_S)
            self._shortages[name] = failures + 1, time.monotonic() + again_s
            event = log.emit("resource_shortage", reason=f"{whose}{error}", again_s=again_s)
            if name == "events":  # from where it would be shown
                self._show([event])

    def _give_up_together(self) -> None:
        """Groups all of which have failed by themselves, and were started three times or more, are given up: nobody has
        committed a step meanwhile."""
        live = [group for group in self.groups if group.end is None]
        newest = max((death.run_step for group in live for death in group.deaths[-1:]), default=0)
        failures = [group.failures(newest) for group in live]
        if all(failures) and sum(failures) >= STARTS_WITHOUT_A_STEP:
            for group in live:
                count = f"its workers were started {sum(failures)} times"
                if len(live) > 1:
                    count = f"workers of {len(live)} groups were started {sum(failures)} times"
                last = group.deaths[-1].reason
                why = f"{count} and failed each time before any group had committed a step; last: {last}"
                group.finish("failed", f"group {group.settings.group} is given up, {why}")


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    before = os.dup(1), os.dup(2)
    try:
        redirect_output(log)
        yield
    finally:
        for fd, old in enumerate(before, 1):
            os.dup2(old, fd)
            os.close(old)
