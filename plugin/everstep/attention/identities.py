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

import torch

from .findings import Deviation
from .roundoff import accumulator, growth, underflow, unit_roundoff, vanishing
from .sums import FLAT, Sums, identity_sums, kernel_roundoff, mean_norm2

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


def _alike(total: torch.Tensor, squares: torch.Tensor, count: int) -> torch.Tensor:
    """1 where so many rows, of these sums (B, N_kv, H), differ so little that all may be rounded alike, else 0;
    (B, N_kv, 1)."""
    mean2 = squares.sum(-1, keepdim=True) / count
    apart = mean2 - (total / count).square().sum(-1, keepdim=True)
    return (apart <= FLAT**2 * mean2).to(squares.dtype)


def backward_deviation(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    lse: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    scale: float,
    *,
    plain_scores: bool = True,
    wide_sums: bool = False,
) -> Deviation:
    """The backward identities; residual (B, N_kv, columns).

    Columns of Σ dV - Σ dO and their norm; norms of the rows and of the columns of Vᵀ dV - Oᵀ dO; the largest of |dV|;
    with plain scores the same of Σ dK, and of dQᵀ Q - Kᵀ dK; the largest of |dK| and of |dQ|.

    Args:
        q, dq: (B, L, N, H); k, dk: (B, L, N_kv, H); v, dv: (B, L, N_kv, H_v); out, d_out: (B, L, N, H_v).
        lse: (B, L, N), -inf where a query sees no key; None: every query sees one.
        d_lse: gradient of lse (B, L, N), or None.
        plain_scores: False where the scores are changed further (a score_mod): only what is about V holds.
        wide_sums: whether the kernel adds up dK and dV, over all queries and the query heads of a group, in its
            accumulators.
    """
    groups = q.shape[2] // k.shape[2]
    rounded = 1.0 if wide_sums else math.sqrt(_roundings(k.shape[1], groups, q))
    stored = kernel_roundoff(q.dtype, q.device) * rounded
    sums = identity_sums(q, k, v, out, d_out, dq, dk, dv, lse, d_lse, scale)
    return compared(sums, k.shape[1], q.shape[1] * groups, q.dtype, scale, stored, plain_scores=plain_scores)


def compared(
    sums: Sums, length: int, count: int, dtype: torch.dtype, scale: float, stored: float, *, plain_scores: bool
) -> Deviation:
    """What the sums over `length` keys and `count` queries of a group say; see `backward_deviation`.

    stored: relative error of dK and dV as the kernel stores them.
    """
    queries, keys, values, side, _ = sums
    acc = keys.total.dtype
    tiny, unit32 = torch.finfo(acc).tiny, unit_roundoff(acc)
    q_most, k_most, v_most = (x.most2.sqrt() for x in (queries, keys, values))
    # The forward's S and the backward's agree to a few units of the largest score, and P with them.
    unit = stored + 8 * unit32 * (1 + scale * q_most * k_most) + unit32 * math.sqrt(count)
    # Sums in fp32 of terms of one sign; and of equal terms, rounded the same way at every step.
    summed = growth(count, dtype)
    value_dim, key_dim = values.total.shape[-1], keys.total.shape[-1]
    alike_v = _alike(values.total, values.squares, length)
    terms = side.terms + count * tiny
    v_norm2 = mean_norm2(values, length)
    do_norm = _root(side.square, count * value_dim, dtype)

    most_v = do_norm * math.sqrt(count)
    parts = [
        _sums(
            values.d_total - side.total,
            unit * _capped(torch.maximum(values.d_squares, terms), most_v * math.sqrt(length)),
            unit * (side.alike.abs() + side.total.abs() * alike_v) + summed * side.total.abs(),
            most_v,
        ),
        _matrix(
            side.product - values.product,
            side.product,
            side.of_rows + side.shared * values.squares / length + values.of_rows,
            side.of_columns + terms * v_norm2 + values.of_columns,
            unit,
            summed + 2 * unit * torch.maximum(_alike(values.d_total, values.d_squares, length), alike_v),
            most_v * math.sqrt(length) * v_most,
        ),
        _largest(values.d_most, most_v),
    ]
    if plain_scores:
        row_most = 2 * (side.largest2.sqrt() + underflow(value_dim, dtype)) * v_most + side.largest_lse
        most_q = scale * row_most * k_most
        q_norm = queries.squares.sum(-1, keepdim=True).sqrt()
        most_k = scale * row_most * math.sqrt(count) * q_norm
        # What rounding dS does to a column of dK, by dK itself and by dQ, which dS made as well.
        through_q = queries.of_rows / mean_norm2(keys, length)
        noise = _capped(torch.maximum(keys.d_squares, through_q), most_k * math.sqrt(length))
        sigma = unit * noise + scale * (side.rows + count * tiny).sqrt()
        same = torch.maximum(_alike(side.out_total, side.out_squares, count), 1.0 - side.varied)
        together = scale * side.alike_rows * (queries.total / count).abs() * same
        from_lse = scale * side.from_lse
        # Terms of dQ = dS K that cancel, where rows of K are much alike, leave what fp32 lost of them.
        cancelled = (4 + math.sqrt(length)) * unit32 * scale * side.pairs.sqrt() * v_most * k_most
        product = queries.product.mT
        parts += [
            _sums(keys.d_total - from_lse, DK * sigma, together + summed * from_lse.abs(), most_k),
            _matrix(
                product - keys.product,
                product,
                queries.of_columns + keys.of_rows,
                queries.of_rows + keys.of_columns,
                unit,
                summed,
                most_q * math.sqrt(count) * q_norm,
                cancelled,
            ),
            _largest(keys.d_most, most_k),
            _largest(queries.d_most, most_q),
        ]
    # What squares lose below the least normal number, and values of the narrow dtype do.
    lost = unit * underflow(count * (key_dim + value_dim), dtype) + count * vanishing(dtype)
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


def _matrix(apart, product, of_rows, of_columns, unit, summed, limit, lost=0.0) -> Deviation:
    """Norms of the rows and of the columns of a difference of two products (B, N_kv, 2 H).

    Args:
        product: one of the two.
        of_rows, of_columns: sums of squares of the terms of both, by row and by column.
        lost: what may be lost besides, of a whole row or column.
    """
    norm = torch.linalg.vector_norm
    residual = torch.cat([norm(apart, dim=-1), norm(apart, dim=-2)], -1)
    sigma = unit * _capped(torch.cat([of_rows, of_columns], -1), limit)
    shared = summed * torch.minimum(torch.cat([norm(product, dim=-1), norm(product, dim=-2)], -1), limit)
    return Deviation(residual, MATRIX * sigma + shared + lost, limit.expand_as(residual))


def _largest(found: torch.Tensor, most: torch.Tensor) -> Deviation:
    """The largest magnitude of a gradient against the most there can be (B, N_kv, 1)."""
    return Deviation(found, 1.01 * most, 1.01 * most)
