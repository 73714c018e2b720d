"""A projection y = x Wᵀ + b that checks its three products: y, dX and dW.

Sums of W are kept while the weights do not change; those of x, for dW, are made when the gradient is. The
products are the ones torch.nn.functional.linear runs, on the same operands in the same order, so results are
equal to the last bit.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .compiled import at_once
from .guard import Guard
from .product import TileSums, bias_sums, settle_rows, tile_sums


class WeightSums:
    """Sums of one weight (out, in), made once and kept until the weights change, or something is found: `rows` over
    tiles of outputs, for y; `columns` over tiles of inputs, for dX. Sums that were made wrong refuse one slot."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, TileSums]] = {}

    def _get(self, name: str, b: torch.Tensor, version: int) -> TileSums:
        key = (version, b.dtype, b.device, tuple(b.shape))
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            with torch.no_grad():
                kept = self._kept[name] = (key, at_once(tile_sums, b)(b))
        return kept[1]

    def rows(self, weight: torch.Tensor, version: int) -> TileSums:
        """Sums that check y = x Wᵀ. version: of the weights."""
        return self._get("rows", weight.t(), version)

    def columns(self, weight: torch.Tensor, version: int) -> TileSums:
        """Sums that check dX = dY W."""
        return self._get("columns", weight, version)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, guard: Guard, sums: WeightSums
) -> torch.Tensor:
    """`F.linear(x, weight, bias)`, checked forward and backward.

    Args:
        x: (..., in); weight (out, in); bias (out,) or None. All of one dtype, local tensors.
        guard: names the layer and the projection; results are `NAME.y`, `NAME.dx`, `NAME.dw`.
        sums: of this weight.
    """
    if guard.idle:
        y = F.linear(x, weight, bias)
        guard.look_for_extremes(f"{guard.name}.y", y)
        return y
    return _Linear.apply(x, weight, bias, guard, sums)


def result_names(name: str) -> tuple[str, str, str]:
    """The checked results of a projection called `name`."""
    return f"{name}.y", f"{name}.dx", f"{name}.dw"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, guard: Guard, sums: WeightSums):
        ctx.save_for_backward(x, weight)
        ctx.guard, ctx.sums, ctx.has_bias = guard, sums, bias is not None
        y = project(guard, sums, x.reshape(-1, x.shape[-1]), weight, bias)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        guard: Guard = ctx.guard
        flat, dflat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = input_gradient(guard, ctx.sums, dflat, weight) if ctx.needs_input_grad[0] else None
        dw = weight_gradient(guard, dflat, flat) if ctx.needs_input_grad[1] else None
        db = dflat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return None if dx is None else dx.view_as(x), dw, db, None, None


def project(
    guard: Guard, sums: WeightSums, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y (T, out) of x (T, in), checked."""
    section = f"{guard.name}.y"
    y = guard.touch(section, F.linear(x, weight, bias))
    if not guard.checked:
        guard.look_for_extremes(section, y)
        return y
    return settle_rows(
        guard,
        section,
        y,
        lambda: (x, sums.rows(weight, guard.checks.weights_version), None if bias is None else bias_sums(bias)),
        lambda: F.linear(x, weight, bias),
    )


def input_gradient(guard: Guard, sums: WeightSums, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dX (T, in) of dY (T, out), checked."""
    section = f"{guard.name}.dx"
    dx = guard.touch(section, dy @ weight, backward=True)
    if not guard.checked:
        return dx
    return settle_rows(
        guard,
        section,
        dx,
        lambda: (dy, sums.columns(weight, guard.checks.weights_version)),
        lambda: dy @ weight,
        backward=True,
    )


def weight_gradient(guard: Guard, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW (out, in) of dY (T, out) and x (T, in), checked."""
    section = f"{guard.name}.dw"
    dw = guard.touch(section, dy.t() @ x, backward=True)
    if not guard.checked:
        return dw
    return settle_rows(
        guard,
        section,
        dw,
        lambda: (dy.t(), at_once(tile_sums, x)(x)),
        lambda: dy.t() @ x,
        backward=True,
    )
