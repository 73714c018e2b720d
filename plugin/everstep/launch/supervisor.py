"""`everstep run`: one machine, one run. The launcher's loop with all groups of the run, and with its lighthouse.

The state of the run is in the run directory, so that a launcher that was killed can simply be started again.
"""

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import everstep
from everstep.config.sections import FaultTolerance
from everstep.launch.children import Child, Children
from everstep.launch.group import Group
from everstep.launch.launcher import Launcher, tell
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.machine import HOST, devices_of_groups
from everstep.launch.prepare import Order, Prepared, forget_answer, take_answer
from everstep.launch.scarce import patiently
from everstep.launch.settings import GroupSettings
from everstep.launch.warm import PRELOAD, Request
from everstep.run import fence
from everstep.run.beats import forget_beats
from everstep.run.directory import LaunchError, RunDir, ask_to_stop, ended_file, leaves_nothing, stop_file
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
    """What to run. `flags` are torchtitan's and win over `config`; workers get both as one resolved file."""

    config: Path
    run_dir: Path
    groups: int | None = None
    """None: as many as the config says."""
    ranks_per_group: int = 1
    flags: list[str] = field(default_factory=list)
    page: bool = False
    """Whether to serve the run's page while it goes, on loopback."""
    allow_dropped: bool = False
    """Whether a converter that a file of torchtitan 0.2 asks for may be left out."""
    stop_grace_s: float = 120.0
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""
    prepare: str = "everstep.launch.prepare:main"
    """`module:function` that checks the config and settles it in the run directory."""
    preload: Sequence[str] = PRELOAD
    """Modules that the warm process imports."""

    def order(self) -> Order:
        """What is to be prepared."""
        return Order(
            config=str(self.config),
            flags=self.flags,
            groups=self.groups,
            ranks=self.ranks_per_group,
            run_dir=str(self.run_dir.resolve()),
            allow_dropped=self.allow_dropped,
        )


class Refused(LaunchError):
    """A config that cannot work, or a stop before that was known: nothing was started, and what is in the run directory
    tells nothing more."""


