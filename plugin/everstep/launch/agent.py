"""The agent: owns one replica group's workers on this machine, and is what `everstep agent` runs."""

import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from everstep.launch.forkpoint import start_fork_point
from everstep.launch.warm import PRELOAD
from everstep.launch.warm import preload as import_modules
from everstep.launch.watchdog import RestartLimits
from everstep.report.events import EventLog, read_events

GAVE_UP_EXIT = 3
"""Exit status of an agent that should not be started again."""

KILLED_EXIT = 4
"""Exit status of an agent that was asked to stop and whose workers did not end by themselves."""

_LAST_WORDS = ("training_done", "left")


@dataclass(frozen=True)
class AgentSettings:
    """One group's agent. Times in seconds."""

    config: str
    """The TOML file that the workers load."""
    run_dir: str
    group: int
    groups: int
    ranks: int
    lighthouse: str
    """`http://host:port`"""
    flags: list[str] = field(default_factory=list)
    """torchtitan flags, passed on."""
    host: str = "127.0.0.1"
    """Address that the group's servers listen on."""
    devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the workers; None: as inherited."""
    socket_dir: str = ""
    """A private folder for sockets and temporary files; empty: a fresh one."""
    stall_timeout_s: float = 120.0
    startup_timeout_s: float = 900.0
    stop_grace_s: float = 120.0
    max_restarts: int = 1_000_000
    restart_window_s: float = 3600.0
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""

    def to_json(self) -> dict:
        return asdict(self)


def worker_argv(settings: AgentSettings) -> list[str]:
    """What a worker of this group is started with. The user's flags come last: they win."""
    return [
        "--module", "everstep", "--config", settings.config, "--dump_folder", settings.run_dir,
        "--fault_tolerance.group_id", str(settings.group), "--fault_tolerance.groups", str(settings.groups),
        "--fault_tolerance.lighthouse", settings.lighthouse, "--fault_tolerance.bind_host", settings.host,
        *settings.flags,
    ]  # fmt: skip


def next_incarnation(run_dir: Path, group: int) -> int:
    """0 for a group's first workers in this run directory, then one more each time."""
    return sum(e["kind"] == "workers_started" and e["group"] == group for e in read_events(run_dir))


def _last_word(run_dir: Path, group: int) -> str:
    """How the group's workers ended: "training_done", or "left" when a stop reached them directly."""
    endings = [e["kind"] for e in read_events(run_dir) if e["group"] == group and e["kind"] in _LAST_WORDS]
    return endings[-1] if endings else ""


def main(settings: dict) -> int:
    """Run the agent of `AgentSettings.to_json()` in a fork of the warm process; see `run_agent`."""
    return run_agent(AgentSettings(**settings), preload=())


def run_agent(settings: AgentSettings, preload: Sequence[str] = PRELOAD) -> int:
    """Run a group until its workers finish (0), are stopped by SIGTERM or SIGINT (0, or KILLED_EXIT), or
    are given up (GAVE_UP_EXIT).

    Must be called in the main thread of a process without other threads; `preload` are modules to import
    first.
    """
    import_modules(preload)
    from everstep.launch.elastic import GroupAgent, GroupSettings

    run_dir = Path(settings.run_dir)
    if settings.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.devices
    own_dir = "" if settings.socket_dir else tempfile.mkdtemp(prefix="everstep-")
    socket_dir = Path(settings.socket_dir or own_dir)
    fork_point_pid = start_fork_point(socket_dir)
    tempfile.tempdir = str(socket_dir)  # where multiprocessing leaves its files, cleaned up even if we are killed

    asked_to_stop = False

    def ask_to_stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(stop, ask_to_stop)
    # TorchElastic would turn these into an exception that gives workers 30 s; SIGQUIT keeps that meaning.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"

    events = EventLog(run_dir, settings.group, None, "agent")
    agent = GroupAgent(
        GroupSettings(
            run_dir=run_dir,
            group=settings.group,
            ranks=settings.ranks,
            argv=worker_argv(settings),
            entry=settings.entry,
            host=settings.host,
            stall_timeout_s=settings.stall_timeout_s,
            startup_timeout_s=settings.startup_timeout_s,
            stop_grace_s=settings.stop_grace_s,
            limits=RestartLimits(settings.max_restarts, settings.restart_window_s),
            fork_point_pid=fork_point_pid,
            first_incarnation=next_incarnation(run_dir, settings.group),
            stopping=lambda: asked_to_stop,
        ),
        events,
    )
    result = agent.run()
    if asked_to_stop and agent.killed_in_the_end:
        events.emit("agent_ended", status="killed", reason=agent.killed_in_the_end)
        status = KILLED_EXIT
    elif asked_to_stop:
        events.emit("agent_ended", status="stopped", reason="asked to stop")
        status = 0
    elif result.is_failed():
        events.emit("agent_ended", status="failed", reason=agent.gave_up)
        print(agent.gave_up, flush=True)
        status = GAVE_UP_EXIT
    elif _last_word(run_dir, settings.group) == "left":
        events.emit("agent_ended", status="stopped", reason="its workers were asked to stop")
        status = 0
    else:
        events.emit("agent_ended", status="done", reason="its workers finished")
        status = 0
    if own_dir:
        shutil.rmtree(own_dir, ignore_errors=True)
    return status
