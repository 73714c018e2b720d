"""`everstep agent`: the launcher's loop with one replica group. A batch system starts it on each node of the group.

It first waits for the lighthouse's address. For a batch job it leaves a file that says how the group ended.
"""

import os
from dataclasses import asdict

from everstep.launch.forking import PRELOAD, preload
from everstep.launch.group import EXITS
from everstep.launch.launcher import Launcher
from everstep.launch.settings import GroupSettings
from everstep.launch.view import show_plainly
from everstep.run.address import address_file, await_address, published_address
from everstep.run.beats import DONE
from everstep.run.directory import End, LaunchError, bad_node_file, is_surplus, over_file, stop_file
from everstep.run.events import EventLog
from everstep.run.files import write_json

ADDRESS_TIMEOUT_S = 24 * 3600.0
"""Seconds to wait for a lighthouse. It is a day, because the lighthouse's job may be pending."""


def run_agent(settings: GroupSettings) -> int:
    """Run a group to its end and return the exit status of the agent:

    0: the workers finished, or were stopped cleanly by one of STOPS or the run's stop file; 1: some had to be killed
    for a stop, or the agent failed; GAVE_UP_EXIT: the group is given up; NODE_BAD_EXIT: this node is bad;
    FENCED_EXIT: the group was started again elsewhere.

    Call it in the main thread. Errors are raised if there is no `job`.
    """
    with Launcher(settings.run_dir, "agent", show_plainly, settings.group) as launcher:
        try:
            end = _run(settings, launcher)
        except (LaunchError, OSError) as error:
            if not settings.job:
                raise
            end = End("crashed", f"the agent of group {settings.group} failed: {error}")
        if not launcher.groups or launcher.groups[0].end is None:
            launcher.events.emit("agent_ended", status=end.status, reason=end.reason)
        print(f"group {settings.group} {end.status}: {end.reason}", flush=True)
        _tell_batch_system(settings, end, launcher.events)
    if launcher.groups and end.status != "fenced":
        launcher.groups[0].beat(DONE)  # none of its processes is left
    return EXITS[end.status]


def _run(settings: GroupSettings, launcher: Launcher) -> End:
    """Run the group in the launcher's loop, and return how it ended. Raises LaunchError."""
    if settings.node_rank == 0:
        place = {"job": settings.job, "restart": settings.restart, "node": settings.node}
        launcher.events.emit("agent_up", pid=os.getpid(), **place)
    preload(PRELOAD, launcher.is_stopping)
    if not published_address(settings.run_dir):
        print(f"waiting for a lighthouse's address in {address_file(settings.run_dir)}", flush=True)
    await_address(settings.run_dir, launcher.is_stopping, ADDRESS_TIMEOUT_S)  # workers would hold GPUs while they wait
    if launcher.is_stopping():
        return End("stopped", "asked to stop" if launcher.stops else f"{stop_file(settings.run_dir)} exists")
    group = launcher.add_group(settings, launcher.events)
    launcher.run(lambda: group.end is not None)
    assert group.end is not None
    return group.end


def _tell_batch_system(settings: GroupSettings, end: End, events: EventLog) -> None:
    """Write for the batch system that the group should not be started again, or not on this node, if that is so."""
    run_dir, first_node = settings.run_dir, settings.node_rank == 0
    if end.status == "node_bad":
        bad = {"node": settings.node, "host": settings.host, "reason": end.reason}
        events.emit("node_bad", **bad)
        write_json(bad_node_file(run_dir, settings.group), bad | {"claim": str(settings.claim)})
    unwanted = stop_file(run_dir).exists() or is_surplus(run_dir, settings.group)
    final = first_node and (end.status == "done" or (end.status == "stopped" and unwanted))
    if settings.job and (final or end.status == "failed"):  # what fails on one node would fail on the others too
        write_json(over_file(run_dir, settings.group), asdict(end))
