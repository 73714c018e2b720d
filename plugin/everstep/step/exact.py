"""Sums that have the same bits in every order: gradients in whole quanta.

A sum of floats depends on its order, and so on who computed what. Here each slot's gradient is rounded once, to the
nearest multiple of 2^-40, and added up in float64, whose sums of such multiples are exact below 2^13. The quantum is a
constant: a slot's element of 1e-5 keeps all its bits, one of 1e-9 keeps 10, and what is below 1e-12 counts for nothing,
as beside Adam's eps. In a run with S slots a step, a slot's gradient with an element above the power of two below
2^11 / S is treated as one that is not finite (`most_of_slot`).

A sum over slots is kept with an offset of 1.5 * 2^12, at which float64 has no finer numbers than the quantum: to add is
to round. What is halfway between two quanta would go to the even sum, which depends on the order. So each value is made
larger by a factor that moves it off the middle, away from zero, and changes no other rounding.
"""

import math

import torch

MOST = 2.0**13
"""Of a sum's elements without the offset: 2^53 quanta."""

OFFSET = 1.5 * 2.0**12
"""Of a sum over slots: what it is when nothing was added."""

_ROOM = 2.0**11
"""How far a sum over slots can go from the offset."""

_OFF_THE_MIDDLE = 1.0 + 2.0**-52

_CHUNK = 1 << 15
"""Elements that a CPU converts to float64 at a time: they stay in its cache."""


def most_of_slot(slots: int) -> float:
    """Up to which element of a slot's gradient the sum of all `slots` is exact: a power of two."""
    return min(_ROOM / 2, 2.0 ** math.floor(math.log2(_ROOM / slots)))


def nan_beyond(most: float, extremes: torch.Tensor) -> torch.Tensor:
    """NaN if one of these numbers is above `most`, or NaN; else 0."""
    return torch.where((extremes.abs() <= most).all(), 0.0, torch.nan)


def add(into: torch.Tensor, *values: torch.Tensor, first: bool = False) -> None:
    """Add floats to a sum over slots.

    Args:
        into: float64, with the offset.
        values: bfloat16 or float32, each in the shape of `into`; exact if none has an element above `most_of_slot`.
        first: nothing was added yet, whatever `into` has.
    """
    pieces = [(into, *values)]
    if into.device.type == "cpu" and all(one.is_contiguous() for one in (into, *values)):
        pieces = list(zip(*(one.view(-1).split(_CHUNK) for one in (into, *values)), strict=True))
    for piece, *parts in pieces:
        if first:
            piece.fill_(OFFSET)
        for part in parts:
            piece.add_(part, alpha=_OFF_THE_MIDDLE)


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Numbers whose sum in float64 has the same bits in every order while it is below 2^27: multiples of 2^-26.

    values: float64.
    """
    return (values * 2.0**26).round_() / 2.0**26
