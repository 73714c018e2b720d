"""The agent: owns one replica group's workers on this machine, and is what `everstep agent` runs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.forking import ForkPoint, keep_on_without_output
from everstep.launch.warm import PRELOAD
from everstep.launch.warm import preload as import_modules
from everstep.launch.watchdog import RestartLimits
from everstep.run import fence
from everstep.run.address import await_address
from everstep.run.directory import bad_node_file, over_file, stop_file
from everstep.run.events import EventLog, EventTail, event_path, last_event
from everstep.run.exits import FENCED_EXIT, GAVE_UP_EXIT, KILLED_EXIT, NODE_BAD_EXIT, REPLACED_EXIT
from everstep.run.fence import Claim
from everstep.run.files import write_json
from everstep.run.stops import collect_stops

STARTS_WITHOUT_A_STEP = 5
"""Agents of a group, one after the other, that may end before the group commits a step."""

ADDRESS_TIMEOUT_S = 24 * 3600.0
"""How long to wait for a lighthouse: its job may be pending."""

_LAST_WORDS = frozenset({"training_done", "left"})


@dataclass(frozen=True)
class AgentSettings:
    """One group's agent. Times in seconds."""

    config: str
    """The TOML file that the workers load."""
    run_dir: Path
    group: int
    groups: int
    ranks: int
    lighthouse: str
    """`http://host:port`; empty: as published in the run directory."""
    flags: list[str] = field(default_factory=list)
    """torchtitan flags of the workers that `config` does not hold already; a run directory's config.toml holds all."""
    host: str = "127.0.0.1"
    """Address that the group's servers listen on."""
    devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the workers; None: as inherited."""
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    """The run's section. Without fault tolerance workers neither beat nor tell of commits: no watchdog watches,
    and one that ran for longer than startup_timeout_s counts as one that trained."""
    stop_grace_s: float = 120.0
    entry: str = "everstep.train:main"
    """`module:function` that a worker calls with its argv."""
    job: int = 0
    """The batch system's job, if there is one."""
    restart: int = 0
    """How often the batch system has restarted that job."""
    nodes: int = 1
    """Nodes of this group."""
    node_rank: int = 0
    node: str = ""
    """This node's name in the batch system, if there are others to go to."""

    @property
    def limits(self) -> RestartLimits:
        """How often the group's workers are started again."""
        return RestartLimits(self.fault_tolerance.max_restarts, self.fault_tolerance.restart_window_s)

    def to_json(self) -> dict:
        return asdict(self) | {"run_dir": str(self.run_dir)}

    @classmethod
    def from_json(cls, said: dict) -> "AgentSettings":
        """What `to_json` wrote."""
        section = FaultTolerance(**said["fault_tolerance"])
        return cls(**said | {"run_dir": Path(said["run_dir"]), "fault_tolerance": section})


def worker_argv(settings: AgentSettings, lighthouse: str) -> list[str]:
    """What a worker of this group is started with: the config, and its place in the run."""
    return [
        "--module", "everstep", "--config", settings.config, "--dump_folder", str(settings.run_dir),
        "--fault_tolerance.group_id", str(settings.group),
        "--fault_tolerance.lighthouse", lighthouse, "--fault_tolerance.bind_host", settings.host,
        *settings.flags,
    ]  # fmt: skip


def next_incarnation(run_dir: Path, group: int) -> int:
    """0 for a group's first workers in this run directory, then one more each time. Read from the end of the group's
    own log."""
    last = last_event(event_path(run_dir, group, None, "agent"), {"workers_started"})
    return 0 if last is None else last["incarnation"] + 1


def reason_not_to_start(run_dir: Path, group: int, limits: RestartLimits) -> str | None:
    """Why a group should not be started again, going by how its earlier agents ended; None: start it."""
    now = time.time()
    step = last_event(event_path(run_dir, group, 0, "worker"), {"commit"})
    stepped = step["t"] if step is not None else 0.0
    own = EventTail(run_dir, (f"agent-{group}",))  # one start of the group is a few lines, however long it trained
    starts = [event["t"] for event in own.new() if event["kind"] == "agent_up"]
    recent = sum(t > now - limits.window_s for t in starts)
    since_step = sum(t > stepped for t in starts)
    if recent > limits.max_restarts:
        return f"it was started {recent} times within {limits.window_s:g} s (fault_tolerance.max_restarts)"
    if since_step >= STARTS_WITHOUT_A_STEP:
        return f"it was started {since_step} times without committing a step"
    return None


def _last_word(run_dir: Path, group: int) -> str:
    """How the group's workers ended: "training_done", or "left" when a stop reached them directly."""
    last = last_event(event_path(run_dir, group, 0, "worker"), _LAST_WORDS)
    return last["kind"] if last is not None else ""


NODE_CHECK_TIMEOUT_S = 300.0


