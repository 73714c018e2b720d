"""Sums over a fused attention's operands, results and gradients, from which its identities and their bounds are made.

`identities` says what they are for. Here they are summed by PyTorch, operation by operation or compiled; on an
accelerator `kernels` sums them in one pass, where it can.
"""

import functools
import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from .roundoff import accumulator, growth, operand_roundoff, underflow, unit_roundoff

WITH_KERNELS = ("cuda", "xpu", "meta")
"""Devices that Triton compiles for; meta stands for them where only shapes are looked at."""

FLAT = 1 / 16
"""Scores, or rows, that differ by less than this share may be rounded alike in bf16."""


class PairSums(NamedTuple):
    """Sums over the rows of a matrix x and of its gradient dx, of each sequence and key head: (B, N_kv, ·) in the
    accumulator dtype, H of x's columns.

    product: xᵀ dx (H, H). total, squares: Σ x, Σ x² (H). d_total, d_squares: Σ dx, Σ dx² (H). of_rows, of_columns: sums
    of squares of the terms of the product's rows and columns, Σ x² |dx_i|² and Σ |x_i|² dx² (H). most2: the largest
    |x_i|² (1). d_most: the largest magnitude in dx (1).
    """

    product: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor
    d_total: torch.Tensor
    d_squares: torch.Tensor
    of_rows: torch.Tensor
    of_columns: torch.Tensor
    most2: torch.Tensor
    d_most: torch.Tensor


class OutputSums(NamedTuple):
    """Sums over queries and the group's query heads of O, dO, Q and lse's gradient; H of the keys, V of the values.

    product: Oᵀ dO (V, V). total: Σ dO, out_total, out_squares: Σ O, Σ O² (V). alike: Σ dO of rows whose P may be
    rounded alike (V). terms: Σ π dO², squares of what rounding P does to a column of dV (V). of_rows, of_columns: as of
    PairSums (V). rows: Σ r² Q², likewise of dK (H). from_lse: Σ dlse Q (H). square: Σ |dO_i|² (1). alike_rows: Σ r
    where outputs are alike (1). shared: Σ π |dO_i|² (1). pairs: Σ |dO_i|² |Q_i|² (1). varied: 1 where some row's scores
    are not all but equal (1). largest2, largest_lse: the largest |dO_i|² and |dlse_i| (1).
    """

    product: torch.Tensor
    total: torch.Tensor
    out_total: torch.Tensor
    out_squares: torch.Tensor
    alike: torch.Tensor
    terms: torch.Tensor
    of_rows: torch.Tensor
    of_columns: torch.Tensor
    rows: torch.Tensor
    from_lse: torch.Tensor
    square: torch.Tensor
    alike_rows: torch.Tensor
    shared: torch.Tensor
    pairs: torch.Tensor
    varied: torch.Tensor
    largest2: torch.Tensor
    largest_lse: torch.Tensor


class Sums(NamedTuple):
    """All that the backward identities compare. spread: the mean of |k - mean k| (B, N_kv, 1)."""

    queries: PairSums
    keys: PairSums
    values: PairSums
    outputs: OutputSums
    spread: torch.Tensor


