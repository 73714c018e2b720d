"""`everstep run`: one machine, one run. Starts the lighthouse and the agents, starts again what dies, ends
with them.

One loop, one thread: reap children, take the warm process's answers, read new events, act. What is
remembered about a child is its pid; all state of the run itself is in the run directory, so a supervisor
that was killed can be started again.
"""

import hashlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import everstep
from everstep.config.sections import FaultTolerance
from everstep.launch.agent import GAVE_UP_EXIT, AgentSettings
from everstep.launch.lifeline import adopt_orphans
from everstep.launch.rundir import LaunchError, RunDir
from everstep.launch.warm import PRELOAD, WarmProcess
from everstep.quorum.token import run_token
from everstep.report.events import EventLog, EventTail

HOST = "127.0.0.1"
TICK_S = 0.02
KILL_GRACE_S = 10.0
LIGHTHOUSE_RETRY_S = 0.2


@dataclass
class RunSettings:
    """What to run. `flags` are torchtitan's and go to every worker."""

    config: Path
    run_dir: Path
    groups: int
    ranks_per_group: int = 1
    steps: int | None = None
    seed: int = 0
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    flags: list[str] = field(default_factory=list)
    chaos_every_s: float | None = None
    devices: list[str | None] = field(default_factory=list)
    """CUDA_VISIBLE_DEVICES by group; empty: as inherited."""
    stop_grace_s: float = 120.0
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""
    preload: Sequence[str] = PRELOAD
    """Modules that the warm process imports."""


@dataclass
class _Group:
    """One group as the supervisor sees it."""

    request: int | None = None
    pid: int | None = None
    ended: str | None = None
    """"done", "stopped" or "failed" once its agent has ended for good."""
    last_word: str = "done"
    """What its agent said when it ended."""


def free_port(host: str = HOST) -> int:
    """A TCP port that nobody listens on now."""
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]


