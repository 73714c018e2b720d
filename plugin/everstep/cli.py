"""The command line: `everstep COMMAND …`.

Each command is a dataclass that tyro parses and a function that acts on it. Both are imported when the
command is given, so `everstep --help` answers at once.
"""

import difflib
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import everstep
from everstep.run.directory import LaunchError, default_run_dir


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

    lighthouse: str = ""
    """Address of the lighthouse, http://host:port. Default: as published in the run directory, waited for."""

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
    """Address that this group's servers listen on and advertise. Default: the host name."""

    stop_grace_s: float = 120.0
    """How long workers may take to end cleanly after SIGTERM."""


@dataclass(kw_only=True)
class Report:
    """Compute what a run did from its events: report.json in the run directory, and a summary."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""

    against: Path | None = None
    """Another run directory to compare losses with."""

    html: bool = True
    """Also write report.html, a page for a browser; not with --json."""

    json: bool = False
    """Print report.json and nothing else to stdout."""

    check: bool = False
    """End with status 1 if the run did not keep its promise. The sentences that say how are in the summary; with
    --json they go to stderr."""


def run(command: Run, flags: Sequence[str]) -> int:
    """`everstep run`; returns the exit status."""
    from everstep.launch import supervisor, view
    from everstep.launch.settings import run_settings
    from everstep.report import score

    settings = run_settings(
        command.config,
        command.run_dir or default_run_dir(command.config, time.localtime()),
        command.groups,
        command.ranks_per_group,
        command.steps,
        command.chaos_every,
        flags,
    )
    with view.open_view(settings.groups) as on_events:
        status = supervisor.run(settings, on_events)
    print(f"Everything of this run is in {settings.run_dir}")
    print(score.summary(_score(settings.run_dir, None)))
    return status


def agent(command: Agent, flags: Sequence[str]) -> int:
    """`everstep agent`; returns the exit status."""
    from everstep.launch.agent import AgentSettings, run_agent
    from everstep.launch.settings import fault_tolerance, local_host, read_run_toml
    from everstep.launch.slurm import Allocation

    section = fault_tolerance(read_run_toml(command.config), flags)
    slurm = Allocation.from_environment() if command.group is None else None
    if command.group is None and slurm is None:
        raise LaunchError("--group is missing: only in a Slurm array job the task's index says it.")
    place = slurm or Allocation(
        group=command.group or 0,
        job=0,
        restart=command.restart,
        nodes=command.nodes,
        node_rank=command.node_rank,
        node="",
    )
    return run_agent(
        AgentSettings(
            config=str(command.config.resolve()),
            run_dir=str(command.run_dir.resolve()),
            group=place.group,
            job=place.job,
            restart=place.restart,
            nodes=place.nodes,
            node_rank=place.node_rank,
            node=place.node,
            node_failures=section.node_failures,
            groups=section.groups if command.groups is None else command.groups,
            ranks=command.ranks,
            lighthouse=command.lighthouse,
            flags=list(flags),
            host=command.host or local_host(),
            stall_timeout_s=section.stall_timeout_s,
            startup_timeout_s=section.startup_timeout_s,
            stop_grace_s=command.stop_grace_s,
            beats=section.enable,
            max_restarts=section.max_restarts,
            restart_window_s=section.restart_window_s,
        )
    )


def report(command: Report, flags: Sequence[str]) -> int:
    """`everstep report`; returns the exit status."""
    _refuse(flags)
    from everstep.report import score

    figures = _score(command.run_dir, command.against)
    broken = score.verdict(figures) if command.check else []
    if command.json:
        print(json.dumps(figures, indent=2))
        print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    else:
        print(score.summary(figures))
        if command.html:
            from everstep.report.page import write_page

            print(f"page      {write_page(command.run_dir, command.against)}")
    return int(bool(broken))


def _score(run_dir: Path, against: Path | None) -> dict[str, Any]:
    """The figures of a run, also written to report.json. Raises LaunchError for a directory without events."""
    from everstep.report import score

    try:
        figures = score.score(run_dir, against)
    except FileNotFoundError as error:
        raise LaunchError(str(error)) from None
    draft = run_dir / "report.json.tmp"
    draft.write_text(json.dumps(figures, indent=2) + "\n")
    draft.replace(run_dir / "report.json")
    return figures


def pack(command: object, flags: Sequence[str]) -> int:
    """`everstep pack`; returns the exit status."""
    from everstep.data import pack as room

    _refuse(flags)
    assert isinstance(command, room.Pack)
    return room.run(command)


def _refuse(flags: Sequence[str]) -> None:
    if flags:
        raise LaunchError(f"unknown argument {flags[0]}; see --help.")


@dataclass(kw_only=True)
class Snapshots:
    """Show what the keepers of a run hold in memory: steps, groups, sizes, age, checks."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""

    verify: bool = False
    """Recompute every checksum and parity, and fetch the newest restorable state as a start would."""

    export: Path | None = None
    """Write the newest state in memory to this folder as a torchtitan checkpoint (DCP), which
    checkpoint.initial_load_path takes. The run may be going on or dead."""

    json: bool = False
    """Print one JSON object, and nothing else, to stdout."""


