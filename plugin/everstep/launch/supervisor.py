"""`everstep run`: one machine, one run. Starts lighthouse and agents, starts again what dies, ends with them.

One loop, one thread: reap children, take the warm process's answers, start what is missing, read new
events, act. Of a child only the pid is remembered; the state of the run is in the run directory, so that a
supervisor that was killed can simply be started again.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import everstep
from everstep.config.sections import FaultTolerance
from everstep.launch.agent import AgentSettings
from everstep.launch.local_lighthouse import LocalLighthouse
from everstep.launch.machine import HOST, devices_of_groups
from everstep.launch.prepare import take_answer
from everstep.launch.warm import PRELOAD, WarmProcess
from everstep.launch.watchdog import Awake, describe_exit
from everstep.report.live import Teller, telling
from everstep.report.serve import PageServer
from everstep.run.beats import agent_beat_path, forget_beats, read_beat
from everstep.run.directory import LaunchError, RunDir, ask_to_stop, leaves_nothing, read_toml, stop_file
from everstep.run.events import EventLog, EventTail
from everstep.run.exits import GAVE_UP_EXIT, KILLED_EXIT, REPLACED_EXIT
from everstep.run.lifeline import adopt_orphans
from everstep.run.stops import STOPS
from everstep.run.token import run_token

TICK_S = 0.02
SEARCH_S = 0.2
"""How often to look for what hangs."""
KILL_GRACE_S = 10.0
AGENT_SILENCE_S = 30.0
AGENT_CRASHES = 3
WARM_DEATHS = 3
"""Warm processes, one after the other, that may end by themselves before they have imported what the run needs."""
STOPPED_AT_ONCE_EXIT = 130
"""What a shell gives for a command that Ctrl-C ended."""
OnEvents = Callable[[list[dict]], None]
"""Called at every tick with the new events."""
STOPPED_BEFORE = "stopped before anything was started."


@dataclass
class RunSettings:
    """What to run. `flags` are torchtitan's and win over `config`; workers get both as one resolved file."""

    config: Path
    run_dir: Path
    groups: int
    ranks_per_group: int = 1
    seed: int = 0
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    flags: list[str] = field(default_factory=list)
    chaos_every_s: float | None = None
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


@dataclass
class _Group:
    """One group as the supervisor sees it."""

    ended: str = ""
    """"done", "stopped", "killed" (when asked to stop) or "failed" once its agent has ended for good."""
    started_mono: float = 0.0
    crashes: int = 0
    """How often its agents crashed since the group's last step."""


class Refused(LaunchError):
    """A config that cannot work, or a stop before that was known: nothing was started, and what is in the run directory
    tells nothing more."""


class _StopNow(Exception):
    """The second Ctrl-C."""


