"""`everstep snapshots`: what a start of a run would restore from host memory."""

from datetime import timedelta
from pathlib import Path

import tyro

from everstep.run.directory import LaunchError
from everstep.run.token import TOKEN_FILE, require_run

TIMEOUT = timedelta(seconds=10)
"""How long to wait for a keeper's answer."""


def snapshots(
    run_dir: tyro.conf.Positional[Path | None] = None, sweep: bool = False, segment_dir: Path = Path("/dev/shm")
) -> int:
    """Show what a start of a run would restore from host memory. Exit status: 0 if it would find a snapshot, else 1.

    Args:
        run_dir: The run directory.
        sweep: Instead, remove the snapshots in this machine's memory that belong to no live run.
        segment_dir: The folder to sweep: snapshot.segment_dir of the runs.
    """
    if sweep:
        from everstep.snapshot import keepers

        if run_dir is not None:
            raise LaunchError("--sweep is for all of this machine's memory: give no run directory with it.")
        if not segment_dir.is_dir():
            raise LaunchError(f"--segment-dir {segment_dir}: there is no such folder.")
        print("\n".join(keepers.sweep(segment_dir)) or f"{segment_dir} holds no snapshots without a live run")
        return 0
    if run_dir is None:
        raise LaunchError("give the run directory, or --sweep.")
    from everstep.snapshot.recovery import ask_keepers

    require_run(run_dir)
    if not (run_dir / TOKEN_FILE).exists():
        raise LaunchError(f"{run_dir / TOKEN_FILE} is missing: without it no snapshot of the run can be found.")
    found = ask_keepers(run_dir, timeout=TIMEOUT, patience=timedelta(0), adopts=True)
    for reason in found.reasons:
        print(f"not restorable: {reason}")
    what = f"restore step {found.step} ({found.source})" if found.from_memory else "find nothing in memory"
    print(f"a start would {what}")
    return 0 if found.from_memory else 1
