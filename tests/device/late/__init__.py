"""A stand-in accelerator for tests: "late", a PyTorch device whose work is done late, on a CPU (late.cpp).

`import torch` calls `autoload` through the entry point of tests/device/site. It makes the device, and this module
`torch.late`, if EVERSTEP_TEST_DEVICE is "late" and CUDA_VISIBLE_DEVICES is not empty. Each process writes
races-PID.txt and waits-PID.txt to the folder EVERSTEP_TEST_DEVICE_LOG.
"""

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

NAME = "late"


def autoload() -> None:
    """Make the device, and register it with PyTorch, if this process is to have it."""
    if os.environ.get("EVERSTEP_TEST_DEVICE") == NAME and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        from late import build, hooks

        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # no compiler makes kernels for it
        torch.ops.load_library(build.library())
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, sys.modules[__name__])
        torch.utils.generate_methods_for_privateuse1_backend()
        hooks.install()


@contextlib.contextmanager
def held() -> Iterator[None]:
    """No stream does anything meanwhile."""
    torch.ops.late.hold(True)
    try:
        yield
    finally:
        torch.ops.late.hold(False)


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any):
        return super().__new__(cls, **kwargs) if kwargs else super().__new__(cls, device=NAME, priority=priority)


class Event(torch.Event):
    def __new__(cls, device: Any = None, enable_timing: bool = False, **kwargs: Any):
        return super().__new__(cls, device=NAME, enable_timing=enable_timing)


def is_available() -> bool:
    return True


is_initialized = is_available


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return torch.ops.late.in_copy()


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any = None) -> None:
    pass


synchronize = torch.accelerator.synchronize
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
empty_cache = torch.accelerator.empty_cache


def memory_stats(device: Any = None) -> dict[str, int]:
    return {}


def reset_peak_memory_stats(device: Any = None) -> None:
    pass


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=0, device_type=torch.accelerator.current_stream().device_type)


@contextlib.contextmanager
def stream(which: torch.Stream | None) -> Iterator[None]:
    before = current_stream()
    if which is not None:
        set_stream(which)
    try:
        yield
    finally:
        set_stream(before)


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=NAME, total_memory=16 << 30)


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


manual_seed_all = manual_seed


def default_generator() -> torch.Generator:
    """That operators without one draw from."""
    return torch._C._accelerator_getDefaultGenerator(0)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generator().get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generator().set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float32]
