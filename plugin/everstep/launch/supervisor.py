"""`everstep run`: one machine, one run. The launcher's loop with all groups of the run, and with its lighthouse.

The state of the run is in the run directory, so that a launcher that was killed can simply be started again.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import everstep
from everstep.launch.children import Child
from everstep.launch.forking import PRELOAD, Request
from everstep.launch.group import Group
from everstep.launch.launcher import STOPPED_BEFORE, TICK_S, Launcher
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.machine import HOST, devices_of_groups, sharing_complaint
from everstep.launch.prepare import Order, Prepared, prepared_file, take_answer
from everstep.launch.scarce import patiently
from everstep.launch.settings import GroupSettings
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
from everstep.run.token import own_token

STOPPED_AT_ONCE_EXIT = 130
"""What a shell gives for a command that Ctrl-C ended."""
OnEvents = Callable[[list[dict]], None]
"""Called at every turn with the new events."""


@dataclass
class RunSettings:
    """What to run, and how."""

    order: Order
    page: bool = False
    """Whether to serve the run's page while it goes, on loopback."""
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""
    prepare: str = "everstep.launch.prepare:main"
    """`module:function` that checks the config and settles it in the run directory."""
    preload: Sequence[str] = PRELOAD
    """Modules that are imported before anything is forked."""


class Refused(LaunchError):
    """A config that cannot work, or a stop before that was known: nothing was started, and what is in the run directory
    tells nothing more."""


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
        self._stops_obeyed = 0
        self._launcher = Launcher(run_dir.path, "supervisor", self._on_events)
        self._events = self._launcher.events
        self._tail = EventTail(run_dir.path)
        self._prepared: Prepared | None = None
        self._lighthouse: Lighthouse | None = None

    def run(self) -> int:
        """Until all groups have ended, or at once when it is asked to stop twice; returns the exit status: 0 for done
        or a clean stop, 130 when cut short.

        Raises LaunchError when the config or the run directory cannot be used.
        """
        run_dir = self.run_dir.path
        with self._launcher:
            self._tail.skip_to_end()
            forget_beats(run_dir)
            for file in (stop_file, ended_file, groups_file, prepared_file):
                file(run_dir).unlink(missing_ok=True)
            self._launcher.import_all(self.settings.preload, run_dir / "logs" / "imports.log")
            self._prepared = self._prepare()
            self._begin(self._prepared)
            self._launcher.run(self._over)
            self._look()
            if len(self._launcher.stops) > 1 and not self._groups_ended():
                self._launcher.children.kill_everything()
                self._end("stopped", "stopped at once, without a final checkpoint")
                return STOPPED_AT_ONCE_EXIT
            return self._finish()

    def _over(self) -> bool:
        if self._lighthouse is not None and self._lighthouse.cannot_start:
            return True
        return len(self._launcher.stops) > (1 if self._launcher.groups else 0) or self._groups_ended()

    def _groups_ended(self) -> bool:
        return bool(self._launcher.groups) and all(group.end for group in self._launcher.groups)

    def _finish(self) -> int:
        ends = [group.end for group in self._launcher.groups if group.end is not None]
        kinds = {end.status for end in ends}
        if self._lighthouse is not None and self._lighthouse.cannot_start:
            status, reason = "failed", self._lighthouse.cannot_start
        elif "killed" in kinds:
            status, reason = "failed", "some workers did not end by themselves when asked to stop"
        elif self._launcher.stops:
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
        start = functools.partial(self._launcher.children.start, child, Request(settings.prepare, [asdict(order)], log))
        patiently("checking the config", start, self._launcher.is_stopping)
        while child.alive and not self._launcher.stops:
            self._launcher.children.wait(TICK_S)
        if self._launcher.stops:
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
        self._lighthouse = self._launcher.serve(HOST, found, settings.page)
        self._launcher.jobs = {"events": self._look} | self._launcher.jobs | {"groups": self._keep_groups}

    def _keep_groups(self) -> None:
        """Have as many groups as are wanted (`everstep scale`), once the lighthouse has an address that holds. One that
        was asked to leave ends first, and is started anew if it is wanted again."""
        groups, prepared, lighthouse = self._launcher.groups, self._prepared, self._lighthouse
        if prepared is None or lighthouse is None or not lighthouse.up or self._launcher.stops:
            return
        wanted = wanted_groups(self.run_dir.path, prepared.groups)
        groups[:] = [group for group in groups if not (group.leaves and group.end)]
        for index in sorted(set(range(wanted)) - {group.settings.group for group in groups}):
            events = EventLog(self.run_dir.path, index, None, "agent")
            settings = self._group_settings(index, wanted, prepared, lighthouse.address)
            group = Group(settings, self._launcher.children, self._launcher.is_stopping, events)
            try:
                fence.claim_group(self.run_dir.path, index, Claim(), self._launcher.is_stopping)
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
            entry=settings.entry,
        )

    # What is asked and seen

    def _look(self) -> None:
        stops = len(self._launcher.stops)
        if stops != self._stops_obeyed:
            self._stops_obeyed = stops
            self._events.emit("stopping")
            with contextlib.suppress(OSError):  # a full disk
                ask_to_stop(self.run_dir.path)  # stays, for a worker that misses the signal
        events = self._tail.new()
        if self._inject is not None and not stops:
            self._inject(events)
        self._on_events(events)


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
