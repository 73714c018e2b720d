"""`everstep agent`: the launcher's loop with one replica group, which a batch system starts on each of its nodes.

It adds what a batch job needs: the claim by which a later start of the group wins, a look at the node, beats that other
hosts read, and a file that says how the group ended.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from everstep.launch.children import Child, Children
from everstep.launch.forking import PRELOAD, Request, keep_on_without_output
from everstep.launch.group import EXITS, End, Group, Status, is_spare
from everstep.launch.incarnation import last_step
from everstep.launch.launcher import Launcher, import_all
from everstep.launch.scarce import patiently
from everstep.launch.settings import GroupSettings
from everstep.launch.view import show_plainly
from everstep.run import fence
from everstep.run.address import await_address
from everstep.run.beats import agent_beat_path, beat_path, push
from everstep.run.directory import GroupOver, LaunchError, bad_node_file, over_file, stop_file
from everstep.run.events import EventLog, EventTail
from everstep.run.fence import Claim
from everstep.run.files import write_json
from everstep.run.lifeline import adopt_orphans
from everstep.run.stops import collect_stops

STARTS_WITHOUT_A_STEP = 5
"""Agents of a group, one after the other, that may end before the group commits a step."""
ADDRESS_TIMEOUT_S = 24 * 3600.0
"""How long to wait for a lighthouse: its job may be pending."""
PUSH_INTERVAL_S = 1.0
NODE_CHECK_TIMEOUT_S = 300.0


def reason_not_to_start(run_dir: Path, group: int) -> str:
    """Why a group should not be started again, going by how its earlier agents ended; "": start it."""
    step = last_step(run_dir, group)
    own = EventTail(run_dir, (f"agent-{group}",))  # one start of the group is a few lines, however long it trained
    starts = sum(event["kind"] == "agent_up" and event.get("after_step") == step for event in own.new())
    if starts < STARTS_WITHOUT_A_STEP:
        return ""
    return f"it was started {starts} times without committing a step"


def _start_check() -> subprocess.Popen[str]:
    """Begin to look whether this node is fit to train on. In a process of its own: a launcher stays clear of GPUs, and
    a GPU that hangs must not hang it."""
    command = [sys.executable, "-m", "everstep.cli", "doctor", "--node", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _unfit(check: subprocess.Popen[str]) -> str:
    """Why this node should not be trained on; "" if it is fit."""
    try:
        said, complaints = check.communicate(timeout=NODE_CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        check.kill()
        return f"its check did not end within {NODE_CHECK_TIMEOUT_S:g} s"
    if check.returncode == 0:
        return ""
    try:
        return json.loads(said)["checks"][0]["found"]
    except (ValueError, LookupError):
        return (complaints.strip().splitlines() or [f"its check ended with status {check.returncode}"])[-1]


def run_agent(settings: GroupSettings, preload: Sequence[str] = PRELOAD) -> int:
    """Run a group until its workers finish (0), are stopped by one of STOPS or the run's stop file (0, or
    KILLED_EXIT), or are given up (GAVE_UP_EXIT). In a batch job also until this node turns out bad (NODE_BAD_EXIT) or
    the group was started again elsewhere (FENCED_EXIT).

    Must be called in the main thread; `preload` are the modules that are imported before anything is forked.
    """
    keep_on_without_output()
    adopt_orphans()
    stops, stop_asked = collect_stops(), stop_file(settings.run_dir)

    def stopping() -> bool:
        return bool(stops) or stop_asked.exists()

    children = Children()
    try:
        events = patiently("events", lambda: EventLog(settings.run_dir, settings.group, None, "agent"), stopping)
        return 0 if events is None else _Agent(settings, children, events, stopping).run(preload)
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
        self._pusher: Child | None = None

    def run(self, modules: Sequence[str]) -> int:
        """Until the group has ended; the exit status."""
        try:
            end = self._run(modules)
        except fence.Fenced as fenced:
            end = self._end("fenced", str(fenced))
        except LaunchError as error:
            if not self._settings.job:
                raise
            end = self._end("crashed", f"the agent of group {self._settings.group} failed: {error}")
        exit_status = EXITS[end.status]
        if exit_status:
            print(end.reason, flush=True)
        patiently("its end", lambda: self._leave_word(end), lambda: False)
        return exit_status

    def _run(self, modules: Sequence[str]) -> End:
        """How the group ended here, or why it was not started. Raises Fenced and LaunchError."""
        settings, first_node = self._settings, self._settings.node_rank == 0
        if settings.job and first_node:
            why_not = patiently("its earlier starts", self._count_start, self._stopping)
            if why_not:
                return self._end("failed", f"group {settings.group} is given up, {why_not}")
        check = _start_check() if settings.node else None
        import_all(modules, settings.run_dir / "logs" / f"group-{settings.group}" / "imports.log", self._stopping)
        if first_node:
            claim = lambda: fence.claim_group(settings.run_dir, settings.group, self._claim, self._stopping)  # noqa: E731
            patiently("its claim", claim, self._stopping)
        lighthouse = settings.lighthouse or await_address(settings.run_dir, self._stopping, ADDRESS_TIMEOUT_S)
        unfit = _unfit(check) if check is not None else ""
        if self._stopping():  # which may have ended the check as well
            return self._end("stopped", "asked to stop")
        if unfit:
            return self._end("node_bad", unfit)
        settings = replace(settings, lighthouse=lighthouse)
        group = patiently(
            "its group", lambda: Group(settings, self._children, self._stopping, self._events), self._stopping
        )
        return self._end("stopped", "asked to stop") if group is None else self._train(group)

    def _end(self, status: Status, reason: str) -> End:
        """The end of a group that was not started here."""
        self._events.emit("agent_ended", status=status, reason=reason)
        return End(status, reason)

    def _count_start(self) -> str:
        """Count it, or say why it is one too many."""
        settings = self._settings
        why_not = reason_not_to_start(settings.run_dir, settings.group)
        if not why_not:
            place = {"job": settings.job, "restart": settings.restart, "node": settings.node}
            after = last_step(settings.run_dir, settings.group)
            self._events.emit("agent_up", pid=os.getpid(), **place, after_step=after)
        return why_not

    def _train(self, group: Group) -> End:
        launcher = Launcher(self._children, self._events, show_plainly)
        launcher.groups.append(group)
        if self._settings.node:
            launcher.jobs["beats"] = self._keep_pushing
        launcher.run(lambda: group.end is not None)
        assert group.end is not None
        return group.end

    def _leave_word(self, end: End) -> None:
        """For the batch system: how the group ended, if it is not to be started again, and on which node not."""
        settings, first_node = self._settings, self._settings.node_rank == 0
        if end.status == "node_bad":
            bad = {"node": settings.node, "host": settings.host, "reason": end.reason}
            self._events.emit("node_bad", **bad)
            write_json(bad_node_file(settings.run_dir, settings.group), bad | {"claim": str(self._claim)})
        unwanted = stop_file(settings.run_dir).exists() or is_spare(settings)
        stopped = end.status == "stopped" and unwanted
        final = first_node and (end.status == "done" or stopped)
        if settings.job and (final or end.status == "failed"):  # what one node gives up is no better on the others
            write_json(over_file(settings.run_dir, settings.group), asdict(GroupOver(end.status, end.reason)))
        if settings.job and first_node:
            fence.release(settings.run_dir, settings.group, self._claim)

    def _keep_pushing(self) -> None:
        """Have other hosts see this group's beats. A process of its own, since a file server may take its time."""
        if self._pusher is None or not self._pusher.alive:
            run_dir, group, node_rank = self._settings.run_dir, self._settings.group, self._settings.node_rank
            beats = [beat_path(run_dir, group, 0), agent_beat_path(run_dir, group, node_rank)]
            self._pusher = Child("pusher", 0, lambda child, exitcode: None)
            self._children.start(self._pusher, Request("everstep.launch.agent:push_beats", [beats], None))


def push_beats(beats: list[Path]) -> None:
    """A process: hand these beats to the file server, again and again."""
    while True:
        push(beats)
        time.sleep(PUSH_INTERVAL_S)
