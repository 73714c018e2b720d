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
from dataclasses import dataclass

import torch

from .findings import Deviation
from .roundoff import accumulator, growth, unit_roundoff

SIGMAS = 3.5
"""Rounding errors of one column stay below so many times the estimate, which takes every rounding for the
largest possible: about three standard deviations of what they are."""

NORM_SIGMAS = 1.2
"""The same for the norm over all columns of a head, which varies less."""


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

    Each element of O may differ by two units of its own last place, by what sums of L terms in another order may, and
    by the rounding of P, which other tiles round at another scale: P's rows sum to 1, so that this is at most 2 u max |V|
    in a column. lse knows the first two alone. Runs of one deterministic kernel differ by nothing.

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


@dataclass(slots=True)
class OutputSide:
    """What the backward identities need of dO, O and dlse; sums over queries and the group's query heads.

    total, norm: Σ dO and its root of squares (B, N_kv, H). rounding: per query, what rounding O does to its
    row sum of dS (B, L, N). magnitude: |dO_i|₂ (B, L, N). inner: Σ dO·O (B, N_kv). lse: gradient of lse (B,
    L, N), or None.
    """

    total: torch.Tensor
    norm: torch.Tensor
    rounding: torch.Tensor
    magnitude: torch.Tensor
    inner: torch.Tensor
    lse: torch.Tensor | None