class _StopNow(Exception):
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
        self._stops = self._stops_obeyed = 0
        self._ending = False
        """Whether all there is left to do is to clean up, which nothing cuts short."""
        # Before the first file: whoever sees one may ask for a stop.
        self._old_handlers = {signum: signal.signal(signum, self._ask_to_stop) for signum in STOPS}
        self._events = EventLog(run_dir.path, None, None, "supervisor")
        self._tail = EventTail(run_dir.path)
        self._children = Children(settings.preload, run_dir.path / "logs" / "warm.log")
        startup_s = FaultTolerance().startup_timeout_s
        self._launcher = Launcher(self._children, self._events, self._stopping, startup_s, self._on_events)
        self._launcher.jobs |= {"prepare": self._prepare, "events": self._look, "stop": self._obey_stop}
        self._preparing: Child | None = None
        self._prepared: Prepared | None = None
        self._devices: list[str | None] = []
        self._lighthouse: Lighthouse | None = None
        self._injector = injector
        self._inject: OnEvents | None = None
        self._at_end = contextlib.ExitStack()
        self._failure = ""
        self._refusal: LaunchError | None = None

    def run(self) -> int:
        """Until all groups have ended; returns the exit status: 0 for done or a clean stop, 130 when cut
        short.

        Raises LaunchError when the config or the run directory cannot be used.
        """
        adopt_orphans()
        try:
            self._tail.skip_to_end()
            forget_beats(self.run_dir.path)
            stop_file(self.run_dir.path).unlink(missing_ok=True)
            ended_file(self.run_dir.path).unlink(missing_ok=True)
            forget_answer(self.run_dir.path)
            try:
                self._launcher.run(self._over)
            except LaunchError as error:
                if not self._prepared:
                    raise
                self._failure = str(error)
            self._look()
            if self._refusal is not None:
                raise self._refusal
            if not self._prepared:
                raise Refused(STOPPED_BEFORE)
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
            self._at_end.close()

    def _over(self) -> bool:
        self._failure = self._failure or (self._lighthouse.cannot_start if self._lighthouse else "")
        if self._failure or self._refusal:
            return True
        if not self._launcher.groups:
            return bool(self._stops)
        return all(group.end for group in self._launcher.groups)

    def _finish(self) -> int:
        ends = [group.end for group in self._launcher.groups if group.end is not None]
        kinds = {end.status for end in ends}
        if self._failure:
            status, reason = "failed", self._failure
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
        if self._prepared:
            self._on_events([self._events.emit("run_ended", status=status, reason=reason)])

    # Before the groups

    def _prepare(self) -> None:
        """Have the config checked, and settled in the run directory."""
        settings = self.settings
        if self._preparing is not None or self._children.warm is None or self._stops:
            return
        self._preparing = Child("prepare", 0, self._prepare_ended, on_refusal=self._prepare_refused)
        self._children.ask(
            self._preparing,
            Request(settings.prepare, [asdict(settings.order())], self.run_dir.path / "logs" / "prepare.log"),
        )

    def _prepare_refused(self, child: Child, errno: int) -> None:
        self._preparing = None
        if errno:
            self._launcher.is_short("prepare", os.strerror(errno))

    def _prepare_ended(self, child: Child, exitcode: int) -> None:
        found = take_answer(self.run_dir.path)
        if isinstance(found, Prepared):
            self._begin(found)
        elif found:
            self._refusal = Refused(found)
        else:
            log = self.run_dir.path / "logs" / "prepare.log"
            self._refusal = LaunchError(f"checking the config failed ({exitcode}), see {log}.")

    def _begin(self, found: Prepared) -> None:
        """The config is settled: tell of the run, and let others look at it."""
        settings, ft, groups = self.settings, found.fault_tolerance, found.groups
        self._prepared = found
        self._launcher.startup_timeout_s = ft.startup_timeout_s
        self._devices = devices_of_groups(found.devices, groups, settings.ranks_per_group)
        say_refused = functools.partial(self._launcher.is_short, "lighthouse")
        self._lighthouse = Lighthouse(self.run_dir.path, HOST, ft, self._children, self._events, say_refused)
        self._at_end.callback(self._lighthouse.close)
        self._events.emit(
            "run_started",
            groups=groups,
            ranks_per_group=settings.ranks_per_group,
            seed=found.seed,
            version=everstep.__version__,
            steps=found.steps,
            identity=found.identity,
        )
        for warning in found.warnings:
            self._events.emit("warning", text=warning)
        tell(self.run_dir.path, HOST, found, settings.page, self._events, self._at_end)
        if self._injector is not None:
            self._inject = self._injector(found.seed, self.run_dir.path)
        self._launcher.jobs |= {"lighthouse": self._lighthouse.keep, "groups": self._make_groups}

    def _make_groups(self) -> None:
        """Once the lighthouse has an address that holds."""
        groups, prepared, lighthouse = self._launcher.groups, self._prepared, self._lighthouse
        if prepared is None or lighthouse is None or not lighthouse.up or self._stops:
            return
        while len(groups) < prepared.groups:
            groups.append(self._group(len(groups), prepared, lighthouse.address))
        del self._launcher.jobs["groups"]

    def _group(self, index: int, prepared: Prepared, lighthouse: str) -> Group:
        events = EventLog(self.run_dir.path, index, None, "agent")
        settings = self._group_settings(index, prepared, lighthouse)
        group = Group(settings, self._children, self._stopping, events)
        try:
            fence.claim_group(self.run_dir.path, index, Claim(), self._stopping)
        except fence.Fenced as fenced:
            group.finish("fenced", str(fenced))
        return group

    def _group_settings(self, index: int, prepared: Prepared, lighthouse: str) -> GroupSettings:
        settings = self.settings
        return GroupSettings(
            config=str(self.run_dir.config),
            run_dir=self.run_dir.path,
            group=index,
            groups=prepared.groups,
            ranks=settings.ranks_per_group,
            ranks_here=prepared.groups * settings.ranks_per_group,
            lighthouse=lighthouse,
            host=HOST,
            devices=self._devices[index],
            fault_tolerance=prepared.fault_tolerance,
            stop_grace_s=settings.stop_grace_s,
            entry=settings.entry,
        )

    # What is asked and seen

    def _look(self) -> None:
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

    def _obey_stop(self) -> None:
        if self._stops == self._stops_obeyed:
            return
        self._stops_obeyed = self._stops
        self._events.emit("stopping")
        with contextlib.suppress(OSError):  # a full disk
            ask_to_stop(self.run_dir.path)  # stays, for a worker that misses the signal


def run(
    settings: RunSettings,
    on_events: OnEvents | None = None,
    injector: Callable[[int, Path], OnEvents] | None = None,
) -> int:
    """Run to the end; returns the exit status. `injector` makes what injects faults, of the run's seed and directory,
    called as `on_events` is. Raises LaunchError for what the user can put right."""
    run_dir = RunDir(settings.run_dir.resolve())
    with leaves_nothing(run_dir.path, Refused):
        run_dir.lock()
        try:
            patiently("the run's token", lambda: own_token(run_dir.path), lambda: False)
            return Supervisor(settings, run_dir, on_events, injector).run()
        finally:
            run_dir.unlock()
