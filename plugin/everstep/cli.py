"""The command line: `everstep run | agent | report | pack`.

Nothing heavy is imported before a command needs it: `everstep --help` answers at once.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from everstep.launch.rundir import LaunchError, default_run_dir


@dataclass(kw_only=True)
class Run:
    """Start a run on this machine: lighthouse, one agent per replica group, and a live view.

    Flags that are not listed here are torchtitan's and go to every worker, for instance
    `--training.local_batch_size 2`. Ctrl-C once ends the run cleanly with a final checkpoint, twice at once.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    ranks_per_group: int = 1
    """Ranks (processes, GPUs) in each group."""

    steps: int | None = None
    """Last step; the file's training.steps if not given."""

    chaos_every: float | None = None
    """Kill the workers of a random group every so many seconds."""

    run_dir: Path | None = None
    """Where everything of the run is kept; an existing one of the same config is continued. Default:
    runs/<config>-<timestamp>."""


@dataclass(kw_only=True)
class Agent:
    """Run one replica group's workers on this machine, restarting them when they die. What a batch job
    starts.

    Flags that are not listed here are torchtitan's and go to every worker.
    """

    config: tyro.conf.Positional[Path]
    """The run's TOML file."""

    group: int
    """This group's id, from 0, the same after every restart."""

    run_dir: Path
    """The run directory, shared by all groups."""

    lighthouse: str
    """Address of the lighthouse, http://host:port."""

    groups: int | None = None
    """Number of replica groups; the file's fault_tolerance.groups if not given."""

    ranks: int = 1
    """Ranks (processes, GPUs) of the group on this machine."""

    host: str = ""
    """Address that this group's servers listen on and advertise. Default: the host name's."""

    stop_grace_s: float = 120.0
    """How long workers may take to end cleanly after SIGTERM."""


@dataclass(kw_only=True)
class Report:
    """Compute what a run did from its events: report.json, and a summary."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""

    against: Path | None = None
    """Another run directory to compare losses with."""

    json: bool = False
    """Print report.json and nothing else."""


def _run(command: Run, flags: Sequence[str]) -> int:
    from everstep.launch import supervisor, view
    from everstep.launch.settings import run_settings

    run_dir = command.run_dir or default_run_dir(command.config, time.localtime())
    settings = run_settings(
        command.config,
        run_dir,
        command.groups,
        command.ranks_per_group,
        command.steps,
        command.chaos_every,
        flags,
    )
    with view.open_view(settings) as on_events:
        return supervisor.run(settings, on_events)


def _agent(command: Agent, flags: Sequence[str]) -> int:
    from everstep.launch.agent import AgentSettings, run_agent
    from everstep.launch.rundir import read_toml
    from everstep.launch.settings import fault_tolerance, local_host

    section = fault_tolerance(read_toml(command.config), flags)
    return run_agent(
        AgentSettings(
            config=str(command.config.resolve()),
            run_dir=str(command.run_dir.resolve()),
            group=command.group,
            groups=section.groups if command.groups is None else command.groups,
            ranks=command.ranks,
            lighthouse=command.lighthouse,
            flags=list(flags),
            host=command.host or local_host(),
            stall_timeout_s=section.stall_timeout_s,
            startup_timeout_s=section.startup_timeout_s,
            stop_grace_s=command.stop_grace_s,
            max_restarts=section.max_restarts,
            restart_window_s=section.restart_window_s,
        )
    )


def _report(command: Report, flags: Sequence[str]) -> int:
    _refuse(flags)
    import json

    from everstep.report import score

    if not (command.run_dir / "events").is_dir():
        raise LaunchError(f"{command.run_dir}: no run directory, it has no events folder.")
    result = score.score(command.run_dir, command.against)
    print(json.dumps(result, indent=2))
    return 0


def _refuse(flags: Sequence[str]) -> None:
    if flags:
        raise LaunchError(f"unknown argument: {flags[0]}")


_COMMANDS = {Run: _run, Agent: _agent, Report: _report}
Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Agent, tyro.conf.subcommand("agent")]
    | Annotated[Report, tyro.conf.subcommand("report")]
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `everstep` command; exits with the command's status."""
    args = sys.argv[1:] if argv is None else list(argv)
    command, flags = tyro.cli(
        Command, args=args, prog="everstep", description=__doc__, return_unknown_args=True
    )
    try:
        status = _COMMANDS[type(command)](command, flags)
    except LaunchError as error:
        print(f"everstep: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
