"""Exact sums: sums of gradients that have the same bits in every order of the terms.

A sum of floats depends on the order of its terms, and so on which group computed which slot. Here each slot's gradient
is rounded once, to the nearest multiple of 2^-40 (the quantum), and added up in float64, in which sums of such
multiples are exact below 2^13. An element of 1e-5 keeps all its bits, one of 1e-9 keeps 10, and one below half a
quantum, 4.5e-13, becomes 0, which is little even beside Adam's eps. In a run with S slots per step, a slot's gradient
with an element above the largest power of two up to 2^11 / max(S, 2) counts as not finite (`most_of_slot`).

A sum over slots is kept with an offset of 1.5 * 2^12. Near the offset, the spacing of float64 numbers is the quantum,
so adding rounds to it. A value halfway between two quanta would be rounded to the even sum, which depends on the order.
So each value is first multiplied by a factor that moves it off the middle, away from zero, and changes no other
rounding.
"""

import math

import torch

MOST = 2.0**13
"""Largest absolute value of an element of a sum without the offset: 2^53 quanta."""

OFFSET = 1.5 * 2.0**12
"""Value of a sum over slots to which nothing was added."""

_ROOM = 2.0**11
"""Largest distance of a sum over slots from the offset."""

_OFF_THE_MIDDLE = 1.0 + 2.0**-52

_CHUNK = 1 << 15
"""Elements that are converted to float64 at a time on a CPU, few enough to stay in its cache."""


def most_of_slot(slots: int) -> float:
    """Return the largest element of a slot's gradient with which the sum of all `slots` is exact: a power of two."""
    return min(_ROOM / 2, 2.0 ** math.floor(math.log2(_ROOM / slots)))


def nan_beyond(most: float, extremes: torch.Tensor) -> torch.Tensor:
    """Return NaN if an absolute value in `extremes` is above `most` or NaN, else 0."""
    return torch.where((extremes.abs() <= most).all(), 0.0, torch.nan)


def add(into: torch.Tensor, *values: torch.Tensor, first: bool = False) -> None:
    """Add floats to a sum over slots.

    Args:
        into: the sum with the offset, float64.
        values: bfloat16 or float32, each in the shape of `into`; exact if none has an element above `most_of_slot`.
        first: whether nothing was added yet: what is in `into` is overwritten.
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
    """Round float64 values to multiples of 2^-26. Their sum in float64 has the same bits in every order below 2^27."""
    return (values * 2.0**26).round_() / 2.0**26