def snapshots(command: Snapshots, flags: Sequence[str]) -> int:
    """Exit status 0 if the keepers hold a state that can be restored, and with --verify if all of it is sound."""
    _refuse(flags)
    if command.export is not None:
        return _export(command.run_dir, command.export)
    from everstep.snapshot.inspect import InspectError, describe, inspect, sound, to_json

    try:
        found = inspect(command.run_dir, verify=command.verify)
    except InspectError as error:
        raise LaunchError(str(error)) from error
    print(json.dumps(to_json(found)) if command.json else describe(found))
    return 0 if sound(found) else 1


def _export(run_dir: Path, folder: Path) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(f"{folder} is there already; --export writes to a new or empty folder.")
    from everstep.snapshot.inspect import InspectError, inspect
    from everstep.titan.export import ExportError, export

    try:
        inspect(run_dir)  # says at once that a directory is no run's, or has no keepers
        found = export(run_dir, folder)
    except (InspectError, ExportError) as error:
        raise LaunchError(str(error)) from error
    print(f"Step {found.step} is in {folder}: --checkpoint.initial_load_path {folder.resolve()} continues from it,")
    print("with --checkpoint.no-initial_load_model_only for optimizer and data position as well.")
    return 0


COMMANDS = {
    "run": ("start a run on this machine", "everstep.cli:Run", "everstep.cli:run"),
    "doctor": (
        "look whether a config can run here",
        "everstep.commands.doctor:Doctor",
        "everstep.commands.doctor:doctor",
    ),
    "submit": ("start a run on a Slurm cluster", "everstep.launch.cluster:Submit", "everstep.launch.cluster:submit"),
    "status": ("show a run on Slurm", "everstep.launch.cluster:Status", "everstep.launch.cluster:status"),
    "stop": ("stop a run cleanly", "everstep.launch.cluster:Stop", "everstep.launch.cluster:stop"),
    "chaos": ("break a running run", "everstep.chaos.command:Chaos", "everstep.chaos.command:chaos"),
    "report": ("compute what a run did from its events", "everstep.cli:Report", "everstep.cli:report"),
    "snapshots": ("show what a run holds in host memory", "everstep.cli:Snapshots", "everstep.cli:snapshots"),
    "pack": ("make a token file from text", "everstep.data.pack:Pack", "everstep.cli:pack"),
    "agent": ("run one replica group's workers; what a batch job starts", "everstep.cli:Agent", "everstep.cli:agent"),
    "lighthouse": (
        "run a run's lighthouse; what a batch job starts",
        "everstep.launch.cluster:Lighthouse",
        "everstep.launch.cluster:run_lighthouse",
    ),
}
"""By name: what it does, where the dataclass of its arguments is, and where the function that acts on them and on the
arguments that the dataclass does not know.
"""


def _usage() -> str:
    lines = [f"  {name:<10} {what}" for name, (what, _, _) in COMMANDS.items()]
    return "\n".join(["usage: everstep COMMAND [arguments]", "", *lines, "", "everstep COMMAND --help tells more."])


def _dispatch(args: Sequence[str]) -> int:
    name = args[0] if args else ""
    if name in ("", "-h", "--help"):
        print(f"Everstep {everstep.__version__}: pretraining with torchtitan that nothing stops.\n\n{_usage()}")
        return 0 if name else 2
    if name == "--version":
        print(everstep.__version__)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1, cutoff=0.0)[0]
        raise LaunchError(f"no command {name}, did you mean {near}?\n\n{_usage()}")
    _, arguments, act = COMMANDS[name]
    command, flags = tyro.cli(
        _named(arguments),
        args=args[1:],
        prog=f"everstep {name}",
        return_unknown_args=True,
    )
    return _named(act)(command, flags)


def _named(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `everstep` command; exits with the command's status."""
    try:
        status = _dispatch(sys.argv[1:] if argv is None else argv)
    except LaunchError as error:
        print(f"everstep: {error}", file=sys.stderr)
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
