"""`everstep lighthouse`: the lighthouse of a run on a cluster, kept up until the run is over.

The launcher's loop with a lighthouse and no group. Of two lighthouses of a run the older one ends.
"""

import socket
import time
from pathlib import Path

from everstep.launch.launcher import Launcher
from everstep.launch.prepare import Prepared
from everstep.launch.view import show_plainly
from everstep.run.beats import beats_of_groups
from everstep.run.directory import ends_of_groups, stop_file

PRELOAD = ("everstep.quorum.lighthouse",)
LOOK_S = 1.0
LINGER_S = 60.0
"""How long after the last sign of life of any group the lighthouse stays when all groups have ended."""


def keep_up(run_dir: Path, host: str, config: Prepared, page: bool) -> int:
    """Until every group has ended for good, or one of STOPS; returns the exit status.

    Args:
        run_dir: of the run.
        host: what the lighthouse listens on and what the groups are told.
        config: of the run.
        page: whether to serve the run's page while it goes, on this machine's loopback.

    Raises:
        LaunchError: the lighthouse does not start.
    """
    with Launcher(run_dir, "lighthouse", show_plainly) as launcher:
        lighthouse = launcher.serve(host, config, page)
        if launcher.page:
            where = f"{launcher.page} on {socket.gethostname()}"
            print(f"the run's page: {where} (ssh -L from where you are)", flush=True)
        launcher.import_all(PRELOAD, run_dir / "logs" / "imports.log")
        next_look = 0.0

        def ends() -> bool:
            nonlocal next_look
            if launcher.stops or time.monotonic() < next_look:  # all of a cluster shares that file system
                return bool(launcher.stops)  # the stop file is for groups, which finish their step
            next_look = time.monotonic() + LOOK_S
            return lighthouse.superseded or is_over(run_dir)

        launcher.run(ends)
        why = "asked to" if launcher.stops else "there is another" if lighthouse.superseded else "the run is over"
        stopped = f"; {stop_file(run_dir)} is there" if stop_file(run_dir).exists() else ""
        print(f"the lighthouse ends: {why}{stopped}", flush=True)
    return 0


def is_over(run_dir: Path) -> bool:
    """Whether no group will ask for a quorum any more. Groups of which nothing was heard for a while count as gone in a
    run that was stopped or finished by another; if others were given up, they may be waiting to be started again."""
    ends = ends_of_groups(run_dir)
    if all(ends):
        return True
    if not any(end and end.status == "done" for end in ends) and not stop_file(run_dir).exists():
        return False
    return all(age > LINGER_S for _, _, age in beats_of_groups(run_dir))
