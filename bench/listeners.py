"""Which ports the processes of a run listen on, on this machine, for `bench/hostile.py`."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from everstep.run.directory import holder_of
from everstep.run.events import read_events

ROLES = {
    "lighthouse_started": "lighthouse",
    "agent_up": "agent",
    "workers_started": "worker",
    "worker_up": "worker",
}
"""Of the processes whose pids an event tells."""


@dataclass(frozen=True, order=True)
class Listener:
    """A TCP port that a process of the run listens on."""

    role: str
    pid: int
    address: str
    port: int


def processes(run_dir: Path) -> Iterator[tuple[str, int]]:
    """The launcher, lighthouse, agents and workers of a run that live on this machine, as (role, pid). Keepers tell
    their places elsewhere (`everstep.snapshot.peers`)."""
    launcher = holder_of(run_dir)
    if launcher is not None:
        yield "launcher", launcher[0]
    told = {
        (ROLES[event["kind"]], pid, event["t"])
        for event in read_events(run_dir, set(ROLES))
        for pid in event.get("pids") or [event.get("pid")]
        if pid is not None
    }
    for role, pid, t in sorted(told):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            # Of another machine, or of one that has ended, may have the pid.
            ours = process.uids().real == os.geteuid() and process.create_time() < t + 1.0
            if ours and any("everstep" in word for word in process.cmdline()):
                yield role, pid


def listeners(processes: Iterable[tuple[str, int]]) -> list[Listener]:
    """All listeners of processes, given as (role, pid), in order; none for a process that has ended or is not ours."""
    found = set()
    for role, pid in processes:
        try:
            places = psutil.Process(pid).net_connections("tcp")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found |= {Listener(role, pid, *place.laddr) for place in places if place.status == psutil.CONN_LISTEN}
    return sorted(found)
