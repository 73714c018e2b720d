"""`everstep agent`: run one replica group's workers on one machine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from everstep.run.directory import LaunchError


def agent(
    config: tyro.conf.Positional[Path],
    *,
    run_dir: Path,
    group: int | None = None,
    ranks: int = 1,
    nodes: int = 1,
    node_rank: int = 0,
    restart: int = 0,
    host: str = "",
    flags: Sequence[str] = (),
) -> int:
    """Run one replica group's workers on this machine, and restart them when they die. Batch jobs start this command.

    Flags that are not listed here are torchtitan's and go to every worker.

    Args:
        config: The run's TOML file.
        run_dir: The run directory, shared by all groups.
        group: This group's id, from 0, the same after every restart. Default: the task's index in a Slurm array job.
        ranks: Number of the group's ranks (processes, GPUs) on this machine.
        nodes: Number of machines of the group; each runs an agent. Without --group, Slurm sets it.
        node_rank: Index of this machine among those of the group, from 0. Without --group, Slurm sets it.
        restart: Number of earlier starts of this group; the highest number wins. Without --group, Slurm sets it.
        host: Address of this group's servers. Default: the file's fault_tolerance.bind_host, or this machine's address.
    """
    from everstep.launch.agent import run_agent
    from everstep.launch.prepare import read_or_prepare
    from everstep.launch.settings import GroupSettings
    from everstep.launch.slurm import allocation
    from everstep.quorum.interface import interface_of

    run_dir = run_dir.resolve()
    place: dict[str, Any] = {"group": group, "restart": restart, "nodes": nodes, "node_rank": node_rank}
    if group is None:
        place = allocation()
    if not place:
        raise LaunchError("--group is missing. It can be left out only in a Slurm array job.")
    if ranks < 1 or place["group"] < 0 or not 0 <= place["node_rank"] < place["nodes"]:
        raise LaunchError("--ranks and --nodes must be at least 1, --group at least 0, --node-rank below --nodes.")
    prepared = read_or_prepare(config, run_dir, flags, ranks * place["nodes"])
    section = prepared.fault_tolerance
    return run_agent(
        GroupSettings(
            run_dir=run_dir,
            ranks=ranks,
            host=host or section.bind_host or interface_of("").address,
            fault_tolerance=section,
            **place,
        )
    )
