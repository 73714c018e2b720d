"""Comparisons as one pass over what they compare."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .findings import Deviation

SHAPES = 64
"""Of the operands of one function: a projection has up to four. Beyond so many it would run operation by operation."""


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[str, Any] = {"recompile_limit": SHAPES, "isolate_recompiles": True}
    return torch.compile(function, dynamic=False, **known)


@functools.cache
def _worst(compare: Callable[..., Deviation]) -> Callable[..., torch.Tensor]:
    @functools.wraps(compare)
    def worst(*args: Any, **known: Any) -> torch.Tensor:
        return compare(*args, **known).worst()

    return worst


def at_once(function: Callable[..., Any], like: torch.Tensor, *, in_graph: bool = False) -> Callable[..., Any]:
    """`function`, compiled on an accelerator, where each operation would be a kernel of its own that reads all again,
    and on a CPU in a compiled model. like: on the device in question."""
    return _compiled(function) if in_graph or like.device.type not in ("cpu", "meta") else function


def worst_of(compare: Callable[..., Deviation], like: torch.Tensor, *, in_graph: bool = False) -> Callable[..., Any]:
    """`compare(...).worst()`, as one pass; see `at_once`."""
    return at_once(_worst(compare), like, in_graph=in_graph)
