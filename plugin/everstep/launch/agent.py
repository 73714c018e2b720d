"""`everstep agent`: the launcher's loop with one replica group, which a batch system starts on each of its nodes.

It adds what a batch job needs: the claim by which a later start of the group wins, a look at the node, beats that other
hosts read, and a file that says how the group ended.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

from everstep.launch.forking import PRELOAD, keep_on_without_output
from everstep.launch.group import EXITS, End, Group, Status, is_spare
from everstep.launch.launcher import Launcher
from everstep.launch.scarce import patiently
from everstep.launch.settings import GroupSettings
from everstep.launch.view import show_plainly
from everstep.run import fence
from everstep.run.address import await_address
from everstep.run.beats import agent_beat_path, beat_path, push
from everstep.run.directory import GroupOver, LaunchError, bad_node_file, over_file, stop_file
from everstep.run.fence import Claim
from everstep.run.files import write_json

ADDRESS_TIMEOUT_S = 24 * 3600.0
"""How long to wait for a lighthouse: its job may be pending."""
PUSH_INTERVAL_S = 1.0
NODE_CHECK_TIMEOUT_S = 300.0


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
    with Launcher(settings.run_dir, "agent", show_plainly, settings.group) as launcher:
        return _Agent(settings, launcher).run(preload)


class _Agent:
    """One group in a batch job, or by hand."""

    def __init__(self, settings: GroupSettings, launcher: Launcher) -> None:
        self._settings, self._launcher, self._events = settings, launcher, launcher.events
        self._claim = Claim(settings.job, settings.restart)
        self._next_push = 0.0

    def _stopping(self) -> bool:
        return self._launcher.is_stopping() or stop_file(self._settings.run_dir).exists()

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
            place = {"job": settings.job, "restart": settings.restart, "node": settings.node}
            self._events.emit("agent_up", pid=os.getpid(), **place)
        check = _start_check() if settings.node else None
        self._launcher.import_all(modules, settings.run_dir / "logs" / f"group-{settings.group}" / "imports.log")
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
            "its group",
            lambda: Group(settings, self._launcher.children, self._stopping, self._events),
            self._stopping,
        )
        if group is None:
            return self._end("stopped", "asked to stop")
        self._launcher.groups.append(group)
        if settings.node:
            self._launcher.jobs["beats"] = self._push_beats
        self._launcher.run(lambda: group.end is not None)
        assert group.end is not None
        return group.end

    def _end(self, status: Status, reason: str) -> End:
        """The end of a group that was not started here."""
        self._events.emit("agent_ended", status=status, reason=reason)
        return End(status, reason)

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

    def _push_beats(self) -> None:
        """Have other hosts see this group's beats."""
        if time.monotonic() >= self._next_push:
            self._next_push = time.monotonic() + PUSH_INTERVAL_S
            run_dir, group, node_rank = self._settings.run_dir, self._settings.group, self._settings.node_rank
            push([beat_path(run_dir, group, 0), agent_beat_path(run_dir, group, node_rank)])