def _unfit(settings: AgentSettings) -> str:
    """Why this node should not be trained on; "" if it is fit. In a process of its own: an agent stays clear of CUDA,
    and a GPU that hangs must not hang it."""
    command = [sys.executable, "-m", "everstep.cli", "doctor", "--node", "--json", "--run-dir", str(settings.run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=NODE_CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"its check did not end within {NODE_CHECK_TIMEOUT_S:g} s"
    if done.returncode == 0:
        return ""
    try:
        return json.loads(done.stdout)["checks"][0]["found"]
    except (ValueError, LookupError):
        return (done.stderr.strip().splitlines() or [f"its check ended with status {done.returncode}"])[-1]


def main(settings: dict) -> int:
    """Run the agent of `AgentSettings.to_json()` in a fork of the warm process; see `run_agent`."""
    return run_agent(AgentSettings.from_json(settings), preload=())


def run_agent(settings: AgentSettings, preload: Sequence[str] = PRELOAD) -> int:
    """Run a group until its workers finish (0), are stopped by one of STOPS or the run's stop file (0, or
    KILLED_EXIT), or are given up (GAVE_UP_EXIT). In a batch job also until this node turns out bad (NODE_BAD_EXIT) or
    the group was started again elsewhere (FENCED_EXIT).

    Must be called in the main thread of a process without other threads; `preload` are modules to import
    first.
    """
    keep_on_without_output()
    run_dir = settings.run_dir
    stops = collect_stops()
    stop_asked = stop_file(run_dir)

    def stopping() -> bool:
        return bool(stops) or stop_asked.exists()

    events = EventLog(run_dir, settings.group, None, "agent")
    claim = Claim(settings.job, settings.restart)

    def end(status: str, reason: str, exit_status: int) -> int:
        events.emit("agent_ended", status=status, reason=reason)
        if exit_status:
            print(reason, flush=True)
        first_node = settings.node_rank == 0
        final = first_node and (status == "done" or (status == "stopped" and stop_asked.exists()))
        if settings.job and (final or exit_status == GAVE_UP_EXIT):  # what one node gives up is no better on the others
            write_json(over_file(run_dir, settings.group), {"status": status, "reason": reason})
        if settings.job and first_node:
            fence.release(run_dir, settings.group, claim)
        return exit_status

    def node_is_bad(why: str) -> int:
        bad = {"node": settings.node, "host": settings.host, "reason": why}
        events.emit("node_bad", **bad)
        write_json(bad_node_file(run_dir, settings.group), bad | {"claim": str(claim)})
        return end("node_bad", f"node {settings.node} is not used any more: {why}", NODE_BAD_EXIT)

    first_incarnation = next_incarnation(run_dir, settings.group)
    if settings.job and settings.node_rank == 0:
        if why_not := reason_not_to_start(run_dir, settings.group, settings.limits):
            return end("failed", f"group {settings.group} is given up, {why_not}", GAVE_UP_EXIT)
        events.emit("agent_up", job=settings.job, restart=settings.restart, node=settings.node, pid=os.getpid())
    try:
        if settings.node_rank == 0:
            fence.claim_group(run_dir, settings.group, claim, stopping)
        lighthouse = settings.lighthouse or await_address(run_dir, stopping, ADDRESS_TIMEOUT_S)
    except fence.Fenced as fenced:
        return end("fenced", str(fenced), FENCED_EXIT)
    unfit = _unfit(settings) if settings.node and not stopping() else ""
    if stopping():  # which may have ended the check as well
        return end("stopped", "asked to stop", 0)
    if unfit:
        return node_is_bad(unfit)
    import_modules(preload)
    from everstep.launch.group_agent import GroupAgent, GroupSettings
    from everstep.launch.workers import ForkPointDied

    if settings.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = settings.devices
    if settings.job:
        os.environ[fence.ENVIRONMENT] = str(claim)
    fork_point = ForkPoint()
    agent = GroupAgent(
        GroupSettings(
            **vars(settings),
            argv=worker_argv(settings, lighthouse),
            first_incarnation=first_incarnation,
            stopping=stopping,
            claim=claim,
        ),
        fork_point,
        events,
    )
    try:
        failed = agent.run()
    except fence.Fenced as fenced:
        return end("fenced", str(fenced), FENCED_EXIT)
    except Exception as error:
        if settings.job:
            return end("crashed", f"the agent of group {settings.group} failed: {error}", 1)
        if isinstance(error, ForkPointDied) and error.exitcode < 0:
            print(error)
            return REPLACED_EXIT
        raise
    if stopping() and agent.killed_in_the_end:
        return end("killed", agent.killed_in_the_end, KILLED_EXIT)
    if agent.node_bad:
        return node_is_bad(agent.node_bad)
    if stopping():
        return end("stopped", "asked to stop", 0)
    if failed:
        return end("failed", agent.gave_up, GAVE_UP_EXIT)
    if _last_word(run_dir, settings.group) == "left":
        return end("stopped", "its workers were asked to stop", 0)
    return end("done", "its workers finished", 0)
