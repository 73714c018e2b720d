"""`everstep snapshots`: what a run has in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError
from everstep.run.token import read_token, require_run

TIMEOUT = timedelta(seconds=10)
"""The longest silence of a keeper."""


@dataclass(kw_only=True)
class Snapshots:
    """Show what a start of a run would restore from memory."""

    run_dir: tyro.conf.Positional[Path | None] = None
    """The run directory."""

    sweep: bool = False
    """Remove the snapshots in this machine's memory that no live run owns, instead."""

    segment_dir: Path = Path("/dev/shm")
    """Where to sweep: the runs' snapshot.segment_dir."""


def snapshots(command: Snapshots, flags: Sequence[str]) -> int:
    """Exit status 0 if there is a state that can be restored."""
    if command.sweep:
        from everstep.snapshot.keepers import sweep

        print("\n".join(sweep(command.segment_dir)) or f"{command.segment_dir} holds no snapshots that are nobody's")
        return 0
    if command.run_dir is None:
        raise LaunchError("everstep snapshots: give the run directory, or --sweep.")
    from everstep.snapshot.recovery import look

    require_run(command.run_dir)
    found = look(command.run_dir, read_token(command.run_dir), timeout=TIMEOUT, patience=timedelta(0))
    for reason in found.reasons:
        print(f"not restorable: {reason}")
    what = f"restore step {found.step} ({found.source})" if found.from_memory else "find nothing in memory"
    print(f"a start would {what}")
    return 0 if found.from_memory else 1
