"""`everstep lighthouse`: the lighthouse of a run on a cluster, kept up until the run is over.

The launcher's loop with a lighthouse and no group. Of two lighthouses of a run the older one ends.
"""

import functools
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.config.sections import FaultTolerance
from everstep.launch.children import Children
from everstep.launch.launcher import Launcher
from everstep.launch.lighthouse import Lighthouse
from everstep.launch.view import show_plainly
from everstep.report.live import Teller, telling
from everstep.report.serve import PageServer
from everstep.run.beats import beats_of_groups
from everstep.run.directory import LaunchError, over_file, stop_file
from everstep.run.events import EventLog
from everstep.run.lifeline import adopt_orphans
from everstep.run.stops import collect_stops

PRELOAD = ("everstep.quorum.lighthouse",)
LINGER_S = 60.0
"""How long after the last sign of life of any group the lighthouse stays when all groups have ended."""


@dataclass(frozen=True)
class Beacon:
    """What to run, and where. `host`: what the lighthouse listens on and what the groups are told."""

    run_dir: Path
    host: str
    groups: int
    fault_tolerance: FaultTolerance
    metrics: dict[str, Any] = field(default_factory=dict)
    """torchtitan's `[metrics]`."""
    page: bool = False
    """Whether to serve the run's page while it goes, on this machine's loopback."""


def keep_up(beacon: Beacon) -> int:
    """Until every group has ended for good, or one of STOPS; returns the exit status.

    Raises:
        LaunchError: the lighthouse does not start.
    """
    stops, run_dir, ft = collect_stops(), beacon.run_dir, beacon.fault_tolerance
    adopt_orphans()
    events = EventLog(run_dir, None, None, "lighthouse")
    metrics = {"metrics": beacon.metrics}
    teller = Teller(telling(run_dir, beacon.host, metrics, ft.metrics_port, beacon.groups, ft.min_groups))
    page = PageServer(run_dir) if beacon.page else None
    if page is not None:
        events.emit("page", address=page.address)
        print(f"the run's page: {page.address} on {socket.gethostname()} (ssh -L from where you are)", flush=True)
    children = Children(PRELOAD, run_dir / "logs" / "lighthouse.log")
    launcher = Launcher(children, events, lambda: bool(stops), ft.startup_timeout_s, show_plainly)
    say_refused = functools.partial(launcher.is_short, "lighthouse")
    lighthouse = Lighthouse(run_dir, beacon.host, ft, children, events, say_refused)
    launcher.jobs["lighthouse"] = lighthouse.keep
    try:
        launcher.run(lambda: bool(stops or lighthouse.cannot_start or lighthouse.superseded or _all_over(beacon)))
    finally:
        lighthouse.close()
        children.kill_everything()
        children.close()
        teller.close()
        if page is not None:
            page.close()
    if lighthouse.cannot_start:
        raise LaunchError(lighthouse.cannot_start)
    if lighthouse.superseded:
        events.emit("lighthouse_superseded", address=lighthouse.address, epoch=lighthouse.epoch)
    return 0


def _all_over(beacon: Beacon) -> bool:
    """Whether no group will ask for a quorum any more. Groups of which nothing was heard for a while count as gone in a
    run that was stopped or finished by another."""
    ended = [over_file(beacon.run_dir, group).exists() for group in range(beacon.groups)]
    if all(ended):
        return True
    if not any(ended) and not stop_file(beacon.run_dir).exists():
        return False
    return all(age > LINGER_S for _, _, age in beats_of_groups(beacon.run_dir))
