"""`everstep run`: one machine, one run. The launcher's loop with all groups of the run, and with its lighthouse.

The state of the run is in the run directory, so that a launcher that was killed can simply be started again.
"""

import contextlib
import functools
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import everstep
from everstep.launch.children import Child, Children
from everstep.launch.forking import PRELOAD, Request
from everstep.launch.group import Group
from everstep.launch.launcher import TICK_S, Launcher, import_all, telling
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.machine import HOST, devices_of_groups, sharing_complaint
from everstep.launch.prepare import Order, Prepared, forget_answer, take_answer
from everstep.launch.scarce import patiently
from everstep.launch.settings import GroupSettings
from everstep.report.live import Teller
from everstep.run import fence
from everstep.run.beats import forget_beats
from everstep.run.directory import (
    LaunchError,
    RunDir,
    ask_to_stop,
    ended_file,
    groups_file,
    leaves_nothing,
    stop_file,
    wanted_groups,
)
from everstep.run.events import EventLog, EventTail
from everstep.run.fence import Claim
from everstep.run.lifeline import adopt_orphans
from everstep.run.stops import STOPS
from everstep.run.token import own_token

STOPPED_AT_ONCE_EXIT = 130
"""What a shell gives for a command that Ctrl-C ended."""
OnEvents = Callable[[list[dict]], None]
"""Called at every turn with the new events."""
STOPPED_BEFORE = "stopped before anything was started."


@dataclass
class RunSettings:
    """What to run, and how."""

    order: Order
    page: bool = False
    """Whether to serve the run's page while it goes, on loopback."""
    stop_grace_s: float = 120.0
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""
    prepare: str = "everstep.launch.prepare:main"
    """`module:function` that checks the config and settles it in the run directory."""
    preload: Sequence[str] = PRELOAD
    """Modules that are imported before anything is forked."""


class Refused(LaunchError):
    """A config that cannot work, or a stop before that was known: nothing was started, and what is in the run directory
    tells nothing more."""


class _StopNow(BaseException):
    """The second Ctrl-C."""


