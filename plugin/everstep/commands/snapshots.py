"""`everstep snapshots`: what a run has in host memory."""

from datetime import timedelta
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError
from everstep.run.token import read_token, require_run

TIMEOUT = timedelta(seconds=10)
"""The longest silence of a keeper."""


def snapshots(
    run_dir: tyro.conf.Positional[Path | None] = None, sweep: bool = False, segment_dir: Path = Path("/dev/shm")
) -> int:
    """Show what a start of a run would restore from memory. Exit status 0: there is a state that can be restored.

    Args:
        run_dir: The run directory.
        sweep: Remove the snapshots in this machine's memory that no live run owns, instead.
        segment_dir: Where to sweep: the runs' snapshot.segment_dir.
    """
    if sweep:
        from everstep.snapshot import keepers

        print("\n".join(keepers.sweep(segment_dir)) or f"{segment_dir} holds no snapshots that are nobody's")
        return 0
    if run_dir is None:
        raise LaunchError("everstep snapshots: give the run directory, or --sweep.")
    from everstep.snapshot.recovery import look

    require_run(run_dir)
    found = look(run_dir, read_token(run_dir), timeout=TIMEOUT, patience=timedelta(0))
    for reason in found.reasons:
        print(f"not restorable: {reason}")
    what = f"restore step {found.step} ({found.source})" if found.from_memory else "find nothing in memory"
    print(f"a start would {what}")
    return 0 if found.from_memory else 1
