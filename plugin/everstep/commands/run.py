"""`everstep run`: one run on this machine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError, default_run_dir


@dataclass(kw_only=True)
class Run:
    """Start a run on this machine: lighthouse, its replica groups, and a view.

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

    page: bool = False
    """Serve report.html while the run goes, on loopback; its address is shown."""

    run_dir: Path | None = None
    """Where everything of the run is kept; an existing one of the same config is continued. Default:
    runs/<config>-<timestamp>."""


def run(command: Run, flags: Sequence[str]) -> int:
    """`everstep run`; returns the exit status."""
    from everstep.launch import supervisor, view
    from everstep.launch.prepare import Order, Prepared, take_answer
    from everstep.report.page import write_report
    from everstep.report.score import plain_summary, summary

    for name, value in (("--groups", command.groups), ("--ranks-per-group", command.ranks_per_group)):
        if value is not None and value < 1:
            raise LaunchError(f"{name} must be at least 1.")
    if command.chaos_every is not None and command.chaos_every <= 0:
        raise LaunchError("--chaos-every must be more than 0 seconds.")
    if not command.config.exists():
        raise LaunchError(f"{command.config}: there is no such file")
    run_dir = command.run_dir or default_run_dir(command.config, time.localtime())
    order = Order(
        config=str(command.config),
        run_dir=str(run_dir),
        groups=command.groups,
        ranks=command.ranks_per_group,
        together=True,
        flags=[*flags, *([] if command.steps is None else ["--training.steps", str(command.steps)])],
    )
    settings = supervisor.RunSettings(order, command.page, command.chaos_every or 0.0)
    status = supervisor.run(settings, view.open_view().show)
    print(f"Everything of this run is in {run_dir}")
    try:
        figures = write_report(run_dir)
    except OSError as error:  # a full disk
        print(f"report.json is not written ({error.strerror}); later: everstep report {run_dir}")
        return status
    found = take_answer(run_dir)
    if isinstance(found, Prepared) and not found.fault_tolerance.enable:
        print(plain_summary(figures, run_dir))
    else:
        print(summary(figures))
        print(f"page      {run_dir / 'report.html'}")
    return status
