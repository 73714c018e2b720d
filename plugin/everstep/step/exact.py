"""Sums that have the same bits in every order: gradients in whole quanta.

A sum of floats depends on its order, and so on who computed what. Here each slot's gradient is rounded once, to the
nearest multiple of 2^-40, and added up in float64, whose sums of such multiples are exact below 2^13. The quantum is a
constant: a slot's element of 1e-5 keeps all its bits, one of 1e-9 keeps 10, and what is below 1e-12 counts for nothing,
as beside Adam's eps. In a run with S slots a step, a slot's gradient with an element above the power of two below
2^13 / S is treated as one that is not finite (`most_of_slot`).
"""

import math

import torch

MOST = 2.0**13
"""Of a sum's elements: 2^53 quanta."""

_ROUNDS = 1.5 * 2.0**12
"""In float64, what is added to it and taken away again has been rounded to a quantum, up to 2^11."""

_CHUNK = 1 << 14
"""Elements that a CPU rounds at a time: they stay in its cache."""


def most_of_slot(slots: int) -> float:
    """Up to which element of a slot's gradient the sum of all `slots` is exact: a power of two."""
    return min(2.0**11, 2.0 ** math.floor(math.log2(MOST / slots)))


def add(into: torch.Tensor, values: torch.Tensor, most: float) -> None:
    """Add floats to a sum of multiples of the quantum; if one is above `most` or NaN, the sum becomes NaN.

    Args:
        into: float64.
        values: bfloat16 or float32, in the shape of `into`.
    """
    if not values.numel():
        return
    within = (torch.stack(torch.aminmax(values)).abs() <= most).all()
    into[(0,) * into.dim()].add_(torch.where(within, 0.0, torch.nan))
    if values.device.type != "cpu" or not (into.is_contiguous() and values.is_contiguous()):
        into.add_(values.double().add_(_ROUNDS).sub_(_ROUNDS))
        return
    for piece, part in zip(into.view(-1).split(_CHUNK), values.view(-1).split(_CHUNK), strict=True):
        piece.add_(part.double().add_(_ROUNDS).sub_(_ROUNDS))


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Numbers whose sum in float64 has the same bits in every order while it is below 2^27: multiples of 2^-26.

    values: float64.
    """
    return (values * 2.0**26).round_() / 2.0**26
