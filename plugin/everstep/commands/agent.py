"""`everstep agent`: one replica group's workers on one machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError


@dataclass(kw_only=True)
class Agent:
    """Run one replica group's workers on this machine and restart them when they die: what a batch job
    starts.

    Flags that are not listed here are torchtitan's and go to every worker.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    group: int | None = None
    """This group's id, from 0, the same after every restart. In a Slurm array job: the task's index."""

    run_dir: Path
    """The run directory, shared by all groups."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    ranks: int = 1
    """Ranks (processes, GPUs) of the group on this machine."""

    nodes: int = 1
    """Machines of the group; each runs an agent. Slurm says it in its jobs."""

    node_rank: int = 0
    """Which of them this is, from 0. Slurm says it in its jobs."""

    restart: int = 0
    """How often this group was started before: the highest one counts. Slurm says it in its jobs."""

    host: str = ""
    """Address that this group's servers listen on and advertise. Default: the file's fault_tolerance.bind_host, or the
    host name."""


def agent(command: Agent, flags: Sequence[str]) -> int:
    """`everstep agent`; returns the exit status."""
    from everstep.launch.agent import run_agent
    from everstep.launch.prepare import settled
    from everstep.launch.settings import GroupSettings
    from everstep.launch.slurm import allocation
    from everstep.quorum.interface import interface_of

    run_dir = command.run_dir.resolve()
    given = ("group", "restart", "nodes", "node_rank")
    place = allocation() if command.group is None else {name: getattr(command, name) for name in given}
    if not place:
        raise LaunchError("--group is missing: only in a Slurm array job the task's index says it.")
    if command.ranks < 1 or place["group"] < 0 or not 0 <= place["node_rank"] < place["nodes"]:
        raise LaunchError("--ranks and --nodes must be at least 1, --group at least 0, --node-rank below --nodes.")
    prepared = settled(command.config, run_dir, flags, command.groups, command.ranks * place["nodes"])
    section = prepared.fault_tolerance
    return run_agent(
        GroupSettings(
            run_dir=run_dir,
            groups=prepared.groups,
            ranks=command.ranks,
            host=command.host or section.bind_host or interface_of("").address,
            fault_tolerance=section,
            **place,
        )
    )
