"""`everstep agent`: the launcher's loop with one replica group, which a batch system starts on each of its nodes.

It adds what a batch job needs: the claim by which a later start of the group wins, a look at the node, beats that other
hosts read, and a file that says how the group ended.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from everstep.launch.children import Children
from everstep.launch.forking import keep_on_without_output
from everstep.launch.group import EXITS, End, Group
from everstep.launch.incarnation import last_step
from everstep.launch.launcher import Launcher
from everstep.launch.scarce import patiently
from everstep.launch.settings import GroupSettings
from everstep.launch.view import show_plainly
from everstep.launch.warm import PRELOAD
from everstep.launch.watchdog import RESTART_WINDOW_S
from everstep.run import fence
from everstep.run.address import await_address
from everstep.run.beats import agent_beat_path, beat_path, push
from everstep.run.directory import LaunchError, bad_node_file, over_file, stop_file
from everstep.run.events import EventLog, EventTail
from everstep.run.fence import Claim
from everstep.run.files import file_system_now, write_json
from everstep.run.lifeline import adopt_orphans
from everstep.run.stops import collect_stops

STARTS_WITHOUT_A_STEP = 5
"""Agents of a group, one after the other, that may end before the group commits a step."""
ADDRESS_TIMEOUT_S = 24 * 3600.0
"""How long to wait for a lighthouse: its job may be pending."""
PUSH_INTERVAL_S = 1.0


def reason_not_to_start(run_dir: Path, group: int, max_restarts: int, window_s: float) -> str | None:
    """Why a group should not be started again, going by how its earlier agents ended; None: start it. Times are those
    of the file system that the agents share, in seconds."""
    step = last_step(run_dir, group)
    own = EventTail(run_dir, (f"agent-{group}",))  # one start of the group is a few lines, however long it trained
    starts = [event for event in own.new() if event["kind"] == "agent_up"]
    since_step = sum(event.get("after_step") == step for event in starts)
    if since_step >= STARTS_WITHOUT_A_STEP:
        return f"it was started {since_step} times without committing a step"
    began = shared_s(run_dir) - window_s
    recent = sum(event.get("shared_s", 0.0) > began for event in starts)
    if recent > max_restarts:
        return f"it was started {recent} times within {window_s:g} s (fault_tolerance.max_restarts)"
    return None


def shared_s(run_dir: Path) -> float:
    """The clock of the file system that all agents of the run share, in seconds."""
    (run_dir / "state").mkdir(parents=True, exist_ok=True)
    return file_system_now(run_dir / "state")


NODE_CHECK_TIMEOUT_S = 300.0


def _unfit() -> str:
    """Why this node should not be trained on; "" if it is fit. In a process of its own: an agent stays clear of CUDA,
    and a GPU that hangs must not hang it."""
    command = [sys.executable, "-m", "everstep.cli", "doctor", "--node", "--json"]
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


def run_agent(settings: GroupSettings, preload: Sequence[str] = PRELOAD) -> int:
    """Run a group until its workers finish (0), are stopped by one of STOPS or the run's stop file (0, or
    KILLED_EXIT), or are given up (GAVE_UP_EXIT). In a batch job also until this node turns out bad (NODE_BAD_EXIT) or
    the group was started again elsewhere (FENCED_EXIT).

    Must be called in the main thread; `preload` are the modules that its warm process imports.
    """
    keep_on_without_output()
    adopt_orphans()
    stops, stop_asked = collect_stops(), stop_file(settings.run_dir)

    def stopping() -> bool:
        return bool(stops) or stop_asked.exists()

    log = settings.run_dir / "logs" / f"group-{settings.group}" / "warm.log"
    children = Children(preload, log)
    try:
        events = patiently("events", lambda: EventLog(settings.run_dir, settings.group, None, "agent"), stopping)
        return 0 if events is None else _Agent(settings, children, events, stopping).run()
    finally:
        children.kill_everything()
        children.close()


class _Agent:
    """One group in a batch job, or by hand."""

    def __init__(
        self, settings: GroupSettings, children: Children, events: EventLog, stopping: Callable[[], bool]
    ) -> None:
        self._settings, self._children, self._events, self._stopping = settings, children, events, stopping
        self._claim = Claim(settings.job, settings.restart)
        self._launcher = Launcher(children, events, stopping, settings.fault_tolerance.startup_timeout_s, show_plainly)

    def run(self) -> int:
        """Until the group has ended; the exit status."""
        self._launcher.look()  # the imports take their time, beside all that comes first
        group = self._group()
        end = group if isinstance(group, End) else self._train(group)
        if not isinstance(group, Group):
            self._events.emit("agent_ended", status=end.status, reason=end.reason)
        exit_status = EXITS[end.status]
        if exit_status:
            print(end.reason, flush=True)
        patiently("its end", lambda: self._leave_word(end, exit_status), lambda: False)
        return exit_status

    def _group(self) -> Group | End:
        """The group, once it may be started here; or why it is not."""
        settings, first_node = self._settings, self._settings.node_rank == 0
        if settings.job and first_node:
            why_not = patiently("its earlier starts", self._count_start, self._stopping)
            if why_not:
                return End("failed", f"group {settings.group} is given up, {why_not}")
        try:
            if first_node:
                claim = lambda: fence.claim_group(settings.run_dir, settings.group, self._claim, self._stopping)  # noqa: E731
                patiently("its claim", claim, self._stopping)
            lighthouse = settings.lighthouse or await_address(settings.run_dir, self._stopping, ADDRESS_TIMEOUT_S)
        except fence.Fenced as fenced:
            return End("fenced", str(fenced))
        unfit = _unfit() if settings.node and not self._stopping() else ""
        if self._stopping():  # which may have ended the check as well
            return End("stopped", "asked to stop")
        if unfit:
            return End("node_bad", unfit)
        settings = replace(settings, lighthouse=lighthouse)
        make = lambda: Group(settings, self._children, self._stopping, self._events)  # noqa: E731
        try:
            return patiently("its group", make, self._stopping) or End("stopped", "asked to stop")
        except fence.Fenced as fenced:
            return End("fenced", str(fenced))

    def _count_start(self) -> str | None:
        settings, ft = self._settings, self._settings.fault_tolerance
        why_not = reason_not_to_start(settings.run_dir, settings.group, ft.max_restarts, RESTART_WINDOW_S)
        if why_not is None:
            count = {"after_step": last_step(settings.run_dir, settings.group), "shared_s": shared_s(settings.run_dir)}
            place = {"job": settings.job, "restart": settings.restart, "node": settings.node}
            self._events.emit("agent_up", pid=os.getpid(), **place, **count)
        return why_not

    def _train(self, group: Group) -> End:
        if self._settings.node:
            threading.Thread(target=self._push_beats, name="beats", daemon=True).start()
        self._launcher.groups.append(group)
        try:
            self._launcher.run(lambda: group.end is not None)
        except LaunchError as error:
            if not self._settings.job:
                raise
            group.finish("crashed", f"the agent of group {self._settings.group} failed: {error}")
        assert group.end is not None
        return group.end

    def _leave_word(self, end: End, exit_status: int) -> None:
        """For the batch system: how the group ended, if it is not to be started again, and on which node not."""
        settings, first_node = self._settings, self._settings.node_rank == 0
        if end.status == "node_bad":
            bad = {"node": settings.node, "host": settings.host, "reason": end.reason}
            self._events.emit("node_bad", **bad)
            write_json(bad_node_file(settings.run_dir, settings.group), bad | {"claim": str(self._claim)})
        stopped = end.status == "stopped" and stop_file(settings.run_dir).exists()
        final = first_node and (end.status == "done" or stopped)
        if settings.job and (final or end.status == "failed"):  # what one node gives up is no better on the others
            write_json(over_file(settings.run_dir, settings.group), {"status": end.status, "reason": end.reason})
        if settings.job and first_node:
            fence.release(settings.run_dir, settings.group, self._claim)

    def _push_beats(self) -> None:
        """What other hosts read of this group. A thread of its own, since a file server may take its time."""
        run_dir, group, node_rank = self._settings.run_dir, self._settings.group, self._settings.node_rank
        mine = [beat_path(run_dir, group, 0), agent_beat_path(run_dir, group, node_rank)]
        while True:
            push(mine)
            time.sleep(PUSH_INTERVAL_S)
