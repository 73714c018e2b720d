"""A projection y = x Wᵀ + b that checks its three products: y, dX and dW.

Sums of W are kept while the weights do not change; those of x, for dW, are made when the gradient is. The
products are the ones torch.nn.functional.linear runs, on the same operands in the same order, so results are
equal to the last bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .findings import Deviation
from .guard import Guard
from .product import TileSums, bias_sums, row_deviation, settle_rows, tile_sums


class WeightSums:
    """Sums of one weight (out, in), kept until the weights change: `rows` over tiles of outputs, for y;
    `columns` over tiles of inputs, for dX.

    They are believed for a whole step, so they are made twice, with a third to decide, and kept twice. Where a check
    fails, what the two copies disagree in is made anew (`renew`). Weights that changed in memory leave both copies as
    they are, and the check goes on failing.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, TileSums, TileSums]] = {}
        self._doubts = 0

    def _get(self, name: str, b: torch.Tensor, version: int, doubts: int) -> TileSums:
        key = (version, b.dtype, b.device, tuple(b.shape))
        kept = self._kept.get(name)
        with torch.no_grad():
            if kept is None or kept[0] != key:
                kept = self._kept[name] = (key, *_made_twice(b))
            elif doubts != self._doubts:
                settled = _voted(kept[1], kept[2], b)
                kept = self._kept[name] = (key, settled, _copy(settled))
        self._doubts = doubts
        return kept[1]

    def rows(self, weight: torch.Tensor, version: int, doubts: int = 0) -> TileSums:
        """Sums that check y = x Wᵀ. version: of the weights. doubts: changes when a check failed."""
        return self._get("rows", weight.t(), version, doubts)

    def columns(self, weight: torch.Tensor, version: int, doubts: int = 0) -> TileSums:
        """Sums that check dX = dY W."""
        return self._get("columns", weight, version, doubts)

    def renew(self) -> None:
        """Have what is kept compared with its copy before it is used again."""
        self._doubts -= 1


def _made_twice(b: torch.Tensor) -> tuple[TileSums, TileSums]:
    """Two copies of TileSums of b that agree."""
    settled = _voted(tile_sums(b), tile_sums(b), b)
    return settled, _copy(settled)


def _voted(once: TileSums, again: TileSums, b: torch.Tensor) -> TileSums:
    """What two copies agree in, and the rest made anew. A CPU looks whether there is a rest."""
    if b.device.type == "cpu" and all(torch.equal(x, y) for x, y in zip(once, again, strict=True)):
        return once
    anew = tile_sums(b)
    return TileSums(*(torch.where(x == y, x, z) for x, y, z in zip(once, again, anew, strict=True)))


def _copy(sums: TileSums) -> TileSums:
    return TileSums(*(x.clone() for x in sums))


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
        return F.linear(x, weight, bias)
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


def _sums_of(guard: Guard, b: torch.Tensor, kept: Callable[[int, int], TileSums]) -> Callable[[], TileSums]:
    """Where sums of b come from: kept ones, by version and doubts, or in a recorded graph new ones, since its replays
    are of other steps, and FSDP's whole weights are there in the graph alone."""
    if guard.recorded:
        made = tile_sums(b)
        return lambda: made
    return lambda: kept(guard.weights_version, guard.doubts)


def project(
    guard: Guard, sums: WeightSums, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y (T, out) of x (T, in), checked."""
    section = f"{guard.name}.y"
    y = guard.touch(section, F.linear(x, weight, bias))
    flops, cost = 2.0 * y.numel() * x.shape[1], float(x.numel() + 2 * y.numel())
    if not guard.checking(section, flops=flops, cost=cost):
        return y
    of_weight = _sums_of(guard, weight.t(), partial(sums.rows, weight))

    def check(part: torch.Tensor, rows: torch.Tensor | None) -> Deviation:
        of_bias = None if bias is None else bias_sums(bias)
        return row_deviation(part, x if rows is None else x[rows], of_weight(), of_bias)

    return settle_rows(
        guard,
        section,
        y,
        check,
        lambda rows: F.linear(x if rows is None else x[rows], weight, bias),
        renew=sums.renew,
    )


def input_gradient(guard: Guard, sums: WeightSums, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """dX (T, in) of dY (T, out), checked."""
    section = f"{guard.name}.dx"
    dx = guard.touch(section, dy @ weight, backward=True)
    flops, cost = 2.0 * dy.numel() * weight.shape[1], float(dy.numel() + 2 * dx.numel())
    if not guard.checking(section, flops=flops, cost=cost, backward=True):
        return dx
    of_weight = _sums_of(guard, weight, partial(sums.columns, weight))

    def check(part: torch.Tensor, rows: torch.Tensor | None) -> Deviation:
        return row_deviation(part, dy if rows is None else dy[rows], of_weight())

    return settle_rows(
        guard,
        section,
        dx,
        check,
        lambda rows: (dy if rows is None else dy[rows]) @ weight,
        renew=sums.renew,
        backward=True,
    )


def weight_gradient(guard: Guard, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW (out, in) of dY (T, out) and x (T, in), checked."""
    section = f"{guard.name}.dw"
    dw = guard.touch(section, dy.t() @ x, backward=True)
    flops, cost = 2.0 * dy.numel() * x.shape[1], float(dy.numel() + x.numel() + 2 * dw.numel())
    if not guard.checking(section, flops=flops, cost=cost, backward=True):
        return dw
    kept: list[TileSums] = []

    def check(part: torch.Tensor, rows: torch.Tensor | None) -> Deviation:
        if not kept:
            kept.append(tile_sums(x))
        return row_deviation(part, dy.t() if rows is None else dy[:, rows].t(), kept[0])

    return settle_rows(
        guard,
        section,
        dw,
        check,
        lambda rows: (dy if rows is None else dy[:, rows]).t() @ x,
        renew=kept.clear,
        backward=True,
    )
