"""Checks a matrix product, and repairs it if it is wrong.

There are two kinds of repair. Scores, context and their gradients are large, live for one block only, and are kept in
the accumulator's precision: there the checksums rebuild the wrong element (`check_product`). Projections are stored
rounded, often to bf16, so a rebuilt element would carry the rounding of a whole tile. They are computed again from
their inputs, which is exact (`check_rows`).

A fault that hit several elements may leave some of them within the bounds. Sums that cannot see all of the damage
cannot prove that it is repaired. The product is then computed again as a whole, or the slot is refused.

`check_product` waits for its verdict. `check_rows` does so on a CPU only. On an accelerator nothing waits for the
verdict, and a wrong result refuses the slot.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .checksums import Direction, Sums, correct_both, weights
from .compiled import worst_of
from .findings import Deviation
from .guard import EXTREME, Guard
from .private import unseen_by_checkpointing
from .roundoff import (
    accumulator,
    growth,
    norms,
    operand_roundoff,
    store_roundoff,
    tile_energies,
    tile_magnitudes,
    tile_totals,
    tile_width,
    tiles,
    underflow,
    vanishing,
)

PROBES = 16
"""Number of sums of a row, each under other signs, from which an accelerator estimates the row's norm."""

SLACK = math.sqrt(20.0)
"""Factor that raises this estimate. The mean square of PROBES normal numbers is below 1/20 once in 10^8 draws."""


class TileSums(NamedTuple):
    """Sums over tiles of the columns j of a matrix b (K, N), in the accumulator dtype.

    plain: Σ_j b_kj (K, T). reach: at least Σ_j |b_j|₂ (T,), so |a_i|₂·reach bounds the sum of the magnitudes of a tile
    of a @ b. step: the largest over k of the root of Σ_j b_kj² + (Σ_j b_kj)² (T,), the most that one term of the inner
    sum can add to a tile's round-off.
    """

    plain: torch.Tensor
    reach: torch.Tensor
    step: torch.Tensor


class InnerSums(NamedTuple):
    """Sums over tiles of the rows j of a batch of matrices b (..., N, K): Σ_j b_jk as plain (..., K, T), and Σ_j |b_j|₂
    as norms (..., T)."""

    plain: torch.Tensor
    norms: torch.Tensor


class BiasSums(NamedTuple):
    """Sums over tiles of a bias (N,), and of its magnitudes; both (T,)."""

    plain: torch.Tensor
    magnitudes: torch.Tensor


def tile_sums(b: torch.Tensor) -> TileSums:
    """Return the TileSums of b (K, N)."""
    inner, columns = b.shape
    width = tile_width(columns)
    plain, energies = tile_totals(b), tile_energies(b)
    reach = (width * energies.sum(0)).sqrt() + width * underflow(inner, b.dtype)
    step = (energies + plain.square()).amax(0).sqrt() + underflow(2 * width, b.dtype)
    return TileSums(plain, reach, step)


def bias_sums(bias: torch.Tensor) -> BiasSums:
    """Return the BiasSums of a bias (N,), in the accumulator dtype."""
    return BiasSums(tile_totals(bias), tile_magnitudes(bias))


