"""Checksums of vectors: verify, locate, correct (ATTNChecker's extreme-error correction, arXiv
2410.11720).

A vector a of n elements carries two sums: c1 = Σ a_j and c2 = Σ j·a_j, j = 1..n. Through a product they can
be had without the product itself, and then tell whether, where, and by how much the product is wrong.
Everything here is pure tensor arithmetic: masks and `torch.where`, no host synchronisation, any device, any
leading shape.

An element is *extreme* when no correct result could be that large: the caller gives `limit`, the largest
magnitude that the operands allow (their norms' product). A fixed limit, as 1e10, cannot be reached in fp16.
"""

from typing import NamedTuple

import torch

from .roundoff import accumulator

CLEAN, CORRECTED, CHECKSUM, BEYOND = 0, 1, 2, 3
"""Status of a vector: nothing wrong; one element was wrong and is rebuilt; the vector is right and a checksum
of it was wrong; more is wrong than one vector's checksums can tell."""


class Sums(NamedTuple):
    """The two checksums of vectors that lie along one dimension; both have the shape without it."""

    plain: torch.Tensor
    weighted: torch.Tensor


class Correction(NamedTuple):
    """What `correct` did: the vectors (new tensor where changed) and one int8 status for each."""

    vectors: torch.Tensor
    status: torch.Tensor


def weights(n: int, like: torch.Tensor) -> torch.Tensor:
    """1..n in the accumulator dtype of `like`, on its device."""
    return torch.arange(1, n + 1, device=like.device, dtype=accumulator(like.dtype))


def verify(vectors: torch.Tensor, sums: Sums, bound: torch.Tensor) -> torch.Tensor:
    """True where a vector (..., n) disagrees with its plain checksum by more than `bound` (...). NaN
    disagrees."""
    return ~((sums.plain - vectors.to(sums.plain.dtype).sum(-1)).abs() <= bound)


def correct(vectors: torch.Tensor, sums: Sums, bound: torch.Tensor, limit: torch.Tensor) -> Correction:
    """Find and rebuild one wrong element in each vector.

    Args:
        vectors: (..., n), any float dtype.
        sums: checksums that the vectors should have, (...) in the accumulator dtype.
        bound: (...), largest |c1 - Σ a| that round-off explains; c2 is allowed n times that.
        limit: (...), largest |a_j| that a correct result can have.

    Returns:
        The vectors and their status. A rebuilt element is c1 less the sum of the others, so its error is at
        most `bound`; it is only accepted when the weighted checksum then agrees. Two or more extreme elements
        are BEYOND: they are the other direction's to correct.
    """
    plain, weighted = sums
    n = vectors.shape[-1]
    w = weights(n, vectors)
    wide = vectors.to(plain.dtype)

    extreme = ~(wide.abs() <= limit.unsqueeze(-1))
    extremes = extreme.sum(-1)
    d1 = plain - wide.sum(-1)
    d2 = weighted - wide @ w

    # Finite damage says where it is by d2 / d1. Extreme damage does not: the sums overflow, and either may be
    # NaN while the other is finite. There the extreme element itself is the index.
    ratio = d2 / d1
    index_known = (ratio >= 0.5) & (ratio < n + 0.5)
    by_ratio = torch.where(index_known, ratio, torch.ones_like(ratio)).round().to(torch.int64) - 1
    by_size = extreme.to(torch.int8).argmax(-1)
    index = torch.where(extremes == 1, by_size, by_ratio)

    at_index = torch.arange(n, device=vectors.device) == index.unsqueeze(-1)
    # The wrong element is left out before the sum, never subtracted from it: inf - inf is not a number, and a
    # near-infinite element cancels every digit of the others.
    others = torch.where(at_index, torch.zeros_like(wide), wide)
    rebuilt = plain - others.sum(-1)
    proof = weighted - others @ w - rebuilt * (index + 1).to(w.dtype)
    proven = (proof.abs() <= n * bound) & (rebuilt.abs() <= limit)

    wrong = ~(d1.abs() <= bound)
    weighted_wrong = ~(d2.abs() <= n * bound)
    one = (extremes == 1) | ((extremes == 0) & index_known)
    corrected = wrong & one & proven
    # One sum disagrees and the other does not, and no single element explains it.
    checksum = (wrong ^ weighted_wrong) & (extremes == 0) & ~corrected

    status = torch.where(
        corrected,
        CORRECTED,
        torch.where(checksum, CHECKSUM, torch.where(wrong | weighted_wrong, BEYOND, CLEAN)),
    ).to(torch.int8)
    change = corrected.unsqueeze(-1) & at_index
    return Correction(torch.where(change, rebuilt.unsqueeze(-1).to(vectors.dtype), vectors), status)


class Direction(NamedTuple):
    """Checksums of a matrix's vectors in one direction, with what round-off and the operands allow."""

    sums: Sums
    bound: torch.Tensor
    limit: torch.Tensor


class MatrixCorrection(NamedTuple):
    """What `correct_both` did to matrices.

    matrix: (..., M, N). corrected: number of elements rebuilt.
    beyond: number of vectors that are still wrong: 2-D damage.
    doubtful: several elements were rebuilt, and fewer were extreme. Beside such there may be wrong elements
    that every sum's bound excuses. All are 0-dim tensors on the device.
    """

    matrix: torch.Tensor
    corrected: torch.Tensor
    beyond: torch.Tensor
    doubtful: torch.Tensor


def correct_both(matrix: torch.Tensor, rows: Direction, columns: Direction, width: int) -> MatrixCorrection:
    """Correct by rows, then by columns what rows could not, then verify the rows.

    The passes follow each other on one tensor: two at once on two streams would race for the element both
    see.

    Args:
        matrix: (..., M, N).
        rows: of the row tiles; sums, bound and limit (..., M, N / width).
        columns: of the columns; sums, bound and limit (..., N).
        width: elements of a row under one checksum.
    """
    by_tile = matrix.unflatten(-1, (-1, width))
    by_rows = correct(by_tile, *rows)
    after_rows = by_rows.vectors.flatten(-2)
    by_columns = correct(after_rows.transpose(-1, -2), *columns)
    fixed = by_columns.vectors.transpose(-1, -2)
    # A row whose checksum was wrong would fail for ever; its columns vouch for it.
    still = verify(fixed.unflatten(-1, (-1, width)), rows.sums, rows.bound) & (by_rows.status != CHECKSUM)
    still_columns = verify(by_columns.vectors, columns.sums, columns.bound) & (by_columns.status != CHECKSUM)
    corrected = (by_rows.status == CORRECTED).sum() + (by_columns.status == CORRECTED).sum()
    return MatrixCorrection(
        fixed,
        corrected,
        still.sum() + still_columns.sum(),
        (corrected > 1) & ((~(by_tile.abs() <= rows.limit.unsqueeze(-1))).sum() < corrected),
    )
