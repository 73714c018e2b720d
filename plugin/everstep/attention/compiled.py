"""Comparisons as one pass over what they compare."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .findings import Deviation


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


@functools.cache
def _worst(compare: Callable[..., Deviation]) -> Callable[..., torch.Tensor]:
    @functools.wraps(compare)
    def worst(*args: Any, **known: Any) -> torch.Tensor:
        return compare(*args, **known).worst()

    return worst


def worst_of(compare: Callable[..., Deviation], like: torch.Tensor, *, in_graph: bool = False) -> Callable[..., Any]:
    """`compare(...).worst()`, compiled on an accelerator, where each operation would be a kernel of its own that reads
    all again, and on a CPU in a compiled model. like: on the device in question."""
    worst = _worst(compare)
    return _compiled(worst) if in_graph or like.device.type not in ("cpu", "meta") else worst
