"""`everstep doctor`: will this config run here?"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from everstep.launch import doctor as room
from everstep.launch.prepare import Line, Order, prepared
from everstep.quorum.interface import interface_of
from everstep.run.directory import LaunchError


@dataclass(kw_only=True)
class Doctor:
    """Look whether a config can run on this machine and survive what it should. Every line says ok, warning or error,
    and what to do. On a cluster run it on each node: srun everstep doctor CONFIG.toml --run-dir DIR.

    Flags that are not listed here are torchtitan's.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    nodes_per_group: int = 1
    """Nodes of each group."""

    ranks_per_group: int = 1
    """Ranks (processes, GPUs) in each group."""

    run_dir: Path | None = None
    """The run directory that the nodes will share: whether it can be written, and is nobody else's."""

    json: bool = False
    """Print one JSON object, and nothing else, to stdout."""


def doctor(command: Doctor, flags: Sequence[str]) -> int:
    """Exit status 1 if anything is an error."""
    run_dir = None if command.run_dir is None else command.run_dir.resolve()
    order = Order(
        config=str(command.config),
        flags=list(flags),
        groups=command.groups,
        ranks=command.ranks_per_group,
        # Unless a batch system spreads the groups, or one takes several nodes.
        together=command.nodes_per_group == 1 and "SLURM_JOB_ID" not in os.environ,
        model=True,
    )
    try:
        found = prepared(order)
    except LaunchError as error:
        lines = [Line("config", "error", str(error), "change the file, or the flag")]
    else:
        host = found.fault_tolerance.bind_host or interface_of("").address
        lines = list(room.examine(found, command.nodes_per_group, run_dir, host))
    print(json.dumps(room.to_json(lines)) if command.json else room.show(lines))
    return int(room.broken(lines))
