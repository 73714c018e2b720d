"""`everstep doctor`: will this config run here?"""

import os
from collections.abc import Sequence
from json import dumps
from pathlib import Path

import tyro

from everstep.launch import doctor as room
from everstep.launch.prepare import Line, Order, prepared
from everstep.quorum.interface import interface_of
from everstep.run.directory import LaunchError


def doctor(
    config: tyro.conf.Positional[Path],
    groups: int | None = None,
    nodes_per_group: int = 1,
    ranks_per_group: int = 1,
    run_dir: Path | None = None,
    json: bool = False,
    flags: Sequence[str] = (),
) -> int:
    """Look whether a config can run on this machine and survive what it should. Every line says ok, warning or error,
    and what to do. On a cluster run it on each node: srun everstep doctor CONFIG.toml --run-dir DIR.

    Flags that are not listed here are torchtitan's. Exit status 1: something is an error.

    Args:
        config: The run's TOML file.
        groups: Number of replica groups; the file's fault_tolerance.groups if not given.
        nodes_per_group: Nodes of each group.
        ranks_per_group: Ranks (processes, GPUs) in each group.
        run_dir: The run directory that the nodes will share: whether it can be written, and is nobody else's.
        json: Print one JSON object, and nothing else, to stdout.
    """
    run_dir = None if run_dir is None else run_dir.resolve()
    order = Order(
        config=str(config),
        flags=list(flags),
        groups=groups,
        ranks=ranks_per_group,
        # Unless a batch system spreads the groups, or one takes several nodes.
        together=nodes_per_group == 1 and "SLURM_JOB_ID" not in os.environ,
        model=True,
    )
    try:
        found = prepared(order)
    except LaunchError as error:
        lines = [Line("config", "error", str(error), "change the file, or the flag")]
    else:
        host = found.fault_tolerance.bind_host or interface_of("").address
        lines = list(room.examine(found, nodes_per_group, run_dir, host))
    print(dumps(room.to_json(lines)) if json else room.show(lines))
    return int(room.broken(lines))
