"""Imports torchtitan, for launchers, for trainers that torchrun starts, and for commands that read a config."""

import gc
import importlib
from collections.abc import Callable, Sequence

TORCHTITAN = ("torchtitan.train", "everstep.titan.load", "everstep.titan.trainer")
"""The modules that every trainer uses."""


def import_all(modules: Sequence[str] = TORCHTITAN, stopping: Callable[[], bool] = lambda: False) -> None:
    """Import `modules` in order; stop early once `stopping` returns True. If torchtitan is among them and there is no
    accelerator, install the CPU stand-in (`titan.cpu`) first, as torchtitan chooses its device while it is imported.
    Raises a module's own error if it cannot be imported."""
    # A quarter of the import time would go into collections, which free none of the modules' objects.
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
        gc.freeze()  # a collection in a forked process would write to these objects' pages, and so copy them
    finally:
        gc.enable()