class Supervisor:
    """Runs one run to its end. `on_events` is called with each batch of new events."""

    def __init__(
        self, settings: RunSettings, run_dir: RunDir, on_events: Callable[[list[dict]], None] | None = None
    ):
        self.settings = settings
        self.run_dir = run_dir
        self.groups = [_Group() for _ in range(settings.groups)]
        self._on_events = on_events or (lambda events: None)
        self._events = EventLog(run_dir.path, None, None, "supervisor")
        self._tail = EventTail(run_dir.path)
        self._warm: WarmProcess | None = None
        self._lighthouse_request: int | None = None
        self._lighthouse_pid: int | None = None
        self._lighthouse_next = 0.0
        self._port = free_port()
        self._stops = 0
        self._stop_seen = 0
        self._failure = ""
        self._socket_dir = Path(tempfile.mkdtemp(prefix="everstep-"))

    # ---- the run

    def run(self) -> int:
        """Until all groups have ended; returns the exit status: 0 for done or a clean stop, 130 when cut
        short.
        """
        adopt_orphans()
        old_handlers = {
            s: signal.signal(s, self._ask_to_stop) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            self._emit_started()
            self._tail.skip_to_end()
            self._start_warm()
            while not self._over():
                self._reap()
                self._take_answers()
                self._start_missing()
                self._obey_stop()
                self._look()
                time.sleep(TICK_S)
            self._look()
            return self._finish()
        finally:
            self._kill_everything()
            for signum, handler in old_handlers.items():
                signal.signal(signum, handler)
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._events.close()

    def _look(self) -> None:
        events = self._tail.new()
        for event in events:
            if event["kind"] == "agent_ended" and event["group"] < len(self.groups):
                self.groups[event["group"]].last_word = event["status"]
        self._on_events(events)

    def _emit_started(self) -> None:
        settings = self.settings
        self._events.emit(
            "run_started",
            groups=settings.groups,
            ranks_per_group=settings.ranks_per_group,
            steps=settings.steps,
            seed=settings.seed,
            config_sha=hashlib.sha256(self.run_dir.config.read_bytes()).hexdigest(),
            version=everstep.__version__,
        )

    def _over(self) -> bool:
        return bool(self._failure) or self._stops > 1 or all(group.ended for group in self.groups)

    def _finish(self) -> int:
        ends = {group.last_word if group.ended == "done" else group.ended for group in self.groups}
        if self._failure:
            status, reason = "failed", self._failure
        elif self._stops > 1:
            status, reason = "stopped", "stopped at once, without a final checkpoint"
        elif self._stops or ("stopped" in ends and "done" not in ends):
            status, reason = "stopped", "stopped cleanly"
        elif ends == {"done"}:
            status, reason = "done", "every group finished"
        elif "done" in ends:
            status, reason = "done", "finished, though some groups were given up"
        else:
            status, reason = "failed", "every group was given up"
        self._on_events([self._events.emit("run_ended", status=status, reason=reason)])
        if self._stops > 1:
            return 130
        return 0 if status in ("done", "stopped") else 1

    # ---- starting things

    def _start_warm(self) -> None:
        self._warm = WarmProcess(self.settings.preload, self.run_dir.path / "logs" / "warm.log")
        self._lighthouse_request = None
        for group in self.groups:
            group.request = None

    def _start_missing(self) -> None:
        if self._stops or self._warm is None:
            return
        if self._lighthouse_pid is None and self._lighthouse_request is None:
            if time.monotonic() < self._lighthouse_next:
                return
            self._lighthouse_request = self._warm.fork(
                "everstep.quorum.lighthouse:main",
                [self._lighthouse_args()],
                self.run_dir.path / "logs/lighthouse.log",
            )
        for index, group in enumerate(self.groups):
            if group.pid is None and group.request is None and group.ended is None:
                log = self.run_dir.path / "logs" / f"group-{index}" / "agent.log"
                group.request = self._warm.fork(
                    "everstep.launch.agent:main", [self._agent_settings(index).to_json()], log
                )

    def _lighthouse_args(self) -> list[str]:
        ft = self.settings.fault_tolerance
        return [
            "--bind", f"{HOST}:{self._port}", "--min-groups", str(ft.min_groups),
            "--heartbeat-timeout-s", str(ft.heartbeat_timeout_s), "--join-timeout-s", str(ft.join_timeout_s),
        ]  # fmt: skip

    def _agent_settings(self, group: int) -> AgentSettings:
        settings, ft = self.settings, self.settings.fault_tolerance
        return AgentSettings(
            config=str(self.run_dir.config),
            run_dir=str(self.run_dir.path),
            group=group,
            groups=settings.groups,
            ranks=settings.ranks_per_group,
            lighthouse=f"http://{HOST}:{self._port}",
            flags=settings.flags,
            host=HOST,
            devices=settings.devices[group] if settings.devices else None,
            socket_dir=str(self._socket_dir),
            stall_timeout_s=ft.stall_timeout_s,
            startup_timeout_s=ft.startup_timeout_s,
            stop_grace_s=settings.stop_grace_s,
            max_restarts=ft.max_restarts,
            restart_window_s=ft.restart_window_s,
            entry=settings.entry,
        )

    def _take_answers(self) -> None:
        for answer in self._warm.answers() if self._warm else ():
            if "fatal" in answer:
                self._failure = f"an import failed, {answer['fatal']} (see {self.run_dir.path}/logs/warm.log)"
            elif answer.get("id") is None:
                continue
            elif answer["id"] == self._lighthouse_request:
                self._lighthouse_request, self._lighthouse_pid = None, answer["pid"]
                self._events.emit(
                    "lighthouse_started", address=f"http://{HOST}:{self._port}", pid=answer["pid"]
                )
            else:
                for index, group in enumerate(self.groups):
                    if group.request == answer["id"]:
                        group.request, group.pid = None, answer["pid"]
                        self._events.emit("agent_started", target_group=index, pid=answer["pid"])

    # ---- what ends

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
            self._take_answers()  # what it said last
            self._warm.close()
            self._warm = None
            if not self._failure:
                self._kill_strangers()
                self._start_warm()
        elif pid == self._lighthouse_pid:
            self._lighthouse_pid = None
            self._lighthouse_next = time.monotonic() + LIGHTHOUSE_RETRY_S
            self._events.emit("lighthouse_died", exitcode=exitcode)
        for index, group in enumerate(self.groups):
            if pid == group.pid:
                group.pid = None
                if exitcode == 0:
                    group.ended = "done"
                elif exitcode == GAVE_UP_EXIT:
                    group.ended = "failed"
                else:
                    self._events.emit("agent_died", target_group=index, exitcode=exitcode)
                    group.ended = "stopped" if self._stops else None

    def _kill_strangers(self) -> None:
        """A warm process may die between a fork and its answer: nobody would know that child."""
        known = {group.pid for group in self.groups} | {self._lighthouse_pid}
        for child in psutil.Process().children():
            if child.pid not in known:
                child.kill()

    def _ask_to_stop(self, *_: object) -> None:
        self._stops += 1

    def _obey_stop(self) -> None:
        if self._stops == self._stop_seen:
            return
        self._stop_seen = self._stops
        for group in self.groups:
            if group.pid is not None:
                os.kill(group.pid, signal.SIGTERM)
            elif group.ended is None:
                group.ended = "stopped"

    def _kill_everything(self) -> None:
        """Nothing that this run started outlives it. The kernel takes the workers with their agents."""
        pids = [group.pid for group in self.groups] + [
            self._lighthouse_pid,
            self._warm.pid if self._warm else None,
        ]
        for pid in pids:
            if pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if self._warm is not None:
            self._warm.close()
        deadline = time.monotonic() + KILL_GRACE_S
        while time.monotonic() < deadline:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)
            except ChildProcessError:
                return


def run(settings: RunSettings, on_events: Callable[[list[dict]], None] | None = None) -> int:
    """Prepare the run directory and run. Raises LaunchError for what the user can put right, before
    anything starts.
    """
    if settings.groups < 1 or settings.ranks_per_group < 1:
        raise LaunchError("--groups and --ranks-per-group must be at least 1.")
    run_dir = RunDir(settings.run_dir.resolve())
    run_dir.lock()
    try:
        run_dir.adopt_config(settings.config)
        run_token(run_dir.path)
        return Supervisor(settings, run_dir, on_events).run()
    finally:
        run_dir.unlock()
