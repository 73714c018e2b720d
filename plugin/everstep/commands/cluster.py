"""The commands of a cluster: `everstep lighthouse`, `submit`, `status` and `stop`."""

import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from everstep.launch import beacon, doctor, slurm
from everstep.launch import status as room
from everstep.launch.prepare import Order, Prepared, prepared, settled
from everstep.run.directory import LaunchError, default_run_dir, leaves_nothing, make_run_dir
from everstep.run.token import own_token, require_own, require_run


@dataclass(kw_only=True)
class Lighthouse:
    """Run a run's lighthouse on this machine until the run is over, and start it again when it dies: what a batch job
    starts. Its address is published in the run directory."""

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    run_dir: Path
    """The run directory, shared by all groups."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    host: str = ""
    """Address to listen on and to tell the groups. Default: the host name."""

    page: bool = False
    """Serve report.html while the run goes, on this machine's loopback."""


@dataclass(kw_only=True)
class Submit:
    """Submit a run to Slurm: an array job with one task per replica group, and a small job for the lighthouse.

    Flags with a section, like --training.steps 1000, are torchtitan's; all others go to sbatch for the groups' job,
    like --partition gpu --gpus-per-node 8 --time 24:00:00.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    nodes_per_group: int = 1
    """Nodes of each group."""

    ranks_per_node: int = 1
    """Ranks (processes, GPUs) on each node."""

    run_dir: Path | None = None
    """On a file system that all nodes share. Default: runs/<config>-<timestamp>."""

    lighthouse_flags: str = ""
    """sbatch flags of the lighthouse's job, as one word with an equals sign, for instance
    --lighthouse-flags="--partition=cpu"."""

    page: bool = False
    """Serve report.html while the run goes, on the loopback of the lighthouse's node; its job's log says where."""

    dry_run: bool = False
    """Print the sbatch commands and do nothing."""


@dataclass(kw_only=True)
class Status:
    """Show where a run is: its step, its groups, its last faults; on Slurm also as Slurm sees them."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""


@dataclass(kw_only=True)
class Stop:
    """Stop a run cleanly: every group finishes its step, one writes the last checkpoint."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""


def lighthouse(command: Lighthouse, flags: Sequence[str]) -> int:
    """Until every group has ended; returns the exit status."""
    run_dir, host = command.run_dir.resolve(), command.host or socket.gethostname()
    found = settled(command.config, run_dir, flags, command.groups, 0)
    return beacon.keep_up(run_dir, host, found, command.page)


def submit(command: Submit, flags: Sequence[str]) -> int:
    """Exit status 0 when both jobs are queued."""
    sbatch_flags, titan_flags = slurm.split_flags(flags)
    if (command.groups or 1) < 1 or command.nodes_per_group < 1 or command.ranks_per_node < 1:
        raise LaunchError("--groups, --nodes-per-group and --ranks-per-node must be at least 1.")
    if not command.dry_run:
        slurm.require("sbatch")
    try:
        lighthouse_flags = shlex.split(command.lighthouse_flags)
    except ValueError as error:
        raise LaunchError(f"--lighthouse-flags: {error}.") from None
    order = Order(
        config=str(command.config),
        flags=titan_flags,
        groups=command.groups,
        ranks=command.ranks_per_node * command.nodes_per_group,
        here=False,
    )
    run_dir = (command.run_dir or default_run_dir(command.config, time.localtime())).resolve()
    found = prepared(order) if command.dry_run else _settle(order, run_dir, command.nodes_per_group)
    submission = slurm.Submission(
        config=command.config.resolve(),
        run_dir=run_dir,
        groups=found.groups,
        nodes_per_group=command.nodes_per_group,
        sbatch_flags=sbatch_flags,
        lighthouse_flags=lighthouse_flags,
        page=command.page,
        ranks_per_node=command.ranks_per_node,
    )
    if command.dry_run:
        print(*map(shlex.join, submission.commands().values()), sep="\n")
    else:
        print(slurm.describe_submission(submission, slurm.submit(submission)))
    return 0


def _settle(order: Order, run_dir: Path, nodes_per_group: int) -> Prepared:
    """Make the run directory, with the config in it. Raises LaunchError."""
    if run_dir.is_dir():
        require_own(run_dir)
    slurm.alive_jobs(run_dir)  # who submits twice is told at once
    with leaves_nothing(run_dir):
        make_run_dir(run_dir)
        found = prepared(replace(order, run_dir=str(run_dir)))
        _look_first(found, nodes_per_group, run_dir)
        own_token(run_dir)
    print(*found.warnings, sep="\n", end="\n" if found.warnings else "", file=sys.stderr)
    return found


def _look_first(found: Prepared, nodes_per_group: int, run_dir: Path) -> None:
    """Say what `everstep doctor` has to say on a login node. Raises LaunchError for what cannot work."""
    lines = [line for line in doctor.examine(found, nodes_per_group, run_dir, host="") if line.verdict != "ok"]
    if doctor.broken(lines):
        raise LaunchError("this run is not submitted:\n" + doctor.show(lines))
    if lines:
        print(doctor.show(lines), file=sys.stderr)


def status(command: Status, flags: Sequence[str]) -> int:
    """Prints the table; returns 0."""
    print(room.status(command.run_dir.resolve()))
    return 0


def stop(command: Stop, flags: Sequence[str]) -> int:
    """Returns at once; the groups stop after their step."""
    require_run(command.run_dir)
    print(slurm.stop(command.run_dir.resolve()))
    return 0