class Supervisor:
    """Runs one run to its end. `on_events` is called at every tick with the new events, none included."""

    def __init__(
        self,
        settings: RunSettings,
        run_dir: RunDir,
        on_events: OnEvents | None = None,
        injector: Callable[[Path], OnEvents] | None = None,
    ):
        self.settings = settings
        self.run_dir = run_dir
        self.groups = [_Group() for _ in range(settings.groups)]
        self._on_events = on_events or (lambda events: None)
        self._stops = self._stops_obeyed = 0
        self._ending = False
        """Whether all there is left to do is to clean up, which nothing cuts short."""
        # Before the first file: whoever sees one may ask for a stop.
        self._old_handlers = {signum: signal.signal(signum, self._ask_to_stop) for signum in STOPS}
        self._events = EventLog(run_dir.path, None, None, "supervisor")
        self._tail = EventTail(run_dir.path)
        self._warm: WarmProcess | None = None
        self._warm_deaths = 0
        """By themselves, since one was ready."""
        self._pids: dict[str, int] = {}
        self._early: dict[int, int] = {}  # exit codes of children that ended before the answer that names them
        self._prepared = False
        self._devices: list[str | None] = []
        self._lighthouse = LocalLighthouse()
        self._injector = injector
        self._inject: OnEvents | None = None
        self._teller: Teller | None = None
        self._page: PageServer | None = None
        self._next_search = 0.0
        self._awake = Awake()
        self._failure = ""
        self._given_up = ""
        self._failing: dict[int, str] = {}
        """By group, the error of workers that ended by themselves before they had committed a step."""
        self._unusable = ""
        self._refused = False

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
            take_answer(self.run_dir.path)  # of an earlier start that was killed
            self._start_warm()
            while not self._over():
                self._reap()
                self._take_answers()
                self._start_missing()
                self._obey_stop()
                self._look()
                self._kill_what_hangs()
                time.sleep(TICK_S)
            self._look()
            if self._unusable:
                raise (Refused if self._refused else LaunchError)(self._unusable)
            if not self._prepared:
                raise Refused(STOPPED_BEFORE)
            return self._finish()
        except _StopNow:
            self._ending = True
            self._kill_everything()
            if not self._prepared:
                raise Refused(STOPPED_BEFORE) from None
            self._end("stopped", "stopped at once, without a final checkpoint")
            return STOPPED_AT_ONCE_EXIT
        finally:
            self._ending = True
            self._kill_everything()
            for signum, handler in self._old_handlers.items():
                signal.signal(signum, handler)
            self._lighthouse.close()
            self._events.close()
            if self._teller is not None:
                self._teller.close()
            if self._page is not None:
                self._page.close()

    def _over(self) -> bool:
        return bool(self._failure or self._unusable) or all(g.ended for g in self.groups)

    def _finish(self) -> int:
        ends = {group.ended for group in self.groups}
        if self._failure:
            status, reason = "failed", self._failure
        elif "killed" in ends:
            status, reason = "failed", "some workers did not end by themselves when asked to stop"
        elif self._stops:
            status, reason = "stopped", "stopped cleanly"
        elif ends == {"done"}:
            status, reason = "done", "every group finished"
        elif "done" in ends:
            status, reason = "done", "finished, though not by every group"
        elif "stopped" in ends:
            status, reason = "stopped", "its workers were asked to stop"
        else:
            status, reason = "failed", f"every group was given up; {self._given_up}"
        self._end(status, reason)
        return 0 if status in ("done", "stopped") else 1

    def _end(self, status: str, reason: str) -> None:
        if self._prepared:
            self._on_events([self._events.emit("run_ended", status=status, reason=reason)])

    # What is started

    def _start_warm(self) -> None:
        # As torchrun does, and for its reason: ranks whose thread pools outnumber the cores slow each
        # other down tenfold.
        ranks = self.settings.groups * self.settings.ranks_per_group
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)  # an empty one is none
        self._warm = WarmProcess(self.settings.preload, self.run_dir.path / "logs" / "warm.log")

    def _fork(self, name: str, run: str, args: Sequence, log: str) -> None:
        if self._warm is not None and name not in self._pids:
            self._warm.ask(name, run, args, self.run_dir.path / "logs" / log)

    def _start_missing(self) -> None:
        if self._stops:
            return
        settings = self.settings
        if not self._prepared:
            flags = ["--fault_tolerance.groups", str(settings.groups), *settings.flags]  # the user's win
            args = [str(settings.config), str(self.run_dir.path), flags, settings.ranks_per_group]
            args += [settings.allow_dropped]
            self._fork("prepare", settings.prepare, args, "prepare.log")
        elif not self._lighthouse.up:
            self._start_lighthouse()
        else:
            for index, group in enumerate(self.groups):
                if not group.ended and f"agent-{index}" not in self._pids:
                    args, log = [self._agent_settings(index).to_json()], f"group-{index}/agent.log"
                    self._fork(f"agent-{index}", "everstep.launch.agent:main", args, log)

    def _start_lighthouse(self) -> None:
        if "lighthouse" in self._pids:
            self._lighthouse.look()
        elif self._lighthouse.is_due():
            args = [self._lighthouse.arguments(self.settings.fault_tolerance, self.run_dir.path)]
            self._fork("lighthouse", "everstep.quorum.lighthouse:main", args, "lighthouse.log")

    def _agent_settings(self, group: int) -> AgentSettings:
        settings = self.settings
        return AgentSettings(
            config=str(self.run_dir.config),
            run_dir=self.run_dir.path,
            group=group,
            groups=settings.groups,
            ranks=settings.ranks_per_group,
            lighthouse=self._lighthouse.address,
            host=HOST,
            devices=self._devices[group],
            fault_tolerance=settings.fault_tolerance,
            stop_grace_s=settings.stop_grace_s,
            entry=settings.entry,
        )

    def _take_answers(self) -> None:
        for name, pid in self._warm.forked() if self._warm else ():
            self._pids[name] = pid
            if name == "lighthouse":
                self._lighthouse.started(self.run_dir.path, pid)
                self._events.emit("lighthouse_started", address=self._lighthouse.address, pid=pid)
            elif name.startswith("agent-"):
                index = int(name.removeprefix("agent-"))
                self.groups[index].started_mono = time.monotonic()
                self._events.emit("agent_started", target_group=index, pid=pid)
            if pid in self._early:
                self._ended(pid, self._early.pop(pid))
        if not self._owes_answers():
            self._early.clear()

    def _owes_answers(self) -> bool:
        return self._warm is not None and bool(self._warm.asked)

    # What ends

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended(pid, os.waitstatus_to_exitcode(wait_status))

    def _ended(self, pid: int, exitcode: int) -> None:
        if self._warm is not None and pid == self._warm.pid:
            self._warm_ended(self._warm, exitcode)
            return
        name = next((name for name, known in self._pids.items() if known == pid), "")
        if not name and self._owes_answers():
            self._early[pid] = exitcode
            return
        self._pids.pop(name, None)
        if name == "prepare":
            self._prepare_ended(exitcode)
        elif name == "lighthouse":
            self._lighthouse_ended(exitcode)
        elif name:
            self._agent_ended(int(name.removeprefix("agent-")), exitcode)

    def _warm_ended(self, warm: WarmProcess, exitcode: int) -> None:
        """Start another one. A run that trains does without for as long as it takes."""
        self._take_answers()  # its last
        warm.close()
        self._warm = None
        self._kill_strangers()
        self._warm_deaths = (0 if warm.ready else self._warm_deaths) + warm.crashed(exitcode)
        died = f"the process that imports torch and torchtitan {describe_exit(exitcode)} before it was ready"
        why = f"{warm.fatal or f'{died}, {self._warm_deaths} times'}. More in {self.run_dir.path}/logs/warm.log."
        if not self._prepared and (warm.fatal or self._warm_deaths >= WARM_DEATHS):
            self._unusable = self._unusable or why
        elif self._warm_deaths >= WARM_DEATHS and not any(name.startswith("agent-") for name in self._pids):
            self._failure = self._failure or why
        else:
            self._start_warm()

    def _prepare_ended(self, exitcode: int) -> None:
        found = take_answer(self.run_dir.path)
        if not found or "error" in found:
            failed = f"checking the config failed ({exitcode}), see {self.run_dir.path}/logs/prepare.log."
            self._unusable, self._refused = found.get("error", failed), bool(found)
            return
        self._prepared = True
        settings = self.settings
        visible, warnings = found.pop("devices", []), found.pop("warnings", [])
        self._devices = devices_of_groups(visible, settings.groups, settings.ranks_per_group)
        self._events.emit(
            "run_started",
            groups=settings.groups,
            ranks_per_group=settings.ranks_per_group,
            seed=settings.seed,
            version=everstep.__version__,
            **found,
        )
        for warning in warnings:
            self._events.emit("warning", text=warning)
        toml, ft = read_toml(self.run_dir.config), settings.fault_tolerance
        self._teller = Teller(telling(self.run_dir.path, HOST, toml, ft.metrics_port, settings.groups, ft.min_groups))
        if settings.page:
            self._page = PageServer(self.run_dir.path)
            self._events.emit("page", address=self._page.address)
        if self._injector is not None:
            self._inject = self._injector(self.run_dir.path)

    def _lighthouse_ended(self, exitcode: int) -> None:
        reason = "did not answer" if self._lighthouse.hangs else "ended"
        self._events.emit("lighthouse_died", exitcode=exitcode, reason=reason)
        self._lighthouse.ended(known=any(group.started_mono for group in self.groups))
        if self._lighthouse.cannot_start:
            self._failure = f"the lighthouse does not start, see {self.run_dir.path}/logs/lighthouse.log"

    def _agent_ended(self, index: int, exitcode: int) -> None:
        group = self.groups[index]
        if exitcode == 0:
            group.ended = group.ended or "done"
        elif exitcode == GAVE_UP_EXIT:
            group.ended = "failed"
        elif exitcode == KILLED_EXIT:
            group.ended = "killed"
        else:
            self._events.emit("agent_died", target_group=index, exitcode=exitcode)
            # A signal came from outside, to it or to its fork point, and another agent helps.
            group.crashes += exitcode > 0 and exitcode != REPLACED_EXIT
            if self._stops:
                group.ended = "stopped"
            elif group.crashes >= AGENT_CRASHES:
                group.ended = "failed"
                log = self.run_dir.path / "logs" / f"group-{index}" / "agent.log"
                self._given_up = f"the agent of group {index} crashed {group.crashes} times, see {log}"

    def _kill_strangers(self) -> None:
        """A warm process may die between a fork and its answer: nobody would know that child, or the one in between
        whose child it still is."""
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline:
            strangers = [one for one in psutil.Process().children() if one.pid not in self._pids.values()]
            strangers = [one for one in strangers if not _is_keeper(one)]
            if not strangers:
                return
            for stranger in strangers:
                stranger.kill()
                os.waitpid(stranger.pid, os.WNOHANG)
            time.sleep(0.005)

    def _kill_what_hangs(self) -> None:
        """A lighthouse that does not answer keeps every group waiting, and a warm process that does not keeps those
        whose agent died; another one is started in its place."""
        if time.monotonic() < self._next_search:
            return
        self._next_search = time.monotonic() + SEARCH_S
        if self._lighthouse.hangs and "lighthouse" in self._pids:
            self._signal("lighthouse", signal.SIGKILL)
        if self._warm is not None and self._warm.hangs(self.settings.fault_tolerance.startup_timeout_s):
            os.kill(self._warm.pid, signal.SIGKILL)
        self._kill_silent_agents()

    def _kill_silent_agents(self) -> None:
        """An agent that hangs cannot look after its workers: another one takes over."""
        now, awake_mono = time.monotonic(), self._awake.since()
        for index, group in enumerate(self.groups):
            pid = self._pids.get(f"agent-{index}")
            if pid is None or now - max(group.started_mono, awake_mono) < AGENT_SILENCE_S:
                continue
            beat = read_beat(agent_beat_path(self.run_dir.path, index))
            if beat is None or beat.pid != pid or now - beat.mono > AGENT_SILENCE_S:
                self._signal(f"agent-{index}", signal.SIGKILL)

    # What is asked and seen

    def _look(self) -> None:
        events = self._tail.new()
        for event in events:
            group = event["group"]
            if group is None or group >= len(self.groups):
                continue
            if event["kind"] == "commit":
                self.groups[group].crashes = 0
                self._failing.clear()
            elif event["kind"] == "workers_died":
                self._note_failure(group, event)
            elif event["kind"] == "agent_ended" and event["status"] == "stopped":
                self.groups[group].ended = "stopped"
            elif event["kind"] == "agent_ended" and event["status"] == "failed":
                self._given_up = event["reason"]
        if self._inject is not None and not self._stops:
            self._inject(events)
        self._on_events(events)

    def _note_failure(self, group: int, event: dict) -> None:
        """What ends every group in the same way before its first step would do so for ever: the run ends with it."""
        if not event["by_itself"] or event["committed"] or not event["error"]:
            self._failing.pop(group, None)
            return
        self._failing[group] = event["error"]
        alike = {without_numbers(error) for error in self._failing.values()}
        if len(self.groups) > 1 and len(self._failing) == len(self.groups) and len(alike) == 1 and not self._stops:
            log = self.run_dir.path / "logs" / f"group-{group}" / "rank-0.log"
            self._failure = (
                f"all {len(self.groups)} groups failed in the same way before a step was committed: {event['error']} "
                f"(more in {log})"
            )

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
            ask_to_stop(self.run_dir.path)  # stays, for an agent or worker that misses the signal
        for index, group in enumerate(self.groups):
            if f"agent-{index}" in self._pids:
                self._signal(f"agent-{index}", signal.SIGTERM)
            else:
                group.ended = group.ended or "stopped"

    def _signal(self, name: str, signum: signal.Signals) -> None:
        try:
            os.kill(self._pids[name], signum)
        except ProcessLookupError:
            return

    def _kill_everything(self) -> None:
        """Nothing that this run started outlives it, but for the keepers of its snapshots. The kernel takes the workers
        with their agents; what those had started becomes our child."""
        if self._warm is not None:
            self._warm.close()
            self._warm = None
        self._pids.clear()
        self._kill_strangers()


def without_numbers(text: str) -> str:
    """An error without what differs between groups: ranks, ports, process ids, addresses in memory."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)


def _is_keeper(process: psutil.Process) -> bool:
    """Whether it keeps snapshots for the next start. An orphan of its worker, it became our child."""
    try:
        return "everstep.snapshot.keeper" in process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def run(
    settings: RunSettings,
    on_events: OnEvents | None = None,
    injector: Callable[[Path], OnEvents] | None = None,
) -> int:
    """Run to the end; returns the exit status. `injector` makes what injects faults into the run of this directory,
    called as `on_events` is. Raises LaunchError for what the user can put right."""
    run_dir = RunDir(settings.run_dir.resolve())
    with leaves_nothing(run_dir.path, Refused):
        run_dir.lock()
        try:
            run_token(run_dir.path)
            return Supervisor(settings, run_dir, on_events, injector).run()
        finally:
            run_dir.unlock()
