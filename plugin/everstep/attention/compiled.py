"""Compiles a comparison into one pass over the tensors that it compares."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from .findings import Deviation

SHAPES = 64
"""The most sets of operand shapes for which one function is compiled. With others it runs operation by operation."""


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
    """Return `function`, compiled if it runs on an accelerator, where each operation would be a kernel that reads its
    operands again, or `in_graph`, i.e. in a compiled model. like: a tensor on the device in question."""
    return _compiled(function) if in_graph or like.device.type not in ("cpu", "meta") else function


def worst_of(compare: Callable[..., Deviation], like: torch.Tensor, *, in_graph: bool = False) -> Callable[..., Any]:
    """Return `compare(...).worst()` as one function; see `at_once`."""
    return at_once(_worst(compare), like, in_graph=in_graph)