class Supervisor:
    """Runs one run to its end. `on_events` is called at every turn with the new events, none included."""

    def __init__(
        self,
        settings: RunSettings,
        run_dir: RunDir,
        on_events: OnEvents | None = None,
        injector: Callable[[int, Path], OnEvents] | None = None,
    ):
        self.settings = settings
        self.run_dir = run_dir
        self._on_events = on_events or (lambda events: None)
        self._injector = injector
        self._inject: OnEvents | None = None
        self._stops = self._stops_obeyed = 0
        self._ending = False
        """Whether all there is left to do is to clean up, which nothing cuts short."""
        # Before the first file: whoever sees one may ask for a stop.
        self._old_handlers = {signum: signal.signal(signum, self._ask_to_stop) for signum in STOPS}
        self._events = EventLog(run_dir.path, None, None, "supervisor")
        self._tail = EventTail(run_dir.path)
        self._children = Children()
        self._launcher = Launcher(self._children, self._events, self._on_events)
        self._prepared: Prepared | None = None
        self._lighthouse: Lighthouse | None = None
        self._teller: Teller | None = None

    def run(self) -> int:
        """Until all groups have ended; returns the exit status: 0 for done or a clean stop, 130 when cut
        short.

        Raises LaunchError when the config or the run directory cannot be used.
        """
        adopt_orphans()
        run_dir = self.run_dir.path
        try:
            self._tail.skip_to_end()
            forget_beats(run_dir)
            for file in (stop_file(run_dir), ended_file(run_dir), groups_file(run_dir)):
                file.unlink(missing_ok=True)
            forget_answer(run_dir)
            import_all(self.settings.preload, run_dir / "logs" / "imports.log", self._stopping)
            self._prepared = self._prepare()
            self._begin(self._prepared)
            self._launcher.run(self._over)
            self._look()
            return self._finish()
        except _StopNow:
            self._ending = True
            self._children.kill_everything()
            if not self._prepared:
                raise Refused(STOPPED_BEFORE) from None
            self._end("stopped", "stopped at once, without a final checkpoint")
            return STOPPED_AT_ONCE_EXIT
        finally:
            self._ending = True
            self._children.kill_everything()
            for signum, handler in self._old_handlers.items():
                signal.signal(signum, handler)
            self._children.close()
            self._events.close()
            if self._teller is not None:
                self._teller.close()

    def _over(self) -> bool:
        if self._lighthouse is not None and self._lighthouse.cannot_start:
            return True
        if not self._launcher.groups:
            return bool(self._stops)
        return all(group.end for group in self._launcher.groups)

    def _finish(self) -> int:
        ends = [group.end for group in self._launcher.groups if group.end is not None]
        kinds = {end.status for end in ends}
        if self._lighthouse is not None and self._lighthouse.cannot_start:
            status, reason = "failed", self._lighthouse.cannot_start
        elif "killed" in kinds:
            status, reason = "failed", "some workers did not end by themselves when asked to stop"
        elif self._stops:
            status, reason = "stopped", "stopped cleanly"
        elif kinds == {"done"}:
            status, reason = "done", "every group finished"
        elif "done" in kinds:
            status, reason = "done", "finished, though not by every group"
        elif "stopped" in kinds:
            status, reason = "stopped", "its workers were asked to stop"
        else:
            status, reason = "failed", f"every group was given up; {ends[-1].reason}"
        self._end(status, reason)
        return 0 if status in ("done", "stopped") else 1

    def _end(self, status: str, reason: str) -> None:
        self._on_events([self._events.emit("run_ended", status=status, reason=reason)])

    # Before the groups

    def _prepare(self) -> Prepared:
        """Have the config checked, and settled in the run directory. Raises LaunchError."""
        settings, log = self.settings, self.run_dir.path / "logs" / "prepare.log"
        order = replace(settings.order, run_dir=str(self.run_dir.path))
        child = Child("prepare", 0, lambda child, exitcode: None)
        start = functools.partial(self._children.start, child, Request(settings.prepare, [asdict(order)], log))
        patiently("checking the config", start, self._stopping)
        while child.alive and not self._stops:
            self._children.wait(TICK_S)
        if self._stops:
            raise Refused(STOPPED_BEFORE)
        found = take_answer(self.run_dir.path)
        if isinstance(found, Prepared):
            ranks = found.groups * settings.order.ranks
            found = sharing_complaint(found.devices, ranks, found.fault_tolerance.process_group) or found
        if isinstance(found, Prepared):
            return found
        if found:
            raise Refused(found)
        raise LaunchError(f"checking the config failed ({child.exitcode}), see {log}.")

    def _begin(self, found: Prepared) -> None:
        """The config is settled: tell of the run, and let others look at it."""
        settings, run_dir = self.settings, self.run_dir.path
        self._lighthouse = Lighthouse(run_dir, HOST, found.fault_tolerance, self._children, self._events)
        self._events.emit(
            "run_started",
            groups=found.groups,
            ranks_per_group=settings.order.ranks,
            seed=found.seed,
            version=everstep.__version__,
            steps=found.steps,
            identity=found.identity,
        )
        for warning in found.warnings:
            self._events.emit("warning", text=warning)
        if self._injector is not None:
            self._inject = self._injector(found.seed, run_dir)
        self._teller = Teller(telling(run_dir, HOST, found, settings.page))
        if self._teller.address:
            self._events.emit("page", address=self._teller.address)
        self._launcher.jobs = {
            "events": self._look,
            "page and figures": self._teller.keep,
            "lighthouse": self._lighthouse.keep,
            "groups": self._keep_groups,
        }

    def _keep_groups(self) -> None:
        """Have as many groups as are wanted (`everstep scale`), once the lighthouse has an address that holds. One that
        was asked to leave ends first, and is started anew if it is wanted again."""
        groups, prepared, lighthouse = self._launcher.groups, self._prepared, self._lighthouse
        if prepared is None or lighthouse is None or not lighthouse.up or self._stops:
            return
        wanted = wanted_groups(self.run_dir.path, prepared.groups)
        groups[:] = [group for group in groups if not (group.leaves and group.end)]
        for index in sorted(set(range(wanted)) - {group.settings.group for group in groups}):
            events = EventLog(self.run_dir.path, index, None, "agent")
            settings = self._group_settings(index, wanted, prepared, lighthouse.address)
            group = Group(settings, self._children, self._stopping, events)
            try:
                fence.claim_group(self.run_dir.path, index, Claim(), self._stopping)
            except fence.Fenced as fenced:
                group.finish("fenced", str(fenced))
            groups.append(group)

    def _group_settings(self, index: int, groups: int, prepared: Prepared, lighthouse: str) -> GroupSettings:
        settings = self.settings
        return GroupSettings(
            config=str(self.run_dir.config),
            run_dir=self.run_dir.path,
            group=index,
            groups=groups,
            ranks=settings.order.ranks,
            ranks_here=groups * settings.order.ranks,
            lighthouse=lighthouse,
            host=HOST,
            devices=devices_of_groups(prepared.devices, index + 1, settings.order.ranks)[index],
            fault_tolerance=prepared.fault_tolerance,
            stop_grace_s=settings.stop_grace_s,
            entry=settings.entry,
        )

    # What is asked and seen

    def _look(self) -> None:
        if self._stops != self._stops_obeyed:
            self._stops_obeyed = self._stops
            self._events.emit("stopping")
            with contextlib.suppress(OSError):  # a full disk
                ask_to_stop(self.run_dir.path)  # stays, for a worker that misses the signal
        events = self._tail.new()
        if self._inject is not None and not self._stops:
            self._inject(events)
        self._on_events(events)

    def _stopping(self) -> bool:
        return self._stops > 0

    def _ask_to_stop(self, *_: object) -> None:
        self._stops += 1
        if self._stops > 1 and not self._ending:
            raise _StopNow  # wherever we are: this may be a write to a terminal that takes nothing


def run(
    settings: RunSettings,
    on_events: OnEvents | None = None,
    injector: Callable[[int, Path], OnEvents] | None = None,
) -> int:
    """Run to the end; returns the exit status. `injector` makes what injects faults, of the run's seed and directory,
    called as `on_events` is. Raises LaunchError for what the user can put right."""
    run_dir = RunDir(Path(settings.order.run_dir).resolve())
    with leaves_nothing(run_dir.path, Refused):
        run_dir.lock()
        try:
            patiently("the run's token", lambda: own_token(run_dir.path), lambda: False)
            return Supervisor(settings, run_dir, on_events, injector).run()
        finally:
            run_dir.unlock()
