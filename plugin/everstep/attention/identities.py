"""What the inputs and outputs of any attention kernel must satisfy, forward and backward, whatever it does
inside.

For O = P V with P = softmax(scale · Q Kᵀ + mask), without dropout, and given dO, dQ, dK, dV:

    each column of O lies between the least and the greatest of the column of V
    |lse_i| <= scale · |q_i| max_j |k_j| + log L, where the kernel hands lse out
    Σ_j dV_j = Σ_i dO_i                      rows of P sum to 1 (rows that see nothing left out)
    Σ_j dK_j = scale · Σ_i dlse_i Q_i        rows of dS sum to dlse, which is 0 where lse has no gradient
    <dQ, Q> = <dK, K>                        both are Σ_ij dS_ij S_ij

each for every sequence and key head, query heads of a group added up. The first follows from P being an
average; the others compare the backward, which makes S again, with the O and lse that the forward left. They
cost passes over (L, H) tensors, no product, and no change to the kernel. They detect; they do not say which
element is wrong.

What they cannot see: let the forward lose key j from row i, as a score that becomes -inf does, and let p be the
weight that key should have. O_i moves by p/(1-p)·(O_i - V_j), inside the range of V; lse_i falls by -log(1-p);
the backward's row of P then sums to 1/(1-p), and Σ dV - Σ dO is p/(1-p)·dO_i. That is one row's share of a sum over
all rows, beside the rounding of P and dV to the kernel's dtype, u·(Σ_ij P_ij² dO_i²)^½ in each column. bf16's u hides
p of several percent; fp32's, p that moves O by some 1e-4 of its largest value. No sum of O(L·H) terms is finer: a
fused kernel hands out nothing else of row i but O_i and lse_i, and what those should be takes all of q_i's scores. The
forward is therefore run twice and compared (`agreement_deviation`).

The bounds follow the data. A kernel rounds P and dS to its dtype before it multiplies them, and rounds what
it stores. Such errors are independent, so sums of them grow with Euclidean norms; a part that all of them
share (a constant input is rounded the same way everywhere) grows with plain sums, and is bounded by those.
"""

import math
from typing import NamedTuple

import torch

from .findings import Deviation
from .roundoff import accumulator, growth, operand_roundoff, underflow, unit_roundoff, vanishing

COLUMN = 6.5
"""Rounding errors of one column stay below so many times the estimate, which takes every rounding for the largest
possible: some fifteen standard deviations of what they are, since a row of P may have many equal terms."""

NORM, PEAK = 1.4, 3.5
"""The same for the norm over all columns of a head, which varies less: so many times the estimates' norm, and for the
case that one column makes up most of it so many times the largest."""

DK = 0.4
"""All of this for dK, whose estimate is the sum of three roundings, each at its largest."""

MATRIX = 3.0
"""The same for the norm of one row or column of a matrix."""

_FLAT = 1 / 16
"""Scores, or rows, that differ by less than this share may be rounded alike in bf16."""


def forward_deviation(out: torch.Tensor, v: torch.Tensor) -> Deviation:
    """How far columns of O leave the range of V's columns; residual (B, N, H), 0 inside, NaN where O is.

    Args:
        out: (B, L, N, H).
        v: (B, L, N_kv, H).
    """
    acc = accumulator(out.dtype)
    groups = out.shape[2] // v.shape[2]
    low, high = (x.to(acc).repeat_interleave(groups, 1) for x in _extremes(v))
    least, greatest = (x.to(acc) for x in _extremes(out))
    # A row that sees nothing is 0.
    low, high = low.clamp_max(0), high.clamp_min(0)
    beyond = torch.maximum(greatest - high, low - least).clamp_min(0)
    size = torch.maximum(high, -low)
    bound = (unit_roundoff(out.dtype) + growth(v.shape[1], out.dtype)) * size + torch.finfo(out.dtype).tiny
    return Deviation(beyond, bound, 16 * size)