def apply_sums(a: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return a (M, K) @ plain (K, T) in plain's dtype."""
    wide = a if a.dtype == plain.dtype else a.to(plain.dtype)
    # A CPU takes up to five times as long for `wide @ plain`, as plain has few columns.
    return (plain.mT @ wide.mT).mT if wide.device.type == "cpu" or wide.stride(0) == 1 else wide @ plain


def sums_and_norms(a: torch.Tensor, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `apply_sums`, and about SLACK times the norms of a's rows (M,), from one product that reads `a` once.

    The sums are split into two summands of a's dtype, because copying `a` to fp32 would cost more. Beside them are
    PROBES columns of signs. The mean square of a row's sums under these signs is about the square of the row's norm.
    If the result is rounded to a narrow dtype, the part of the bound that depends on the norm is less than a tenth.
    """
    high, tiles = plain.to(a.dtype), plain.shape[-1]
    b = torch.cat([high, (plain - high.to(plain.dtype)).to(a.dtype), signs(a.shape[-1], a.dtype, a.device)], dim=-1)
    high, low, probes = narrow_product(a, b, plain.dtype).split([tiles, tiles, PROBES], dim=-1)
    size = SLACK * (probes.square().sum(-1) / PROBES).sqrt()
    return high + low, size + underflow(a.shape[-1], a.dtype)


def narrow_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b, or batches of it, of operands in a narrow dtype, in the wide dtype in which they are summed."""
    return (torch.bmm if a.dim() == 3 else torch.mm)(a, b, out_dtype=dtype)


@functools.cache
def signs(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return 1 and -1 without a pattern, always the same (length, PROBES)."""
    mixed = (torch.arange(length * PROBES, device=device, dtype=torch.int64) + 1) * 0x9E3779B1 & 0x7FFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B & 0x7FFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 >> 16
    return (mixed % 2 * 2 - 1).to(dtype).view(length, PROBES)


def row_deviation(y: torch.Tensor, a: torch.Tensor, sums: TileSums, bias: BiasSums | None = None) -> Deviation:
    """Return how far the row tiles of y = a @ b (+ bias) are from their checksums; residual (M, T).

    Args:
        y: (M, N), any float dtype.
        a: (M, K).
        sums: of b (K, N).
        bias: of the bias.
    """
    inner = a.shape[-1]
    slack = 1.0
    if a.device.type != "cpu" and a.dtype in (torch.bfloat16, torch.float16) and sums.plain.dtype == torch.float32:
        (expected, size), slack = sums_and_norms(a, sums.plain), SLACK
    else:
        expected, size = apply_sums(a, sums.plain), norms(a, -1)
    size = size.unsqueeze(-1)
    product = reach = size * sums.reach
    # If the signs of terms vary, errors grow with the root of the terms' squares. If terms are alike (one token
    # repeated), they grow with the result, in all columns in one direction. The magnitudes of a correct tile add up to
    # `reach` at most. Without this limit an infinite result would widen its own bound.
    magnitude = tile_magnitudes(y).nan_to_num(nan=math.inf)
    terms = size * sums.step + torch.minimum(magnitude, 1.01 * reach)
    # A CPU that sums fp16 in fp16 rounds every partial sum to fp16. TF32 rounds only the terms.
    loss = growth(inner, y.dtype) * terms
    operands = operand_roundoff(y.dtype, y.device)
    if operands:
        loss = loss + operands * (reach if y.dtype == torch.float16 else terms)
    if bias is not None:
        expected = expected + bias.plain
        reach = product + bias.magnitudes
        loss = loss + growth(inner, y.dtype) * bias.magnitudes
    store = store_roundoff(y.dtype, y.device)
    if store:
        # On a GPU `sums_and_norms` splits the sums in two, which leaves a relative error of store².
        loss = loss + store * torch.minimum(magnitude, 1.01 * reach) + store**2 / slack * reach
        if bias is not None:  # the product may have been rounded before its bias was added
            loss = loss + store * torch.minimum(magnitude + bias.magnitudes, 1.01 * product)
    # The error of a tile's sum if products, or stored results, are so small that they vanish.
    lost = tile_width(y.shape[-1]) * (vanishing(y.dtype) + inner * vanishing(accumulator(y.dtype)))
    return Deviation(expected - tile_totals(y), loss + lost)


def finite_row_deviation(y: torch.Tensor, a: torch.Tensor, sums: TileSums, bias: BiasSums | None = None) -> Deviation:
    """Return `row_deviation`, but with a bound of 0 for each tile whose magnitudes add up to more than EXTREME, or to
    NaN. Such a tile is always wrong. A compiler computes the magnitudes once for both."""
    found = row_deviation(y, a, sums, bias)
    return Deviation(found.residual, found.bound.masked_fill(~(tile_magnitudes(y) <= EXTREME), 0.0))


def check_rows(
    guard: Guard,
    section: str,
    y: torch.Tensor,
    operands: Callable[[], tuple[Any, ...]],
    compute: Callable[[], torch.Tensor],
    *,
    backward: bool = False,
) -> torch.Tensor:
    """Check y (M, N) by rows. If y is wrong, refuse the slot. On a CPU, where the verdict is at hand, mode `correct`
    first computes y again, and refuses the slot only if the second y is wrong too.

    Args:
        operands: returns what `row_deviation` takes beside y.
        compute: computes y from its inputs.

    Returns:
        y, or the y that was computed again.
    """
    with unseen_by_checkpointing(), guard.timing():
        worst_of_rows, given = worst_of(row_deviation if backward else finite_row_deviation, y), operands()
        worst, action = worst_of_rows(y, *given), "refused"
        if y.device.type == "cpu" and guard.correct and not worst <= 1:
            y = compute()
            action = "recomputed" if worst_of_rows(y, *given) <= 1 else "refused"
        guard.report(section, worst, action, backward=backward)
        return y


def rebuild(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor):
    """Return y = a @ b corrected by its checksums in both directions, a `checksums.MatrixCorrection`. y (..., M, N),
    a (..., M, K) and b (..., K, N) are in the accumulator dtype."""
    width = tile_width(b.shape[-1])
    rows_of_a, columns_of_b = norms(a, -1), norms(b, -2)
    b_tiles = tiles(b)
    w_b, w_a = weights(width, b), weights(a.shape[-2], a)
    loss = growth(a.shape[-1], y.dtype) + operand_roundoff(y.dtype, y.device)
    reach = tiles(columns_of_b)
    tiny = torch.finfo(y.dtype).tiny
    rows = Direction(
        Sums(a @ b_tiles.sum(-1), a @ (b_tiles @ w_b)),
        loss * rows_of_a.unsqueeze(-1) * reach.sum(-1).unsqueeze(-2) + tiny,
        1.01 * rows_of_a.unsqueeze(-1) * reach.amax(-1).unsqueeze(-2) + tiny,
    )
    a_plain, a_weighted = a.sum(-2, keepdim=True), (w_a @ a).unsqueeze(-2)
    columns = Direction(
        Sums((a_plain @ b).squeeze(-2), (a_weighted @ b).squeeze(-2)),
        loss * columns_of_b * rows_of_a.sum(-1, keepdim=True) + tiny,
        1.01 * columns_of_b * rows_of_a.amax(-1, keepdim=True) + tiny,
    )
    return correct_both(y, rows, columns, width)


def check_product(
    guard: Guard,
    section: str,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    check: Callable[[torch.Tensor], Deviation],
    *,
    backward: bool = False,
) -> torch.Tensor:
    """Check y = a @ b with `check`, the cheapest sums that see every element. In the mode `correct`, rebuild wrong
    elements, or compute y again if its sums cannot prove the repair. Waits for the verdict, on any device.

    Returns:
        y itself if nothing was wrong, or in the mode `detect`; else the repaired y.
    """
    with unseen_by_checkpointing():
        seen = check(y)
        if not seen.bad().any():
            return y
        if not guard.correct:
            guard.report(section, seen.worst(), "refused", backward=backward)
            return y
        repaired = rebuild(y, a, b)
        fixed, action = repaired.matrix, "corrected"
        if check(fixed).bad().any() or repaired.beyond or repaired.doubtful:
            fixed, action = a @ b, "recomputed"
            if check(fixed).bad().any():
                action = "refused"
        guard.report(section, seen.worst(), action, backward=backward)
        return fixed
