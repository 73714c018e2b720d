"""Checksums of vectors, which verify a vector, and locate and correct a wrong element of it (ATTNChecker's
extreme-error correction, arXiv 2410.11720).

A vector a of n elements has two checksums: c1 = Σ a_j and c2 = Σ j·a_j, j = 1..n. Those of a product's rows and columns
can be computed from its operands, without the product. They then tell whether, where, and by how much the product is
wrong. Everything here is tensor arithmetic: masks and `torch.where`, no host synchronisation, any device, any leading
shape.

An element is *extreme* if no correct result could be that large. The caller passes this `limit`, the largest magnitude
that the operands allow (the product of their norms). ATTNChecker's fixed limit is 1e10.
"""

from typing import NamedTuple

import torch

from .roundoff import accumulator

CLEAN, CORRECTED, CHECKSUM, BEYOND = 0, 1, 2, 3
"""Status of a vector: nothing is wrong; one element was wrong and is rebuilt; the vector is right, but one of its
checksums was wrong; the vector or its checksums are wrong, and which is not known."""


class Sums(NamedTuple):
    """The two checksums of vectors that lie along one dimension. Both have the shape without that dimension."""

    plain: torch.Tensor
    weighted: torch.Tensor


class Correction(NamedTuple):
    """The result of `correct`: the vectors, as a new tensor, and an int8 status for each."""

    vectors: torch.Tensor
    status: torch.Tensor


def weights(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return 1..n in the accumulator dtype of `like`, on its device."""
    return torch.arange(1, n + 1, device=like.device, dtype=accumulator(like.dtype))


def verify(vectors: torch.Tensor, sums: Sums, bound: torch.Tensor) -> torch.Tensor:
    """Return a mask: true where a vector (..., n) is off its plain checksum by more than `bound` (...) or by NaN."""
    return ~((sums.plain - vectors.to(sums.plain.dtype).sum(-1)).abs() <= bound)


def correct(vectors: torch.Tensor, sums: Sums, bound: torch.Tensor, limit: torch.Tensor) -> Correction:
    """Find and rebuild one wrong element in each vector.

    Args:
        vectors: (..., n), any float dtype.
        sums: checksums that the vectors should have, (...) in the accumulator dtype.
        bound: (...), largest |c1 - Σ a| that round-off explains; for c2 it is n times as large.
        limit: (...), largest |a_j| that a correct result can have.

    Returns:
        The vectors and their status. A rebuilt element is c1 minus the sum of the others, so its error is at most
        `bound`. It is accepted only if the weighted checksum then agrees. If round-off is really as large as `bound`,
        an error of a few bounds may be located wrongly. A vector with two or more extreme elements is BEYOND, for
        `correct_both` to correct in the other direction.
    """
    plain, weighted = sums
    n = vectors.shape[-1]
    w = weights(n, vectors)
    wide = vectors.to(plain.dtype)

    extreme = ~(wide.abs() <= limit.unsqueeze(-1))
    extremes = extreme.sum(-1)
    d1 = plain - wide.sum(-1)
    d2 = weighted - wide @ w

    # The index of an error is d2 / d1, but not that of an extreme one: the sums overflow, and one of them may be NaN
    # while the other is finite. There the index is that of the extreme element.
    ratio = d2 / d1
    index_known = (ratio >= 0.5) & (ratio < n + 0.5)
    by_ratio = torch.where(index_known, ratio, torch.ones_like(ratio)).round().to(torch.int64) - 1
    by_size = extreme.to(torch.int8).argmax(-1)
    index = torch.where(extremes == 1, by_size, by_ratio)

    at_index = torch.arange(n, device=vectors.device) == index.unsqueeze(-1)
    # The wrong element is left out of the sum, not subtracted from it: inf - inf is NaN, and a near-infinite element
    # would erase every digit of the others.
    others = torch.where(at_index, torch.zeros_like(wide), wide)
    rebuilt = plain - others.sum(-1)
    proof = weighted - others @ w - rebuilt * (index + 1).to(w.dtype)
    proven = (proof.abs() <= n * bound) & (rebuilt.abs() <= limit)

    wrong = ~(d1.abs() <= bound)
    weighted_wrong = ~(d2.abs() <= n * bound)
    one = (extremes == 1) | ((extremes == 0) & index_known)
    corrected = wrong & one & proven
    # Only one of the two sums disagrees, and no single wrong element explains that.
    checksum = (wrong ^ weighted_wrong) & (extremes == 0) & ~corrected

    status = torch.where(
        corrected,
        CORRECTED,
        torch.where(checksum, CHECKSUM, torch.where(wrong | weighted_wrong, BEYOND, CLEAN)),
    ).to(torch.int8)
    change = corrected.unsqueeze(-1) & at_index
    return Correction(torch.where(change, rebuilt.unsqueeze(-1).to(vectors.dtype), vectors), status)


class Direction(NamedTuple):
    """The checksums of a matrix's rows or columns, with `bound` and `limit` as in `correct`."""

    sums: Sums
    bound: torch.Tensor
    limit: torch.Tensor


class MatrixCorrection(NamedTuple):
    """The result of `correct_both`. All fields but `matrix` are 0-dim tensors on the device.

    matrix: (..., M, N). corrected: number of rebuilds; one in each direction counts twice.
    beyond: number of rows and columns that do not verify afterwards, as damage in two dimensions does not.
    doubtful: whether several elements were rebuilt, of which some were not extreme. Other elements may then be wrong
    within the bounds of all sums.
    """

    matrix: torch.Tensor
    corrected: torch.Tensor
    beyond: torch.Tensor
    doubtful: torch.Tensor


def correct_both(matrix: torch.Tensor, rows: Direction, columns: Direction, width: int) -> MatrixCorrection:
    """Correct by rows, then correct the rest by columns, then verify rows and columns.

    The passes run one after the other on one tensor. On two streams they would race for an element that both see.

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
    # A row or column whose checksum was wrong can never verify; the other direction vouches for it.
    still = verify(fixed.unflatten(-1, (-1, width)), rows.sums, rows.bound) & (by_rows.status != CHECKSUM)
    still_columns = verify(by_columns.vectors, columns.sums, columns.bound) & (by_columns.status != CHECKSUM)
    corrected = (by_rows.status == CORRECTED).sum() + (by_columns.status == CORRECTED).sum()
    return MatrixCorrection(
        fixed,
        corrected,
        still.sum() + still_columns.sum(),
        (corrected > 1) & ((~(by_tile.abs() <= rows.limit.unsqueeze(-1))).sum() < corrected),
    )
