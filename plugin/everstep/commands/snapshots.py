"""`everstep snapshots`: what a run holds in host memory."""

import json
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
    """Recompute every checksum and parity, and fetch the newest restorable state as a start would."""

    export: Path | None = None
    """Write the newest state in memory to this folder as a torchtitan checkpoint (DCP), which
    checkpoint.initial_load_path takes. The run may be going on or dead."""

    json: bool = False
    """Print one JSON object, and nothing else, to stdout."""


def snapshots(command: Snapshots, flags: Sequence[str]) -> int:
    """Exit status 0 if the keepers hold a state that can be restored, and with --verify if all of it is sound."""
    if command.sweep:
        from everstep.snapshot.keepers import sweep

        print("\n".join(sweep(command.segment_dir)) or f"{command.segment_dir} holds no snapshots that are nobody's")
        return 0
    if command.run_dir is None:
        raise LaunchError("everstep snapshots: give the run directory, or --sweep.")
    if command.export is not None:
        return _export(command.run_dir, command.export)
    from everstep.snapshot.recovery import InspectError, describe, inspect, to_json

    try:
        found = inspect(command.run_dir, verify=command.verify)
    except InspectError as error:
        raise LaunchError(str(error)) from error
    print(json.dumps(to_json(found)) if command.json else describe(found))
    return 0 if found.sound else 1


def _export(run_dir: Path, folder: Path) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(f"{folder} is there already; --export writes to a new or empty folder.")
    from everstep.snapshot.recovery import InspectError, inspect
    from everstep.titan.export import ExportError, export

    try:
        inspect(run_dir)  # says at once that a directory is no run's, or has no keepers
        found = export(run_dir, folder)
    except (InspectError, ExportError) as error:
        raise LaunchError(str(error)) from error
    print(f"Step {found.step} is in {folder}: --checkpoint.initial_load_path {folder.resolve()} continues from it,")
    print("with --checkpoint.no-initial_load_model_only for optimizer and data position as well.")
    return 0
