"""`everstep same`: whether two runs have the same bits, and where they diverge."""

from pathlib import Path

import tyro

from everstep.run.directory import LaunchError
from everstep.run.token import require_run


def same(run_a: tyro.conf.Positional[Path], run_b: tyro.conf.Positional[Path]) -> int:
    """Compare two runs to the bit: losses, gradient norms and checksums by step, and all tensors of the newest
    checkpoint that both have. With [fault_tolerance] exact = true two runs of one config are the same, whatever failed.
    Exit status 0: all that both runs have is the same, and a step is among it.

    Args:
        run_a: A run directory.
        run_b: Another one.
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
