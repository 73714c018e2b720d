"""`everstep same`: whether two runs have the same bits, and where they differ first."""

from pathlib import Path

import tyro

from everstep.run.directory import LaunchError
from everstep.run.token import require_run


def same(run_a: tyro.conf.Positional[Path], run_b: tyro.conf.Positional[Path]) -> int:
    """Compare two runs bit by bit: the losses, gradient norms and checksums of each step, and all tensors of the newest
    checkpoint that both have. With [fault_tolerance] exact = true two runs of one config have the same bits, whatever
    failed. Exit status: 0 if they have a step in common and all that both have is the same, else 1.

    Args:
        run_a: The directory of a run.
        run_b: The directory of the other run.
    """
    from everstep.titan.same import compare

    for run_dir in (run_a, run_b):
        require_run(run_dir)
    try:
        found = compare(run_a, run_b)
    except (OSError, ValueError) as error:
        raise LaunchError(str(error)) from None
    print(f"steps      {found.steps} in both runs, {found.checksums} with a checksum of the parameters")
    if found.steps or found.diverged:
        print(f"           they diverge at {found.diverged}" if found.diverged else "           the same bits")
    if found.checkpoint:
        print(f"checkpoint after step {found.checkpoint}, {found.tensors} tensors compared")
        print(f"           {found.differing or 'the same bits'}")
    else:
        print("checkpoint none of a step that both runs have")
    return 0 if found.same else 1
