"""torchtitan's entry point, for machines with and without an accelerator: without one, it trains on the CPU.

    torchrun --nproc_per_node 2 -m everstep.train --module everstep --config FILE.toml [--section.key value]

With an accelerator, `-m torchtitan.train` does the same.
"""

import sys

from everstep.run.exits import TrainerEnds, end_at_once
from everstep.titan.imports import import_all


def main() -> None:
    """Train as `torchtitan.train` would, as the command line of this process says."""
    import_all()
    from torchtitan import train

    try:
        train.main()
    except TrainerEnds as end:
        print(f"everstep: {end}", file=sys.stderr)
        end_at_once(end.status)


if __name__ == "__main__":
    main()