def _extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest along dimension 1."""
    if x.device.type == "cpu":
        return x.amin(1), x.amax(1)  # both together take five times as long there
    return tuple(torch.aminmax(x, dim=1))


def lse_deviation(lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: float) -> Deviation:
    """How far lse is beyond what the largest possible score allows; residual (B, N, 1).

    |lse_i| <= scale · |q_i|₂ · max_j |k_j|₂ + log L; -inf belongs to a row that sees nothing. Not for scores
    that are changed by more than scale and mask.

    Args:
        lse: (B, L, N).
        q: (B, L, N, H).
        k: (B, L, N_kv, H).
    """
    acc = accumulator(q.dtype)
    groups = q.shape[2] // k.shape[2]
    most = torch.linalg.vector_norm(k, dim=-1, dtype=acc).amax(1, keepdim=True).repeat_interleave(groups, 2)
    limit = scale * torch.linalg.vector_norm(q, dim=-1, dtype=acc) * most + math.log(k.shape[1])
    size = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse).to(acc).abs()
    beyond = (size - limit).amax(1).unsqueeze(-1)
    largest = limit.amax(1).unsqueeze(-1)
    return Deviation(beyond.clamp_min(0), 1e-3 * (1 + largest), 16 * (1 + largest))


def agreement_deviation(
    out: torch.Tensor, lse: torch.Tensor | None, again: torch.Tensor, lse_again: torch.Tensor | None, v: torch.Tensor
) -> Deviation:
    """How far two runs of one forward differ beyond the order of their sums; residual (B, N, H_v [+ 1]).

    Each element of O may differ by two units of its own last place, by what sums of L terms in another order may,
    and by the rounding of P, which other tiles round at another scale: P's rows sum to 1, so that this is at most
    2 u max |V| in a column. lse knows the first two alone. Runs of one deterministic kernel differ by nothing.

    Args:
        out, again: (B, L, N, H_v).
        lse, lse_again: (B, L, N), or None.
        v: (B, L, N_kv, H_v).
    """
    acc = accumulator(out.dtype)
    groups = out.shape[2] // v.shape[2]
    a, b = out.to(acc), again.to(acc)
    own = 4 * unit_roundoff(out.dtype) * torch.minimum(a.abs(), b.abs())
    size = v.abs().amax(1).to(acc).repeat_interleave(groups, 1)
    order = growth(v.shape[1], out.dtype)
    rounded = 2 * unit_roundoff(out.dtype) if out.dtype != acc else 0.0
    bound = (order + rounded) * size + torch.finfo(out.dtype).tiny
    found = Deviation(((a - b).abs() - own).amax(1).clamp_min(0), bound, size)
    if lse is None or lse_again is None:
        return found
    same = lse == lse_again
    apart = torch.where(same, torch.zeros_like(lse), lse - lse_again).abs().amax(1).unsqueeze(-1)
    largest = 1 + torch.where(lse_again.isfinite(), lse_again, torch.zeros_like(lse)).abs().amax(1).unsqueeze(-1)
    return joined(found, Deviation(apart, order * largest, 16 * largest))


def joined(*parts: Deviation) -> Deviation:
    """All of them, along the last dimension."""
    return Deviation(
        torch.cat([part.residual for part in parts], -1),
        torch.cat([part.bound for part in parts], -1),
        torch.cat([part.scale for part in parts], -1),
    )


class OutputSide(NamedTuple):
    """What the backward identities need of dO, O and lse's gradient: sums over queries and the group's query heads.

    Of each sequence and key head, in the accumulator dtype; H of the keys, V of the values.

    total: Σ dO (V). alike: Σ dO of rows whose P may be rounded alike, magnitudes (V). terms: Σ π dO², squares of what
    rounding P does to a column of dV (V). rows: Σ r² Q², likewise of dK (H). together: |Σ r Q| where outputs are alike
    (H). from_lse: Σ dlse Q (H). square: the sum of squares of dO (1). product: Oᵀ dO (V, V). of_rows, of_columns: sums
    of squares of the terms of its rows and columns (V). pairs: Σ |dO_i|² |Q_i|² (1). largest, largest_lse: the largest
    |dO_i| and |dlse_i| (1).
    """

    total: torch.Tensor
    alike: torch.Tensor
    terms: torch.Tensor
    rows: torch.Tensor
    together: torch.Tensor
    from_lse: torch.Tensor
    square: torch.Tensor
    product: torch.Tensor
    of_rows: torch.Tensor
    of_columns: torch.Tensor
    pairs: torch.Tensor
    largest: torch.Tensor
    largest_lse: torch.Tensor

    def pack(self) -> torch.Tensor:
        """All of it in one tensor (B, N_kv, `packed_size`)."""
        return torch.cat([part.flatten(2) for part in self], -1)

    @staticmethod
    def unpack(packed: torch.Tensor, key_dim: int, value_dim: int) -> "OutputSide":
        """What `pack` packed."""
        sizes = _sizes(key_dim, value_dim)
        parts = list(packed.split(sizes, -1))
        parts[7] = parts[7].unflatten(-1, (value_dim, value_dim))
        return OutputSide(*parts)


def _sizes(h: int, v: int) -> list[int]:
    return [v, v, v, h, h, h, 1, v * v, v, v, 1, 1, 1]


def packed_size(key_dim: int, value_dim: int) -> int:
    """Numbers of one OutputSide."""
    return sum(_sizes(key_dim, value_dim))


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


def _stored(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of what a kernel stores in `dtype`; partial sums included where they are rounded as well."""
    if dtype == accumulator(dtype):
        return 4 * unit_roundoff(dtype)
    return unit_roundoff(dtype) * (4 if operand_roundoff(dtype, device) else 1)


