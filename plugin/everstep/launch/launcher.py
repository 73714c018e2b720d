"""The loop of `everstep run`, `everstep agent` and `everstep lighthouse`: one thread that keeps groups and jobs going.

    launcher: imports once what its children need
      ├── the lighthouse (not in `everstep agent`), forked
      ├── the workers of its groups, forked
      └── the teller (not in `everstep agent`), a new process: metrics, curves and the page of the run

A shortage (a full or read-only disk; no process, descriptor or memory to spare) ends neither the launcher nor a group,
nor does an outage of a file system. The launcher reports it and retries after a pause. A start that it cuts short is
made again from its first rank.
"""

import errno
import signal
import time
from collections.abc import Callable
from pathlib import Path

from everstep.launch.children import Children
from everstep.launch.group import Group
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.prepare import Prepared
from everstep.launch.restart_rules import backoff_s, may_pass
from everstep.launch.settings import GroupSettings
from everstep.launch.view import OnEvents
from everstep.report.live import Teller
from everstep.run.beats import BeatFile, launcher_beat_path
from everstep.run.directory import check_room, stop_file
from everstep.run.events import EventLog
from everstep.run.output import keep_on_without_output
from everstep.run.stops import STOPS, adopt_orphans, collect_stops

TICK_S = 0.05
"""Seconds between two turns of the loop. The death of a child begins a turn at once."""
JOBS_EVERY_S = 0.2
"""Seconds between two turns of the jobs."""
STARTS_WITHOUT_A_STEP = 3
"""Failed starts, of this launcher's groups together, after which all are given up if each group failed by itself."""
OUTAGE_S = 600.0
"""Seconds after the death of workers that had made steps during which no group is given up: what all groups lack, such
as their data's file system, may come back."""
SHORTAGE_S = 5.0
"""Longest backoff in seconds after shortages. It is short, because a group is not watched during its backoff."""
Job = Callable[[], None]


class Launcher:
    """Runs the loop that watches its children, groups and jobs. At the end of its context it kills its children,
    except keepers of snapshots.

    Make it in the main thread, and before this process writes an event: who sees that may send a signal to stop.
    From then on, output that is refused or not read (a full disk, a stopped terminal) is lost, and the run goes on.

    Args:
        role: the role in the launcher's event log; `group`: the group in it, if it has only one.
        show: called with events that could not be written to a log.

    Raises:
        OSError: its log or its beats cannot be opened.
    """

    def __init__(self, run_dir: Path, role: str, show: OnEvents, group: int | None = None) -> None:
        keep_on_without_output()
        self._old_handlers = {signum: signal.getsignal(signum) for signum in STOPS}
        self.stops = collect_stops()
        """Times of the requests to stop so far (`collect_stops`)."""
        self.events, self.children = EventLog(run_dir, group, None, role), Children()
        self.groups: list[Group] = []
        self.jobs: dict[str, Job] = {"run directory": self._look_at_run_dir}
        """Name -> function that the loop calls every JOBS_EVERY_S. The first one reports a disk that is full or
        read-only: then no process can say so in an event."""
        self.page = ""
        """The address of the run's page; "" without one."""
        self._run_dir, self._show = run_dir, show
        self._heart = BeatFile(launcher_beat_path(run_dir, self.events.path.stem))
        self._shortages: dict[str, tuple[int, float]] = {}
        """Name of a job or group -> number of shortages in a row, and the monotonic time of the next try."""
        self._next_jobs_mono = 0.0
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
        """Return whether a clean stop was requested, by a signal or by the run's stop file."""
        return bool(self.stops) or stop_file(self._run_dir).exists()

    def serve(self, host: str, config: Prepared, page: bool) -> Lighthouse:
        """Add the job of keeping a lighthouse up on `host`, and return that lighthouse. Also start the teller, if the
        config asks for Prometheus, a webhook, TensorBoard or W&B, or `page` for a page on this machine's loopback."""
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
        """Start and watch one more group from the next turn on."""
        self.groups.append(Group(settings, self.children, self.is_stopping, events))
        return self.groups[-1]

    def run(self, over: Callable[[], bool]) -> None:
        """Run the loop until `over()`. Raises LaunchError, or an OSError that will not pass, if it cannot go on."""
        while not over():
            self.children.wait(TICK_S)
            if time.monotonic() >= self._next_jobs_mono:
                self._next_jobs_mono = time.monotonic() + JOBS_EVERY_S
                for name, job in list(self.jobs.items()):
                    self._try(name, job, self.events, f"{name}: ")
            for group in [group for group in self.groups if group.end is None]:
                self._try(f"group {group.settings.group}", group.tick, group.events)
            self._give_up_together()
            for log in {self.events, *(group.events for group in self.groups)}:
                if log.unwritten:
                    self._show([*log.unwritten])
                    log.unwritten.clear()

    def _look_at_run_dir(self) -> None:
        """Raise the OSError of a write to the run directory if nothing can be written there now. If this launcher
        cannot beat, its children cannot either, and until the next look their silence does not count."""
        beats = self._heart.beat("watching")
        if not beats:
            self.children.awake_mono = time.monotonic() + SHORTAGE_S
        check_room(self._run_dir, writes=not beats)
        if not beats:
            raise OSError(errno.EIO, "beats cannot be written, so a hang would not be noticed", str(self._run_dir))

    def _try(self, name: str, job: Job, log: EventLog, whose: str = "") -> None:
        """Do one part of a turn. A shortage is reported to `log`, and the part is skipped until its backoff has passed.
        `whose`: text before the reason, if the log does not show whose shortage it is."""
        failures, again_mono = self._shortages.get(name, (0, 0.0))
        if time.monotonic() < again_mono:
            return
        try:
            job()
            self._shortages.pop(name, None)
        except OSError as error:
            if not may_pass(error):
                raise
            again_s = backoff_s(failures + 1, SHORTAGE_S)
            self._shortages[name] = failures + 1, time.monotonic() + again_s
            event = log.emit("resource_shortage", reason=f"{whose}{error}", again_s=again_s)
            if name == "events":  # this job would have shown the event
                self._show([event])

    def _give_up_together(self) -> None:
        """Give up all groups here if each of them has failed by itself, STARTS_WITHOUT_A_STEP times in sum, since any
        group of the run last committed a step, and no workers that had made steps died here within OUTAGE_S."""
        live = [group for group in self.groups if group.end is None]
        worked = [death.mono for group in live for death in group.deaths if death.committed]
        if worked and time.monotonic() - max(worked) < OUTAGE_S:
            return
        newest = max((death.run_step for group in live for death in group.deaths[-1:]), default=0)
        failures = [group.failures(newest) for group in live]
        if all(failures) and sum(failures) >= STARTS_WITHOUT_A_STEP:
            for group in live:
                whose = "its workers" if len(live) == 1 else f"workers of {len(live)} groups"
                last = group.deaths[-1].reason
                why = f"{whose} failed {sum(failures)} times, while no group committed a step; last: {last}"
                group.finish("failed", f"group {group.settings.group} is given up, {why}")
