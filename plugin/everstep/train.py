"""torchtitan's entry point, for machines with and without an accelerator: without one, it trains on the CPU.

    torchrun --nproc_per_node 2 -m everstep.train --module everstep --config FILE.toml [--section.key value]

With an accelerator, `-m torchtitan.train` does the same.
"""

from everstep.titan.imports import import_all


def main() -> None:
    """Train as `torchtitan.train` would, as the command line of this process says."""
    import_all()
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