def _roundings(length: int, groups: int, like: torch.Tensor) -> float:
    """How often dK and dV are rounded, where not once: for each query head of a group, and once more when those are
    added up. PyTorch's CPU kernel adds up blocks of queries in the narrow dtype as well; the sums of half of them are
    about half as large in the mean of squares."""
    blocks = 1.0
    if like.device.type == "cpu" and like.dtype != accumulator(like.dtype):
        blocks = length / (256 if length >= 768 else 64 if length >= 192 else 32)
    return max(1.0, (blocks + 1) / 2) + (groups / 2 if groups > 1 else 0.0)


def _root(squares: torch.Tensor, terms: int, dtype: torch.dtype) -> torch.Tensor:
    """Root of a sum of so many squares, not below the true one."""
    return squares.sqrt() + underflow(terms, dtype)


def output_side(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    scale: float,
) -> OutputSide:
    """Sums over dO and O.

    Args:
        q: (B, L, N, H); k (B, L, N_kv, H); v (B, L, N_kv, H_v); out, d_out: (B, L, N, H_v).
        lse: (B, L, N), -inf where a query sees no key; None: every query sees one.
        d_lse: gradient of lse (B, L, N), or None.
    """
    n_kv, dtype = k.shape[2], out.dtype
    seen = d_out if lse is None else torch.where((lse > -torch.inf).unsqueeze(-1), d_out, 0)
    product = _outer(out, seen, n_kv)  # first: what is between two products can be one pass
    q_, o_, do_ = _by_group(q, n_kv), _by_group(out, n_kv), _by_group(seen, n_kv)
    k_, v_ = _by_group(k, n_kv), _by_group(v, n_kv)
    count = do_.shape[2]
    unit = _stored(dtype, out.device) + 4 * unit_roundoff(do_.dtype)
    do_squares, o_squares = do_.square(), o_.square()
    do_norm2, o_norm2 = do_squares.sum(-1), o_squares.sum(-1)
    do_norm = _root(do_norm2, v.shape[-1], dtype)

    # A row of P whose scores are all but equal is rounded alike; else its roundings are as many as it has large terms,
    # and |O|² / mean |V|² is about Σ_j P_ij².
    spread = (k_ - k_.mean(2, keepdim=True)).abs().mean((2, 3)).unsqueeze(-1)
    q_norm = q_.square().sum(-1).sqrt()
    flat = scale * q_norm * spread < _FLAT
    v_norm2 = v_.square().sum(-1).mean(-1, keepdim=True) + torch.finfo(do_.dtype).tiny
    share = torch.where(flat, 1.0, (o_norm2 / v_norm2 + 1.0 / k.shape[1]).clamp_max(1.0))
    terms = (share.unsqueeze(-1) * do_squares).sum(2)
    shared_norm2 = (share * do_norm2).sum(-1, keepdim=True)

    # delta = rowsum(dO ∘ O) takes O rounded, and O was made of a rounded P: what a row of dS then sums to.
    v_usual = (v_norm2 / v.shape[-1]).sqrt()
    delta = (do_ * o_).sum(-1).abs()
    of_p = share.sqrt() * (do_norm * v_usual + delta)
    of_scores = 8 * unit_roundoff(do_.dtype) * scale * q_norm * k_.square().sum(-1).amax(-1, keepdim=True).sqrt()
    row = unit * (_root((do_squares * o_squares).sum(-1), v.shape[-1], dtype) + of_p) + of_scores * of_p
    rows = (row.square().unsqueeze(-1) * q_.square()).sum(2)
    same = torch.maximum(_alike(o_), flat.all(-1, keepdim=True).to(o_.dtype))
    alike_row = math.sqrt(v.shape[-1]) * row + growth(count, dtype) * delta
    together = alike_row.sum(-1, keepdim=True) * q_.mean(2).abs() * same
    if d_lse is None:
        from_lse, largest_lse = torch.zeros_like(rows), do_norm.new_zeros(*do_norm.shape[:2], 1)
    else:
        by_group = _by_group(d_lse, n_kv)
        from_lse, largest_lse = (by_group.unsqueeze(-1) * q_).sum(2), by_group.abs().amax(-1, keepdim=True)
    return OutputSide(
        total=do_.sum(2),
        alike=(do_ * flat.unsqueeze(-1)).sum(2).abs() + do_.sum(2).abs() * _alike(v_),
        terms=terms + count * torch.finfo(do_.dtype).tiny,
        rows=rows + count * torch.finfo(do_.dtype).tiny,
        together=together,
        from_lse=scale * from_lse,
        square=do_norm2.sum(-1, keepdim=True),
        product=product,
        of_rows=(o_squares * do_norm2.unsqueeze(-1)).sum(2) + shared_norm2 * v_.square().mean(2),
        of_columns=(do_squares * o_norm2.unsqueeze(-1)).sum(2) + terms * v_norm2,
        pairs=(do_norm2 * q_.square().sum(-1)).sum(-1, keepdim=True),
        largest=do_norm.amax(-1, keepdim=True),
        largest_lse=largest_lse,
    )


