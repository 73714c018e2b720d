"""`everstep snapshots`: what a run holds in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError


@dataclass(kw_only=True)
class Snapshots:
    """Show what the keepers of a run hold in memory: steps, groups, sizes, age, checks."""

    run_dir: tyro.conf.Positional[Path | None] = None
    """The run directory."""

    sweep: bool = False
    """Remove the snapshots in this machine's memory that no live run owns, instead of showing those of a run."""

    segment_dir: Path = Path("/dev/shm")
    """Where to sweep: the runs' snapshot.segment_dir."""

    verify: bool = False
    """Fetch, decode and verify the newest restorable state as a start would."""


def snapshots(command: Snapshots, flags: Sequence[str]) -> int:
    """Exit status 0 if the keepers hold a state that can be restored, and with --verify if it is sound."""
    if command.sweep:
        from everstep.snapshot.keepers import sweep

        print("\n".join(sweep(command.segment_dir)) or f"{command.segment_dir} holds no snapshots that are nobody's")
        return 0
    if command.run_dir is None:
        raise LaunchError("everstep snapshots: give the run directory, or --sweep.")
    from everstep.snapshot.recovery import InspectError, describe, inspect

    try:
        found = inspect(command.run_dir, verify=command.verify)
    except InspectError as error:
        raise LaunchError(str(error)) from error
    print(describe(found))
    return 0 if found.sound else 1
