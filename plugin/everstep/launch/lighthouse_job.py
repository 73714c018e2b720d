"""`everstep lighthouse`: the launcher's loop with a lighthouse and no group. It keeps the lighthouse of a run on a
cluster up until the run is over. If a run has two lighthouses, the older one ends.
"""

import socket
from pathlib import Path

from everstep.launch.forking import preload
from everstep.launch.launcher import Launcher
from everstep.launch.prepare import Prepared
from everstep.launch.view import show_plainly
from everstep.run.beats import beats_of_groups
from everstep.run.directory import ends_of_groups, stop_file

PRELOAD = ("everstep.quorum.lighthouse",)
LINGER_S = 60.0
"""Seconds after the last beat of any group until the groups of a stopped or finished run count as gone (`is_over`)."""


def keep_up(run_dir: Path, host: str, config: Prepared, page: bool) -> int:
    """Keep the lighthouse up until the run is over (`is_over`), a newer one serves, or one of STOPS comes. Returns 0.

    Args:
        host: the address that the lighthouse listens on and that the groups connect to.
        page: whether to serve the page of the live run, on this machine's loopback.

    Raises LaunchError if the lighthouse does not start.
    """
    with Launcher(run_dir, "lighthouse", show_plainly) as launcher:
        lighthouse = launcher.serve(host, config, page)
        if launcher.page:
            where = f"{launcher.page} on {socket.gethostname()}"
            print(f"the run's page: {where} (forward the port from your machine with ssh -L)", flush=True)
        preload(PRELOAD, launcher.is_stopping)
        over: list[str] = []

        def look() -> None:
            if lighthouse.superseded or is_over(run_dir):
                over.append("a newer one serves" if lighthouse.superseded else "the run is over")

        launcher.jobs["end of the run"] = look
        # The stop file does not count: groups still have to finish their step.
        launcher.run(lambda: bool(launcher.stops or over))
        why = "asked to stop" if launcher.stops else over[0]
        stopped = f"; {stop_file(run_dir)} exists" if stop_file(run_dir).exists() else ""
        print(f"the lighthouse ends: {why}{stopped}", flush=True)
    return 0


def is_over(run_dir: Path) -> bool:
    """Return whether no group will ask for a quorum any more: all groups have ended for good, or the run was stopped or
    finished by one group, and no group has beaten for LINGER_S. Otherwise silent groups may be started again."""
    ends = list(ends_of_groups(run_dir))
    if all(ends):
        return True
    if not any(end and end.status == "done" for end in ends) and not stop_file(run_dir).exists():
        return False
    return all(age > LINGER_S for _, _, age in beats_of_groups(run_dir))