def _alike(x: torch.Tensor) -> torch.Tensor:
    """1 where the rows of x (B, N_kv, rows, H) differ so little that all may be rounded alike, else 0; (B, N_kv, 1)."""
    apart = x.var(2, correction=0).sum(-1, keepdim=True)
    return (apart <= _FLAT**2 * x.square().mean(2).sum(-1, keepdim=True)).to(x.dtype)


def backward_deviation(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    side: OutputSide,
    scale: float,
    *,
    plain_scores: bool = True,
    wide_sums: bool = False,
) -> Deviation:
    """The backward identities; residual (B, N_kv, columns).

    Columns of Σ dV - Σ dO and their norm; norms of the rows and of the columns of Vᵀ dV - Oᵀ dO; the largest of |dV|;
    with plain scores the same of Σ dK, and of dQᵀ Q - Kᵀ dK; the largest of |dK| and of |dQ|.

    Args:
        q, dq: (B, L, N, H); k, dk: (B, L, N_kv, H); v, dv: (B, L, N_kv, H_v).
        side: of dO and O.
        plain_scores: False where the scores are changed further (a score_mod): only what is about V holds.
        wide_sums: whether the kernel adds up dK and dV, over all queries and the query heads of a group, in its
            accumulators.
    """
    n_kv, dtype = k.shape[2], q.dtype
    groups = q.shape[2] // n_kv
    of_v = _outer(v, dv, n_kv)
    of_q, of_k = (_outer(dq, q, n_kv), _outer(k, dk, n_kv)) if plain_scores else (of_v, of_v)
    q_, k_, v_ = _by_group(q, n_kv), _by_group(k, n_kv), _by_group(v, n_kv)
    dq_, dk_, dv_ = _by_group(dq, n_kv), _by_group(dk, n_kv), _by_group(dv, n_kv)
    length, count = k.shape[1], q_.shape[2]
    unit32 = unit_roundoff(q_.dtype)
    q_norm2, k_norm2, v_norm2 = (x.square().sum(-1) for x in (q_, k_, v_))
    q_most, k_most, v_most = (x.amax(-1, keepdim=True).sqrt() for x in (q_norm2, k_norm2, v_norm2))
    # The forward's S and the backward's agree to a few units of the largest score, and P with them.
    stored = _stored(dtype, q.device) * (1.0 if wide_sums else math.sqrt(_roundings(length, groups, q)))
    unit = stored + 8 * unit32 * (1 + scale * q_most * k_most) + unit32 * math.sqrt(count)
    # Sums in fp32 of terms of one sign; and of equal terms, rounded the same way at every step.
    summed = growth(count, dtype)
    do_norm = _root(side.square, count * v.shape[-1], dtype)

    most_v = do_norm * math.sqrt(count)
    parts = [
        _sums(
            dv_.sum(2) - side.total,
            unit * _capped(torch.maximum(dv_.square().sum(2), side.terms), most_v * math.sqrt(length)),
            (unit * side.alike + summed * side.total.abs()),
            most_v,
        ),
        _matrix(
            *(of_v, v_, dv_, side.product, side.of_rows, side.of_columns, unit),
            summed + 2 * unit * torch.maximum(_alike(dv_), _alike(v_)),
            most_v * math.sqrt(length) * v_most,
        ),
        _largest(dv_, most_v),
    ]
    if plain_scores:
        row_most = 2 * side.largest * v_most + side.largest_lse
        most_q = scale * row_most * k_most
        most_k = scale * row_most * math.sqrt(count) * q_norm2.sum(-1, keepdim=True).sqrt()
        dq_norm2 = dq_.square().sum(-1)
        # What rounding dS does to a column of dK, by dK itself and by dQ, which dS made as well.
        k_usual = k_norm2.mean(-1, keepdim=True) + torch.finfo(q_.dtype).tiny
        through_q = (dq_norm2.unsqueeze(-1) * q_.square()).sum(2) / k_usual
        noise = _capped(torch.maximum(dk_.square().sum(2), through_q), most_k * math.sqrt(length))
        sigma = unit * noise + scale * side.rows.sqrt()
        # Terms of dQ = dS K that cancel, where rows of K are much alike, leave what fp32 lost of them.
        cancelled = (4 + math.sqrt(length)) * unit32 * scale * side.pairs.sqrt() * v_most * k_most
        of_rows = (dq_.square() * q_norm2.unsqueeze(-1)).sum(2)
        of_columns = (dq_norm2.unsqueeze(-1) * q_.square()).sum(2)
        limit = most_q * math.sqrt(count) * q_norm2.sum(-1, keepdim=True).sqrt()
        parts += [
            _sums(dk_.sum(2) - side.from_lse, DK * sigma, scale * side.together + summed * side.from_lse.abs(), most_k),
            _matrix(*(of_k, k_, dk_, of_q, of_rows, of_columns, unit, summed, limit, cancelled)),
            _largest(dk_, most_k),
            _largest(dq_, most_q),
        ]
    # What squares lose below the least normal number, and values of the narrow dtype do.
    lost = unit * underflow(count * (q.shape[-1] + v.shape[-1]), dtype) + count * vanishing(dtype)
    found = joined(*parts)
    return Deviation(found.residual, found.bound + (1 + q_most + k_most + v_most) * lost, found.scale)


