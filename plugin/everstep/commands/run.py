"""`everstep run`: start a run on this machine."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError, default_run_dir


def run(
    config: tyro.conf.Positional[Path],
    groups: int | None = None,
    ranks_per_group: int = 1,
    steps: int | None = None,
    chaos_every: float | None = None,
    page: bool = False,
    run_dir: Path | None = None,
    flags: Sequence[str] = (),
) -> int:
    """Start a run on this machine: the lighthouse, the replica groups, and a view on this console.

    Flags that are not listed here are torchtitan's and go to every worker, for instance --training.local_batch_size 2.
    The first Ctrl-C ends the run cleanly, with a final checkpoint; the second one ends it at once.

    Args:
        config: The run's TOML file.
        groups: Number of replica groups. Default: fault_tolerance.groups of the file.
        ranks_per_group: Number of ranks (processes, GPUs) in each group.
        steps: Number of the last step. Default: training.steps of the file.
        chaos_every: Kill all workers of a random group every so many seconds.
        page: Serve report.html on loopback while the run goes. The console shows its address.
        run_dir: The run directory, for everything that the run writes. A run of the same config in it is continued.
            Default: runs/<config>-<timestamp>.
    """
    from everstep.chaos.runner import kill_groups
    from everstep.launch import supervisor, view
    from everstep.launch.prepare import PrepareOptions, read_prepared
    from everstep.report.page import write_report
    from everstep.report.score import summary

    for name, value in (("--groups", groups), ("--ranks-per-group", ranks_per_group)):
        if value is not None and value < 1:
            raise LaunchError(f"{name} must be at least 1.")
    if chaos_every is not None and not 0 < chaos_every < math.inf:
        raise LaunchError("--chaos-every must be more than 0 seconds.")
    if not config.exists():
        raise LaunchError(f"{config}: there is no such file.")
    run_dir = run_dir or default_run_dir(config)
    options = PrepareOptions(
        config=str(config),
        run_dir=str(run_dir),
        groups=groups,
        ranks=ranks_per_group,
        together=True,
        flags=[*flags, *([] if steps is None else ["--training.steps", str(steps)])],
    )
    chaos = functools.partial(kill_groups, chaos_every) if chaos_every else None
    status = supervisor.run(options, view.RunState().show, page=page, chaos=chaos)
    print(f"All files of this run are in {run_dir}")
    try:
        figures = write_report(run_dir)
    except OSError as error:  # a full disk
        print(f"report.json could not be written ({error.strerror}). Try again later: everstep report {run_dir}")
        return status
    found = read_prepared(run_dir)
    if found and not found.fault_tolerance.enable:
        print(f"Without fault tolerance only torchtitan's log has the steps: {run_dir}/logs/group-0/rank-0.log")
    else:
        print(summary(figures))
        print(f"page      {run_dir / 'report.html'}")
    return status
