"""torchtitan's entry point, for machines with and without an accelerator: without one, it trains on the CPU.

    torchrun --nproc_per_node 2 -m everstep.train --module everstep --config FILE.toml [--section.key value]

With an accelerator, `-m torchtitan.train` does the same.
"""

import sys

from everstep.titan.imports import import_all


def main(argv: list[str] | None = None) -> None:
    """Train as `torchtitan.train` would.

    Args:
        argv: command line in torchtitan's grammar, without the program's name; if None, that of the process.
    """
    import_all()
    if argv is not None:
        sys.argv = ["everstep.train", *argv]
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