def output_side(
    d_out: torch.Tensor, out: torch.Tensor, d_lse: torch.Tensor | None, sees: torch.Tensor | None, n_kv: int
) -> OutputSide:
    """Sums over dO and O (B, L, N, H).

    Args:
        d_lse: gradient of lse (B, L, N), or None.
        sees: (B, L, N), False where a query sees no key; None where every query sees one.
        n_kv: key heads.
    """
    acc = accumulator(out.dtype)
    wide = d_out.to(acc)
    if sees is not None:
        wide = wide * sees.unsqueeze(-1)
    squares = wide.square()
    grouped = (wide.shape[0], wide.shape[1], n_kv, -1, wide.shape[3])
    unit = unit_roundoff(out.dtype) + 4 * unit_roundoff(acc)
    products = wide * out.to(acc)
    return OutputSide(
        total=wide.reshape(grouped).sum((1, 3)),
        norm=squares.reshape(grouped).sum((1, 3)).sqrt(),
        rounding=unit * torch.linalg.vector_norm(products, dim=-1),
        magnitude=squares.sum(-1).sqrt(),
        inner=products.sum(-1).reshape(grouped[:-1]).sum((1, 3)),
        lse=d_lse,
    )


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
) -> Deviation:
    """The three backward identities; residual (B, N_kv, H_v + 1 [+ H + 2]).

    Columns, then the norm over columns, of Σ dV - Σ dO; the same of Σ dK; last <dQ, Q> - <dK, K>.

    Args:
        q, dq: (B, L, N, H); k, dk: (B, L, N_kv, H); v, dv: (B, L, N_kv, H_v).
        plain_scores: False where the scores are changed further (a score_mod): only the first identity holds.
    """
    acc = accumulator(q.dtype)
    length, n_kv, groups = k.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    unit32 = unit_roundoff(acc)
    q_, k_, dv_ = q.to(acc), k.to(acc), dv.to(acc)
    by_group = (q.shape[0], length, n_kv, groups)

    q_norm = torch.linalg.vector_norm(q_, dim=-1)
    k_most = torch.linalg.vector_norm(k_, dim=-1).amax(1)
    largest = scale * q_norm.reshape(by_group).amax((1, 3)) * k_most
    # The forward's S and the backward's agree to a few units of the largest score, and P with them.
    scores = 8 * unit32 * (1 + largest).unsqueeze(-1)
    stored = 2 * unit_roundoff(q.dtype) if q.dtype != acc else 4 * unit32
    summed = unit32 * math.sqrt(length)
    # Query heads of a group may each be stored, and added up in the narrow dtype.
    of_group = 1.0 if groups == 1 else 1.5 + groups / 4
    # Sums of equal terms are rounded the same way at every step.
    alike = unit32 * (64 + 2 * length)

    # Norms of gradients are capped by what dO and the operands allow: an infinite gradient must not excuse
    # itself.
    most_v = side.norm * math.sqrt(length * groups)
    dv_norm = torch.minimum(dv_.square().sum(1).sqrt(), most_v)
    dv_total = dv_.sum(1)
    # A row of P whose scores are alike is rounded alike.
    sigma_v = (stored + scores) * (dv_norm + side.norm) + (scores + summed) * side.norm
    shared_v = (stored * of_group + scores + alike) * side.total.abs()
    parts = [_columns(dv_total - side.total, sigma_v, shared_v, most_v)]

    if plain_scores:
        dk_, dq_ = dk.to(acc), dq.to(acc)
        expected = torch.zeros_like(dk_[:, 0])
        q_grouped = q_.reshape(*by_group, -1)
        if side.lse is not None:
            expected = scale * torch.einsum("blng,blngh->bnh", side.lse.to(acc).reshape(by_group), q_grouped)
        v_ = v.to(acc)
        v_most = torch.linalg.vector_norm(v_, dim=-1).amax(1)
        # A row of dS whose terms are alike is rounded alike, too: a usual one of dP = dO · V for each row.
        v_usual = v_.square().mean((1, 3)).sqrt()
        of_row = (stored / 2 * v_usual + 2 * unit32 * v_most)[:, None, :, None]
        magnitude = side.magnitude.reshape(by_group)
        row = side.rounding.reshape(by_group) + magnitude * of_row
        q_squares = q_grouped.square()
        rows = torch.einsum("blng,blngh->bnh", row.square(), q_squares).sqrt()
        all_do = magnitude.square().sum((1, 3)).sqrt()
        most_k = 2 * scale * (all_do * v_most).unsqueeze(-1) * q_squares.sum((1, 3)).sqrt()
        dk_norm = torch.minimum(dk_.square().sum(1).sqrt(), most_k)
        sigma_k = (stored * of_group + scores + summed) * dk_norm + scale * rows
        mean_q = q_grouped.mean((1, 3)).abs()
        together = math.sqrt(v.shape[-1]) * row.sum((1, 3)) + alike * side.inner.abs()
        shared_k = scale * mean_q * together.unsqueeze(-1)
        parts.append(_columns(dk_.sum(1) - expected, sigma_k, shared_k, most_k))

        of_q = (dq_ * q_).reshape(*by_group, -1)
        of_k = dk_ * k_
        inner_q, inner_k = of_q.sum((1, 3, 4)), of_k.sum((1, 3))
        limit = torch.linalg.vector_norm(most_k, dim=-1) * k_most
        size = of_q.square().sum((1, 3, 4)).sqrt() + of_k.square().sum((1, 3)).sqrt()
        # Terms of dQ = dS K that cancel, where rows of K are much alike, leave their roundings.
        terms = (magnitude * q_norm.reshape(by_group)).square().sum((1, 3)).sqrt() * v_usual * scale * k_most
        # And dS may be rounded for one of the two products only.
        sigma = (stored * (of_group + 1) + summed) * torch.minimum(size, 2 * limit) + (4 * unit32 + summed) * terms
        inner = torch.minimum(torch.maximum(inner_q.abs(), inner_k.abs()), limit)
        shared = (stored + summed + alike) * inner
        parts.append(
            Deviation(
                (inner_q - inner_k).unsqueeze(-1),
                (SIGMAS * sigma + shared).unsqueeze(-1),
                limit.unsqueeze(-1),
            )
        )
    tiny = torch.finfo(q.dtype).tiny * length
    return Deviation(
        torch.cat([part.residual for part in parts], -1),
        torch.cat([part.bound for part in parts], -1) + tiny,
        torch.cat([part.scale for part in parts], -1),
    )


def _columns(residual: torch.Tensor, sigma: torch.Tensor, shared: torch.Tensor, scale: torch.Tensor) -> Deviation:
    """Residual columns (..., H) with the norm over them as one column more."""
    norm = torch.linalg.vector_norm
    return Deviation(
        torch.cat([residual, norm(residual, dim=-1, keepdim=True)], -1),
        torch.cat(
            [
                SIGMAS * sigma + shared,
                NORM_SIGMAS * norm(sigma, dim=-1, keepdim=True) + norm(shared, dim=-1, keepdim=True),
            ],
            -1,
        ),
        torch.cat([scale, norm(scale, dim=-1, keepdim=True)], -1),
    )
