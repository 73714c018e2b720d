"""What other packages are told of the device, when they are imported."""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def _plain_random_numbers(module: ModuleType) -> None:
    """The device's generator counts nothing, so DTensor cannot split its numbers among ranks; as on a CPU."""
    supported = module.is_rng_supported_mesh
    module.is_rng_supported_mesh = lambda mesh: mesh.device_type != "late" and supported(mesh)


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.tensor._random": _plain_random_numbers,
    "torch.distributed.distributed_c10d": lambda module: importlib.import_module("late.collectives").register(),
    "everstep.quorum.communicator": lambda module: importlib.import_module("late.column").replace(module),
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        hook = HOOKS.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            hook(module)

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    for name in list(HOOKS):
        if name in sys.modules:
            HOOKS.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
