"""A projection y = x Wᵀ + b that checks its three products: y, dX and dW.

Sums of W are kept while the weights do not change; those of x, for dW, are made when the gradient is. The
products are the ones torch.nn.functional.linear runs, on the same operands in the same order, so results are
equal to the last bit.
"""

from typing import Any

import torch
import torch.nn.functional as F

from .guard import Guard
from .product import TileSums, bias_sums, row_deviation, settle_rows, tile_sums, unseen_by_checkpointing


class WeightSums:
    """Sums of one weight (out, in), kept until the weights change: `rows` over tiles of outputs, for y;
    `columns` over tiles of inputs, for dX."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, TileSums]] = {}

    def _get(self, name: str, b: torch.Tensor, version: int) -> TileSums:
        key = (version, b.dtype, b.device, tuple(b.shape))
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            with torch.no_grad():
                kept = self._kept[name] = (key, tile_sums(b))
        return kept[1]

    def rows(self, weight: torch.Tensor, version: int) -> TileSums:
        """Sums that check y = x Wᵀ."""
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
    return _Linear.apply(x, weight, bias, guard, sums)


def result_names(name: str) -> tuple[str, str, str]:
    """The checked results of a projection called `name`."""
    return f"{name}.y", f"{name}.dx", f"{name}.dw"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, guard: Guard, sums: WeightSums):
        ctx.save_for_backward(x, weight)
        ctx.guard, ctx.sums, ctx.has_bias = guard, sums, bias is not None
        section = f"{guard.name}.y"
        flat = x.reshape(-1, x.shape[-1])
        y = F.linear(flat, weight, bias)
        y = guard.touch(section, y)
        flops, cost = 2.0 * y.numel() * flat.shape[1], float(flat.numel() + 2 * y.numel())
        if guard.checking(section, flops=flops, cost=cost):
            with unseen_by_checkpointing():
                kept = sums.rows(weight, guard.weights_version)
                of_bias = None if bias is None else bias_sums(bias)
            y = settle_rows(
                guard,
                section,
                y,
                lambda part, rows: row_deviation(part, flat if rows is None else flat[rows], kept, of_bias),
                lambda rows: F.linear(flat if rows is None else flat[rows], weight, bias),
            )
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        guard: Guard = ctx.guard
        flat, dflat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = _input_gradient(guard, ctx.sums, dflat, weight) if ctx.needs_input_grad[0] else None
        dw = _weight_gradient(guard, dflat, flat) if ctx.needs_input_grad[1] else None
        db = dflat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return None if dx is None else dx.view_as(x), dw, db, None, None


def _input_gradient(guard: Guard, sums: WeightSums, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    section = f"{guard.name}.dx"
    dx = guard.touch(section, dy @ weight, backward=True)
    flops, cost = 2.0 * dy.numel() * weight.shape[1], float(dy.numel() + 2 * dx.numel())
    if not guard.checking(section, flops=flops, cost=cost, backward=True):
        return dx
    kept = sums.columns(weight, guard.weights_version)
    return settle_rows(
        guard,
        section,
        dx,
        lambda part, rows: row_deviation(part, dy if rows is None else dy[rows], kept),
        lambda rows: (dy if rows is None else dy[rows]) @ weight,
        backward=True,
    )


def _weight_gradient(guard: Guard, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    section = f"{guard.name}.dw"
    dw = guard.touch(section, dy.t() @ x, backward=True)
    flops, cost = 2.0 * dy.numel() * x.shape[1], float(dy.numel() + x.numel() + 2 * dw.numel())
    if not guard.checking(section, flops=flops, cost=cost, backward=True):
        return dw
    kept = tile_sums(x)
    return settle_rows(
        guard,
        section,
        dw,
        lambda part, rows: row_deviation(part, dy.t() if rows is None else dy[:, rows].t(), kept),
        lambda rows: (dy if rows is None else dy[:, rows]).t() @ x,
        backward=True,
    )