def _capped(squares: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """A root of squares, at most what the operands allow: an infinite gradient must not excuse itself."""
    return torch.minimum(squares.sqrt(), most)


def _sums(residual: torch.Tensor, sigma: torch.Tensor, shared: torch.Tensor, scale: torch.Tensor) -> Deviation:
    """Residual columns (B, N_kv, H), with their norm as one column more."""
    norm = torch.linalg.vector_norm
    return Deviation(
        torch.cat([residual, norm(residual, dim=-1, keepdim=True)], -1),
        torch.cat(
            [
                COLUMN * sigma + 2 * shared,
                NORM * norm(sigma, dim=-1, keepdim=True)
                + PEAK * sigma.amax(-1, keepdim=True)
                + 2 * norm(shared, dim=-1, keepdim=True),
            ],
            -1,
        ),
        (scale * residual.shape[-1]).expand(*residual.shape[:-1], residual.shape[-1] + 1),
    )


def _matrix(other, x, dx, product, of_rows, of_columns, unit, summed, limit, lost=0.0) -> Deviation:
    """Norms of the rows and of the columns of product - other (B, N_kv, 2 H), with other = xᵀ dx.

    Args:
        of_rows, of_columns: sums of squares of the terms of product, by row and by column.
        lost: what may be lost besides, of a whole row or column.
    """
    norm = torch.linalg.vector_norm
    apart = product - other
    of_rows = of_rows + (x.square() * dx.square().sum(-1, keepdim=True)).sum(2)
    of_columns = of_columns + (x.square().sum(-1, keepdim=True) * dx.square()).sum(2)
    residual = torch.cat([norm(apart, dim=-1), norm(apart, dim=-2)], -1)
    sigma = unit * _capped(torch.cat([of_rows, of_columns], -1), limit)
    shared = summed * torch.minimum(torch.cat([norm(product, dim=-1), norm(product, dim=-2)], -1), limit)
    return Deviation(residual, MATRIX * sigma + shared + lost, limit.expand_as(residual))


def _largest(x: torch.Tensor, most: torch.Tensor) -> Deviation:
    """The largest magnitude of x (B, N_kv, rows, H) against the most there can be (B, N_kv, 1)."""
    return Deviation(x.abs().amax((2, 3)).unsqueeze(-1), 1.01 * most, 1.01 * most)
