"""How torchtitan is imported: by a launcher, by a trainer that torchrun starts, and by who reads a config."""

import gc
import importlib
from collections.abc import Callable, Sequence

TORCHTITAN = ("torchtitan.train", "everstep.titan.load", "everstep.titan.trainer")
"""What every trainer uses."""


def import_all(modules: Sequence[str] = TORCHTITAN, stopping: Callable[[], bool] = lambda: False) -> None:
    """Import `modules`, until `stopping`, and stand in for the accelerator if torchtitan is one of them and there is
    none: it asks for its device while it is imported. Raises a module's own error if it cannot be imported."""
    # Objects of thousands of modules, all of which stay: looking through them again and again is a quarter of the time.
    gc.disable()
    try:
        if any(module.startswith("torchtitan") for module in modules):
            from everstep.titan import cpu

            if not cpu.has_accelerator():
                cpu.stand_in()
        for module in modules:
            if stopping():
                return
            importlib.import_module(module)
        gc.freeze()  # nor should a forked process look at them, and so copy their pages
    finally:
        gc.enable()
