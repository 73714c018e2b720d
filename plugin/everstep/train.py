"""torchtitan's entry point, and on a machine without an accelerator the CPU stand-in before it.

    torchrun --nproc_per_node 2 -m everstep.train --module everstep --config FILE.toml [--section.key value]

With an accelerator this is `python -m torchtitan.train`, which may be used just as well.
"""

import sys

from everstep.titan.imports import import_all


def main(argv: list[str] | None = None) -> None:
    """Train as `torchtitan.train` would.

    Args:
        argv: command line without the program's name, torchtitan's grammar; the process's own if None.
    """
    import_all()
    if argv is not None:
        sys.argv = ["everstep.train", *argv]
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
