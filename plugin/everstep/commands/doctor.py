"""`everstep doctor`: will this config run here?"""

import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from everstep.launch import doctor as room
from everstep.launch import node
from everstep.launch.settings import local_host, read_sections
from everstep.run import listeners
from everstep.run.directory import LaunchError
from everstep.snapshot.peers import read_places
from everstep.wire import format_address


@dataclass(kw_only=True)
class Doctor:
    """Look whether a config can run on this machine and survive what it should. Every line says ok, warning or error,
    and what to do. On a cluster run it on each node: srun everstep doctor CONFIG.toml --run-dir DIR.

    Flags that are not listed here are torchtitan's.
    """

    config: tyro.conf.Positional[Path | None] = None
    """The run's TOML file."""

    node: bool = False
    """Look at this node alone: GPUs there and computing right, network card, disk, clock. Needs no file. Every agent of
    a batch job does the same before it starts workers."""

    gpus: int | None = None
    """With --node: GPUs that the ranks here need."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    allow_dropped: bool = False
    """Train without what a file of torchtitan 0.2 asks for and nothing here applies: a converter such as float8."""

    nodes_per_group: int = 1
    """Nodes of each group."""

    ranks_per_group: int = 1
    """Ranks (processes, GPUs) in each group."""

    measure_s: float = 0.0
    """Wait so long for the doctors of the other nodes, measure latency and bandwidth to them and the lateness of
    heartbeats, and propose timeouts. Needs --run-dir."""

    run_dir: Path | None = None
    """The run directory that the nodes will share: whether it can be written, its clock, its lighthouse."""

    listeners: bool = False
    """Show what the processes of the run in --run-dir listen on, on this machine, and what guards each port. Needs no
    file."""

    json: bool = False
    """Print one JSON object, and nothing else, to stdout."""


def doctor(command: Doctor, flags: Sequence[str]) -> int:
    """Exit status 1 if anything is an error."""
    run_dir = None if command.run_dir is None else command.run_dir.resolve()
    if command.node:
        complaint = node.complaint(run_dir, gpus=command.gpus)
        lines = [room.Line("node", "error" if complaint else "ok", complaint or "fit to train on")]
        print(json.dumps(room.to_json(lines)) if command.json else room.show(lines))
        return int(bool(complaint))
    if command.listeners:
        if run_dir is None:
            raise LaunchError("--listeners needs --run-dir, the run that is going on.")
        lines = list(listening(run_dir)) or [room.Line("listening", "ok", "no process of this run, on this machine")]
        print(json.dumps(room.to_json(lines)) if command.json else room.show(lines))
        return 0
    if command.config is None:
        raise LaunchError("CONFIG is missing: give the TOML file of the run, or --node.")
    if command.measure_s and run_dir is None:
        raise LaunchError("--measure-s needs --run-dir, where the nodes find each other.")
    sections = read_sections(command.config, flags, command.groups, allow_dropped=command.allow_dropped)
    section = sections.fault_tolerance
    plan = room.Plan(
        config=command.config,
        flags=flags,
        fault_tolerance=section,
        snapshot=sections.snapshot,
        groups=section.groups,
        nodes_per_group=command.nodes_per_group,
        run_dir=run_dir,
        ranks_per_group=command.ranks_per_group,
        allow_dropped=command.allow_dropped,
        measure_s=command.measure_s,
        host=section.bind_host or local_host(),
    )
    lines = list(room.examine(plan))
    if run_dir is not None:
        lines += listening(run_dir)
    print(json.dumps(room.to_json(lines)) if command.json else room.show(lines))
    return int(room.broken(lines))


def listening(run_dir: Path) -> Iterator[room.Line]:
    """Every port that a process of the run listens on, on this machine, and what guards it."""
    keepers = [("keeper", place.pid) for place in read_places(run_dir) if place.host == socket.gethostname()]
    for one in listeners.listeners([*listeners.processes(run_dir), *keepers]):
        found = f"{format_address(one.address, one.port)}, {one.role} (pid {one.pid}); guarded by {one.guard}"
        exposed = one.role in listeners.UNGUARDED and not one.local
        advice = "let only the nodes of this job reach it: a firewall, or a private network" if exposed else ""
        yield room.Line("listening", "warning" if exposed else "ok", found, advice)
