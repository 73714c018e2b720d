"""A projection y = x Wᵀ + b that checks its three products: y, dX and dW.

Sums of W are kept while the weights do not change. Sums of x, for dW, are computed with the gradient. The products are
those of torch.nn.functional.linear, on the same operands in the same order, so the results have the same bits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .compiled import at_once
from .guard import Guard, look_for_extremes
from .product import TileSums, bias_sums, check_rows, tile_sums


def weight_sums(guard: Guard, name: str, b: torch.Tensor) -> TileSums:
    """Return the TileSums of b, computed once and kept as `name` until the weights change or a check finds an error.
    For y (name `rows`) b is the transposed weight, and tiles are of outputs. For dX (`columns`) b is the weight, and
    tiles are of inputs. If the sums themselves were computed wrong, one slot is refused."""
    key = guard.checks.weights_version, b.dtype, b.device, tuple(b.shape)
    kept = guard.kept.get(name)
    if kept is None or kept[0] != key:
        with torch.no_grad():
            kept = guard.kept[name] = (key, at_once(tile_sums, b)(b))
    return kept[1]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, guard: Guard) -> torch.Tensor:
    """Return `F.linear(x, weight, bias)`, checked forward and backward.

    Args:
        x: (..., in); weight (out, in); bias (out,) or None. All of one dtype, local tensors.
        guard: of this weight. Findings call the results `NAME.y`, `NAME.dx` and `NAME.dw`, NAME being the guard's.
    """
    if guard.runs_unguarded:
        y = F.linear(x, weight, bias)
        guard.checks.look_later(look_for_extremes, (guard, f"{guard.name}.y", y.detach()), y.nbytes)
        return y
    return _Linear.apply(x, weight, bias, guard)


def result_names(name: str) -> tuple[str, str, str]:
    """Return the names of the checked results of a projection called `name`."""
    return f"{name}.y", f"{name}.dx", f"{name}.dw"


def with_products(project: Callable, input_gradient: Callable, weight_gradient: Callable) -> type:
    """Return an autograd function of a projection with these products. Each takes the guard, or its ticket, last."""

    class Projection(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, guard):
            flat = x.reshape(-1, x.shape[-1])
            ctx.save_for_backward(flat, weight)  # `flat`, the operator's input: with x a graph would write it twice
            ctx.guard, ctx.has_bias, ctx.shape = guard, bias is not None, x.shape
            return project(flat, weight, bias, guard).view(*x.shape[:-1], weight.shape[0])

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dy):
            flat, weight = ctx.saved_tensors
            dflat = dy.reshape(-1, dy.shape[-1])
            dx = input_gradient(dflat, weight, ctx.guard).view(ctx.shape) if ctx.needs_input_grad[0] else None
            dw = weight_gradient(dflat, flat, ctx.guard) if ctx.needs_input_grad[1] else None
            db = dflat.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
            return dx, dw, db, None

    return Projection


def _checked_product(
    guard: Guard, name: str, compute: Callable[[], torch.Tensor], operands: Callable[[], tuple], *, backward: bool
) -> torch.Tensor:
    """Return the product that `compute` makes, the guard's result `name`; checked if the layer is, in this slot."""
    section = f"{guard.name}.{name}"
    y = guard.inject(section, compute(), backward=backward)
    if guard.checked:
        return check_rows(guard, section, y, operands, compute, backward=backward)
    if not backward:
        with guard.looking():
            look_for_extremes([(guard, section, y)])
    return y


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, guard: Guard) -> torch.Tensor:
    """Return y (T, out) of x (T, in), checked."""

    def operands() -> tuple:
        return x, weight_sums(guard, "rows", weight.t()), None if bias is None else bias_sums(bias)

    return _checked_product(guard, "y", lambda: F.linear(x, weight, bias), operands, backward=False)


def input_gradient(dy: torch.Tensor, weight: torch.Tensor, guard: Guard) -> torch.Tensor:
    """Return dX (T, in) of dY (T, out), checked."""
    return _checked_product(
        guard, "dx", lambda: dy @ weight, lambda: (dy, weight_sums(guard, "columns", weight)), backward=True
    )


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, guard: Guard) -> torch.Tensor:
    """Return dW (out, in) of dY (T, out) and x (T, in), checked."""
    return _checked_product(guard, "dw", lambda: dy.t() @ x, lambda: (dy.t(), at_once(tile_sums, x)(x)), backward=True)


_Linear = with_products(project, input_gradient, weight_gradient)
