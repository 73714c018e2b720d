"""`everstep lighthouse`: the lighthouse of a run on a cluster, kept up until the run is over.

On one machine the supervisor does this beside everything else; here it is a small job of its own. The lighthouse itself
keeps no state. It is started again, on the same port, when it dies and when it no longer answers, and its address
is published in the run directory, where groups look for it: of two lighthouses the older one ends.
"""

import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from everstep.config.sections import FaultTolerance
from everstep.launch.local_lighthouse import arguments
from everstep.launch.machine import free_port, listens
from everstep.launch.probe import Probe
from everstep.report.live import Teller, telling
from everstep.report.serve import PageServer
from everstep.run.address import publish_address, superseded
from everstep.run.beats import beats_of_groups
from everstep.run.directory import LaunchError, over_file, read_toml, stop_file
from everstep.run.events import EventLog
from everstep.run.stops import collect_stops

POLL_S = 0.2
START_TIMEOUT_S = 60.0
LINGER_S = 60.0
"""How long after the last sign of life of any group the lighthouse stays when all groups have ended."""


@dataclass(frozen=True)
class Beacon:
    """What to run, and where. `host`: what the lighthouse listens on and what the groups are told."""

    run_dir: Path
    host: str
    groups: int
    fault_tolerance: FaultTolerance
    page: bool = False
    """Whether to serve the run's page while it goes, on this machine's loopback."""


def keep_up(beacon: Beacon) -> int:
    """Until every group has ended for good, or one of STOPS; returns the exit status.

    Raises:
        LaunchError: the lighthouse does not start.
    """
    stops = collect_stops()
    events = EventLog(beacon.run_dir, None, None, "lighthouse")
    toml = read_toml(beacon.run_dir / "config.toml") if (beacon.run_dir / "config.toml").exists() else {}
    ft = beacon.fault_tolerance
    teller = Teller(telling(beacon.run_dir, beacon.host, toml, ft.metrics_port, beacon.groups, ft.min_groups))
    page = PageServer(beacon.run_dir) if beacon.page else None
    if page is not None:
        events.emit("page", address=page.address)
        print(f"the run's page: {page.address} on {socket.gethostname()} (ssh -L from where you are)", flush=True)
    port = free_port(beacon.host)
    address = f"http://{beacon.host}:{port}"
    epoch = 0

    def is_over() -> bool:
        return bool(stops) or _all_over(beacon) or (epoch > 0 and superseded(beacon.run_dir, epoch))

    while not is_over():
        process = _start(beacon, port)
        probe = Probe(address)
        try:
            epoch = publish_address(beacon.run_dir, address, process.pid)
            events.emit("lighthouse_started", address=address, pid=process.pid, epoch=epoch)
            while process.poll() is None and not probe.hangs and not is_over():
                time.sleep(POLL_S)
            if process.poll() is not None or probe.hangs:
                reason = "did not answer" if process.poll() is None else "ended"
                events.emit("lighthouse_died", exitcode=process.poll(), reason=reason)
        finally:
            probe.close()
            process.kill()
            process.wait()
    if epoch > 0 and superseded(beacon.run_dir, epoch):
        events.emit("lighthouse_superseded", address=address, epoch=epoch)
    teller.close()
    if page is not None:
        page.close()
    return 0


def _start(beacon: Beacon, port: int) -> subprocess.Popen:
    words = arguments(beacon.fault_tolerance, f"{beacon.host}:{port}", beacon.run_dir)
    command = [sys.executable, "-m", "everstep.quorum.lighthouse", *words, "--die-with-parent"]
    log = beacon.run_dir / "logs" / "lighthouse.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not listens(beacon.host, port):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise LaunchError(f"the lighthouse does not start on {beacon.host}:{port}, see {log}")
        time.sleep(POLL_S)
    return process


def _all_over(beacon: Beacon) -> bool:
    """Whether no group will ask for a quorum any more. Groups of which nothing was heard for a while count as gone in a
    run that was stopped or finished by another."""
    ended = [over_file(beacon.run_dir, group).exists() for group in range(beacon.groups)]
    if all(ended):
        return True
    if not any(ended) and not stop_file(beacon.run_dir).exists():
        return False
    return all(age > LINGER_S for _, _, age in beats_of_groups(beacon.run_dir))