class Rounding(NamedTuple):
    """What of an attention's shape and dtype the sums over its rows need.

    scale: of the scores. keys: how many. unit: relative error of O as it is stored. wide: unit roundoff of the sums.
    lost: the most that a root of |dO_i|² is too small by. grown: relative error of a sum over all rows.
    """

    scale: float
    keys: int
    unit: float
    wide: float
    lost: float
    grown: float

    @staticmethod
    def of(out: torch.Tensor, k: torch.Tensor, scale: float) -> "Rounding":
        """Of an attention's output (B, L, N, H_v) and keys (B, L, N_kv, H)."""
        dtype, wide = out.dtype, unit_roundoff(accumulator(out.dtype))
        rows = out.shape[1] * (out.shape[2] // k.shape[2])
        return Rounding(
            scale=scale,
            keys=k.shape[1],
            unit=kernel_roundoff(dtype, out.device) + 4 * wide,
            wide=wide,
            lost=underflow(out.shape[-1], dtype),
            grown=growth(rows, dtype),
        )


def _by_group(x: torch.Tensor, n_kv: int) -> torch.Tensor:
    """(B, L, N, ...) as (B, N_kv, L·G, ...), in the accumulator dtype: a group's query heads are rows of one matrix."""
    b, length, n = x.shape[:3]
    wide = x.to(accumulator(x.dtype)).reshape(b, length, n_kv, n // n_kv, *x.shape[3:])
    return wide.transpose(1, 2).flatten(2, 3)


def narrow_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Batches of a @ b, of narrow operands, in the wide dtype that they are summed in."""
    return torch.bmm(a, b, out_dtype=dtype)


def _outer(a: torch.Tensor, b: torch.Tensor, n_kv: int) -> torch.Tensor:
    """aᵀ b of every head, added up over the query heads of a group: a, b (B, L, N, ·) to (B, N_kv, ·, ·), in the
    accumulator dtype. Where a device multiplies narrow operands into wide sums, no wide copy is made."""
    acc = accumulator(a.dtype)

    def product(a_LNH: torch.Tensor, b_LNH: torch.Tensor) -> torch.Tensor:
        left, right = a_LNH.permute(1, 2, 0), b_LNH.permute(1, 0, 2)
        if a.dtype != acc and a.device.type != "cpu":
            return narrow_product(left, right, acc)
        return left.to(acc) @ right.to(acc)

    by_head = torch.stack([product(x, y) for x, y in zip(a, b, strict=True)])
    return by_head.unflatten(1, (n_kv, -1)).sum(2)


def kernel_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of what a kernel stores in `dtype`; partial sums included where they are rounded as well."""
    if dtype == accumulator(dtype):
        return 4 * unit_roundoff(dtype)
    return unit_roundoff(dtype) * (4 if operand_roundoff(dtype, device) else 1)


class _Rows(NamedTuple):
    """Rows of a matrix (B, N_kv, rows, H) in the accumulator dtype, their squares, and the sums of those by row."""

    wide: torch.Tensor
    squares: torch.Tensor
    norm2: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, n_kv: int) -> "_Rows":
        """Of x (B, L, N, H)."""
        wide = _by_group(x, n_kv)
        squares = wide.square()
        return _Rows(wide, squares, squares.sum(-1))

    def most(self) -> torch.Tensor:
        """The largest magnitude (B, N_kv, 1)."""
        return self.wide.abs().amax(-1).amax(-1, keepdim=True)


def _weighed(rows: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
    """Sums of rows (B, N_kv, rows, H), each with its weight (B, N_kv, rows), for every one of `weights`: (B, N_kv, H).

    A matrix product, which a CPU is fast at. It may take its operands rounded, where PyTorch is told to: for what
    bounds are made of, and not for what is compared. A compiler makes sums one pass with the squares that are their
    rows, and a product two.
    """
    if torch.compiler.is_compiling():
        return [(weight.unsqueeze(-1) * rows).sum(-2) for weight in weights]
    return list((torch.stack(weights, -2) @ rows).unbind(-2))


def pair_sums(x: torch.Tensor, dx: torch.Tensor, n_kv: int) -> PairSums:
    """PairSums of x and dx (B, L, N, H)."""
    product = _outer(x, dx, n_kv)  # first: what is between two products can be one pass
    return _pair_sums(product, _Rows.of(x, n_kv), _Rows.of(dx, n_kv))


def _pair_sums(product: torch.Tensor, x: _Rows, dx: _Rows) -> PairSums:
    one = torch.ones_like(x.norm2)
    squares, of_rows = _weighed(x.squares, one, dx.norm2)
    d_squares, of_columns = _weighed(dx.squares, one, x.norm2)
    return PairSums(
        product=product,
        total=x.wide.sum(2),
        squares=squares,
        d_total=dx.wide.sum(2),
        d_squares=d_squares,
        of_rows=of_rows,
        of_columns=of_columns,
        most2=x.norm2.amax(-1, keepdim=True),
        d_most=dx.most(),
    )


def output_sums(
    product: torch.Tensor,
    q: _Rows,
    out: _Rows,
    d_out: _Rows,
    d_lse: torch.Tensor | None,
    spread: torch.Tensor,
    keys: PairSums,
    values: PairSums,
    known: Rounding,
) -> OutputSums:
    """OutputSums of the rows of Q, O and dO, of Oᵀ dO, and of lse's gradient (B, N_kv, rows) or None."""
    do_norm, q_norm, width = d_out.norm2.sqrt() + known.lost, q.norm2.sqrt(), out.wide.shape[-1]
    one = torch.ones_like(do_norm)

    # A row of P whose scores are all but equal is rounded alike; else its roundings are as many as it has large terms,
    # and |O|² / mean |V|² is about Σ_j P_ij².
    flat = known.scale * q_norm * spread < FLAT
    v_norm2 = mean_norm2(values, known.keys)
    share = torch.where(flat, 1.0, (out.norm2 / v_norm2 + 1.0 / known.keys).clamp_max(1.0))

    # delta = rowsum(dO ∘ O) takes O rounded, and O was made of a rounded P: what a row of dS then sums to.
    delta = (d_out.wide * out.wide).sum(-1).abs()
    of_p = share.sqrt() * (do_norm * (v_norm2 / width).sqrt() + delta)
    of_scores = 8 * known.wide * known.scale * q_norm * keys.most2.sqrt()
    crossed = (d_out.squares * out.squares).sum(-1).sqrt() + known.lost
    row = known.unit * (crossed + of_p) + of_scores * of_p
    terms, of_columns = _weighed(d_out.squares, share, out.norm2)
    out_squares, of_rows = _weighed(out.squares, one, d_out.norm2)
    return OutputSums(
        product=product,
        total=d_out.wide.sum(2),
        out_total=_weighed(out.wide, one)[0],
        out_squares=out_squares,
        alike=_weighed(d_out.wide, flat.to(one.dtype))[0],
        terms=terms,
        of_rows=of_rows,
        of_columns=of_columns,
        rows=_weighed(q.squares, row.square())[0],
        from_lse=torch.zeros_like(q.wide[:, :, 0]) if d_lse is None else (d_lse.unsqueeze(-1) * q.wide).sum(2),
        square=d_out.norm2.sum(-1, keepdim=True),
        alike_rows=(math.sqrt(width) * row + known.grown * delta).sum(-1, keepdim=True),
        shared=(share * d_out.norm2).sum(-1, keepdim=True),
        pairs=(d_out.norm2 * q.norm2).sum(-1, keepdim=True),
        varied=1.0 - flat.to(one.dtype).amin(-1, keepdim=True),
        largest2=d_out.norm2.amax(-1, keepdim=True),
        largest_lse=torch.zeros_like(spread) if d_lse is None else d_lse.abs().amax(-1, keepdim=True),
    )


def mean_norm2(values: PairSums, count: int) -> torch.Tensor:
    """The mean of |x_i|² (B, N_kv, 1), above 0."""
    return values.squares.sum(-1, keepdim=True) / count + torch.finfo(values.squares.dtype).tiny


def identity_sums(q, k, v, out, d_out, dq, dk, dv, lse, d_lse, scale: float) -> Sums:
    """Sums of what `identities.backward_deviation` is given."""
    kernels = _kernels() if q.device.type in WITH_KERNELS else None
    if kernels is not None and kernels.fits(q, v):
        return kernels.identity_sums(q, k, v, out, d_out, dq, dk, dv, lse, d_lse, scale)
    n_kv, known = k.shape[2], Rounding.of(out, k, scale)
    seen = d_out if lse is None else torch.where((lse > -torch.inf).unsqueeze(-1), d_out, 0)
    product, of_q = _outer(out, seen, n_kv), _outer(q, dq, n_kv)
    keys, values = pair_sums(k, dk, n_kv), pair_sums(v, dv, n_kv)
    q_rows, k_ = _Rows.of(q, n_kv), _by_group(k, n_kv)
    spread = (k_ - k_.mean(2, keepdim=True)).abs().mean(-1).mean(-1, keepdim=True)
    outputs = output_sums(
        *(product, q_rows, _Rows.of(out, n_kv), _Rows.of(seen, n_kv)),
        None if d_lse is None else _by_group(d_lse, n_kv),
        *(spread, keys, values, known),
    )
    return Sums(_pair_sums(of_q, q_rows, _Rows.of(dq, n_kv)), keys, values, outputs, spread)


@functools.cache
def _kernels() -> Any:
    """The module of kernels; None where PyTorch came without Triton."""
    if find_spec("triton") is None:
        return None
    from . import kernels

    return kernels
