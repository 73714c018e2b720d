"""Identities that the inputs and outputs of any attention kernel satisfy, however it works inside.

Let O = P V with P = softmax(scale · Q Kᵀ + mask), without dropout, and let dO, dQ, dK, dV be given. For every sequence
and key head, with the query heads of a group added up:

    Σ_j dV_j = Σ_i dO_i                      rows of P sum to 1 (rows that see nothing left out)
    Σ_j dK_j = scale · Σ_i dlse_i Q_i        rows of dS sum to dlse, which is 0 where lse has no gradient
    Σ_i (Q_i·s) dQ_i = Σ_j (dK_j·s) K_j      for any s, as dQᵀ Q = Kᵀ dK: both are scale · Σ_ij dS_ij K_j Q_iᵀ

The identities compare the backward, which computes S again, with the O and lse of the forward. They cost one or two
passes over each (L, H) tensor and no change to the kernel. They find an error, but not the wrong element.

They cannot see every error of the forward. Suppose the forward loses key j from row i, because a score becomes -inf,
and let p be the weight that the key should have. Then Σ dV - Σ dO is p/(1-p)·dO_i: the share of one row in a sum over
all rows. Beside it is the rounding of P and dV to the kernel's dtype, which for bf16 hides a p of several percent. No
sum of O(L·H) terms sees more. The forward therefore runs twice, the second time on a few sums of V's columns, and both
runs are compared (`agreement_deviation`).

The bounds follow the data. A kernel rounds P and dS to its dtype before it multiplies them, and rounds what it stores.
While rows differ, these errors are independent, and their sums grow with Euclidean norms. A row that is nearly the row
before it (one token repeated, in a layer without positions) is rounded alike. Each of n such rows counts n-fold in a
sum of squares, which is then at least the square of their plain sum (Cauchy and Schwarz).
"""

import math
from collections.abc import Sequence

import torch

from . import product
from .findings import Deviation
from .roundoff import accumulator, growth, norms, operand_roundoff, underflow, unit_roundoff, vanishing

ALIKE = 1 / 16
"""Relative difference below which rows, or scores, may be rounded alike in bf16."""

COLUMN, COLUMN_NARROW = 6.5, 2.4
"""The rounding errors of one column stay below this multiple of their estimate, in a wide and in a narrow dtype. The
estimate takes each rounding to be as large as possible. The bound is at least six standard deviations of the errors."""

ISOTROPIC, ONE_WAY = 0.4, 2.4
"""The same factors for the norm over all columns of a head: if the rows point in all directions, which averages over
columns, and if all point in one, because of one channel or a common offset. `_of_norm` interpolates."""

DK = 0.52
"""A further factor for dK, whose estimate is the sum of three roundings, each as large as possible."""

SUMS = 15
"""Sums of a row of V, and of O, by which two runs of a forward are compared."""

OF_P, OF_O = 3.0, 8.0
"""Units of the kernel's dtype by which these sums may differ: as shares of the size of V's rows under P, and as shares
of the sums themselves."""

PROBES, PROBED, PROBED_NARROW = 4, 2.6, 2.0
"""Number of vectors s, which are signs without a pattern. The factors for the norm of one column over all of them, with
`wide_sums` and without."""


def probing_values(v: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the values that a second run of a kernel takes in place of V (B, L, N_kv, H_v): (B, L, N_kv, columns).

    The columns are up to SUMS sums of each row under signs, then the root of their mean square, then zeros. From the
    root the run computes how large an error rounding P can cause.
    """
    sums = _signed_sums(v)[..., : columns - 1]
    size = norms(sums, -1).unsqueeze(-1) / math.sqrt(sums.shape[-1])
    both = torch.cat([sums.to(v.dtype), size.to(v.dtype)], -1)
    return torch.nn.functional.pad(both, (0, columns - both.shape[-1]))


def _signed_sums(x: torch.Tensor) -> torch.Tensor:
    """Return sums of the rows of x (..., H) under signs, in the accumulator dtype (..., SUMS). They are scaled, so that
    none is larger than the largest element of x."""
    acc = accumulator(x.dtype)
    # Scaling by a power of two rounds nothing, and keeps fp16 within its range.
    signs = product.signs(x.shape[-1], x.dtype, x.device)[:, :SUMS] * 2.0 ** -math.ceil(math.log2(x.shape[-1]))
    if x.dtype == acc or x.device.type == "cpu":
        return x.to(acc) @ signs.to(acc)
    return product.narrow_product(x.flatten(0, -2), signs, acc).unflatten(0, x.shape[:-1])


def agreement_deviation(
    q: torch.Tensor,
    k: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    again: torch.Tensor,
    lse_again: torch.Tensor | None,
    scale: float,
) -> Deviation:
    """Return how far two runs of one forward differ; residual (B, L, N), or (B, L, 2 N) with lse.

    The second run had `probing_values` in place of V and the same P, so it must give the same sums of O's rows. The
    bound allows that the runs round P at different scales, and add up terms of O and of scores in a different order,
    and that O and the probing values are rounded.

    Args:
        q: (B, L, N, H). k: (B, L, N_kv, H). out: (B, L, N, H_v). again: (B, L, N, columns).
        lse, lse_again: (B, L, N), or None.
    """
    acc = accumulator(out.dtype)
    seen = _signed_sums(out)
    count = min(seen.shape[-1], again.shape[-1] - 1)
    expected, size = again[..., :count].to(acc), again[..., count].to(acc)
    unit = max(unit_roundoff(out.dtype) if out.dtype != acc else 0.0, operand_roundoff(out.dtype, out.device))
    order = growth(again.shape[1], out.dtype)
    own = norms(expected, -1) / math.sqrt(count)
    if out.dtype == acc:  # beside a narrow dtype's unit the errors of scores are negligible
        k_most = norms(k, -1).amax(1, keepdim=True).repeat_interleave(q.shape[2] // k.shape[2], 2)
        order = order + 8 * unit_roundoff(acc) * (1 + scale * norms(q, -1).amax(1, keepdim=True) * k_most)
    bound = (OF_P * unit + order) * size + OF_O * unit * own + 2 * vanishing(out.dtype) + torch.finfo(acc).tiny
    found = Deviation((seen[..., :count] - expected).abs().amax(-1), bound)
    if lse is None or lse_again is None:
        return found
    same = lse == lse_again
    apart = torch.where(same, torch.zeros_like(lse), lse - lse_again).abs()
    largest = 1 + torch.where(lse_again.isfinite(), lse_again, torch.zeros_like(lse)).abs().amax(1, keepdim=True)
    return joined(found, Deviation(apart, (order * largest).expand_as(apart)))


def joined(*parts: Deviation) -> Deviation:
    """Return one Deviation with all parts along the last dimension."""
    return Deviation(torch.cat([part.residual for part in parts], -1), torch.cat([part.bound for part in parts], -1))


def kernel_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative error of results that a kernel stores in `dtype`, and of its partial sums if rounded too."""
    if dtype == accumulator(dtype):
        return 4 * unit_roundoff(dtype)
    return unit_roundoff(dtype) * (4 if operand_roundoff(dtype, device) else 1)


def _roundings(length: int, groups: int, like: torch.Tensor) -> float:
    """Return how often dK and dV are rounded, by a kernel without `wide_sums`. PyTorch's CPU kernel adds up blocks of
    queries in the narrow dtype, one head of a group after the other, so a part is rounded with half of the heads on
    average. Other kernels round the parts of heads."""
    blocks = 1
    if like.device.type == "cpu" and like.dtype != accumulator(like.dtype):
        blocks = math.ceil(length / (256 if length >= 768 else 64 if length >= 192 else 32))
    return blocks * (groups + 1) / 2 + (groups > 1)


def _by_head(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (B, L, N_kv, G, ...) as (B, N_kv, L·G, ...)."""
    return rows.transpose(1, 2).flatten(2, 3)


class _Rows:
    """The rows of x (B, L, N, H) by key head: all query heads of a group are rows of one matrix.

    given: (B, L, N_kv, G, H), and wide: (B, N_kv, L·G, H), both in the accumulator dtype. norm2: |x_i|².
    alike: 1 if a row is nearly the row before it of the same head, else 0. follows: 1 if the row before it is alike
    too, else 0. probes: x_i · s for each s. These four are (B, N_kv, L·G).
    """

    def __init__(self, x: torch.Tensor, n_kv: int, *, probed: bool = False) -> None:
        b, length, n, h = x.shape
        groups = n // n_kv
        self.given = given = x.to(accumulator(x.dtype)).reshape(b, length, n_kv, groups, h)
        self.wide = _by_head(given)
        # Computed in the order of x and in one shape, so that a compiler makes one pass of them.
        self.norm2 = _by_head(given.square().sum(-1))
        apart2 = _by_head((given - given.roll(1, 1)).square().sum(-1))
        signs = product.signs(h, given.dtype, x.device)[:, : PROBES * probed]
        self.probes = [_by_head((given * s).sum(-1)) for s in signs.unbind(-1)]
        second = torch.arange(length * groups, device=x.device) >= groups
        self.alike = ((apart2 <= ALIKE**2 * self.norm2) & second).to(given.dtype)
        self.follows = self.alike * self.alike.roll(groups, -1)


def _sums(*rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return sums over the rows (B, N_kv, rows) of each tensor: (B, N_kv, 1). They are one call of the device."""
    return torch.stack(rows).sum(-1, keepdim=True).unbind()


def _weighed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return sums of rows (B, N_kv, rows, H), each with its weight (B, N_kv, rows): (B, N_kv, H)."""
    # CPUs are fast at matrix products. But a compiler fuses only a sum with what computes its terms, into one pass.
    if torch.compiler.is_compiling():
        return (weight.unsqueeze(-1) * rows).sum(-2)
    return (weight.unsqueeze(-2) @ rows).squeeze(-2)


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each column over these tensors."""
    first, *others = (part.square() for part in parts)
    return sum(others, first).sqrt()


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
    """Return how far a backward is from the identities; residual (B, N_kv, columns).

    The columns are those of Σ dV - Σ dO and, with plain scores, the norm of Σ dK and the columns of the probes' sums.

    Args:
        q, dq: (B, L, N, H); k, dk: (B, L, N_kv, H); v, dv: (B, L, N_kv, H_v); out, d_out: (B, L, N, H_v).
        lse: (B, L, N), -inf where a query sees no key; None: every query sees one.
        d_lse: gradient of lse (B, L, N), or None.
        plain_scores: False if the scores are changed further (a score_mod), or only lost rows of P are looked for. Then
            dq and dk are not read.
        wide_sums: whether the kernel adds up dK and dV, over all queries and the query heads of a group, in its
            accumulators.
    """
    dtype, acc, n_kv, keys = q.dtype, accumulator(q.dtype), k.shape[2], k.shape[1]
    groups, key_dim, value_dim = q.shape[2] // n_kv, q.shape[3], v.shape[3]
    count = q.shape[1] * groups
    tiny, wide_unit = torch.finfo(acc).tiny, unit_roundoff(acc)
    once = kernel_roundoff(dtype, q.device)
    stored = once if wide_sums else once * math.sqrt(_roundings(keys, groups, q))
    if lse is not None:
        d_out = torch.where((lse > -torch.inf).unsqueeze(-1), d_out, 0)
    outs, d_outs, of_keys, values, d_values = (_Rows(x, n_kv) for x in (out, d_out, k, v, dv))
    queries = _Rows(q, n_kv, probed=plain_scores)
    # If scores are not plain, nothing below reads these.
    d_queries, d_keys, of_k = queries, queries, [queries.norm2]
    delta = crossed = dk_square = weight_dk = k_columns = queries.norm2
    if plain_scores:
        # Rows of dS sum to the error of delta = rowsum(dO ∘ O): O is rounded, and was made from a rounded P.
        products = d_outs.given * outs.given
        delta = _by_head(products.sum(-1)).abs()
        crossed = _by_head(products.square().sum(-1)).sqrt() + underflow(value_dim, dtype)
        d_queries, d_keys = _Rows(dq, n_kv), _Rows(dk, n_kv, probed=True)
    q_most = queries.norm2.amax(-1, keepdim=True).sqrt()
    k_most, v_most = torch.stack([of_keys.norm2, values.norm2]).amax(-1, keepdim=True).sqrt().unbind()
    # A row counts once in a sum of squares. An alike row counts as often as alike rows can follow one another.
    k_square, v_square, of_runs = _sums(of_keys.norm2, values.norm2, d_values.follows)
    weight_dv = 1 + d_values.alike * (1 + of_runs)
    d_square, q_square, alike, of_runs = _sums(d_outs.norm2, queries.norm2, d_outs.alike, d_outs.follows)
    # Alike rows of dO are alike in every partial sum of dV and dK that a kernel rounds.
    together = 1 + alike * (1 + of_runs) / count
    weight_dv = weight_dv.maximum(together)
    if plain_scores:
        dk_square, dk_runs = _sums(d_keys.norm2, d_keys.follows)
        weight_dk = (1 + d_keys.alike * (1 + dk_runs)).maximum(together)
        of_k = [_weighed(of_keys.wide, weight) for weight in d_keys.probes]
        k_columns = _weighed(of_keys.wide.square(), weight_dk * d_keys.norm2)

    # S of the forward and S of the backward agree to a few units of the largest score, and so does P.
    rest = 8 * wide_unit * (1 + scale * q_most * k_most) + wide_unit * math.sqrt(count)
    unit, unit_once = stored + rest, once + rest
    summed = growth(count, dtype)  # for terms of one sign
    # If the scores of a row of P are all but equal, its elements are rounded alike. Else it has as many independent
    # roundings as large elements. |O|² / mean |V|² is about Σ_j P_ij².
    do_norm, q_norm = d_outs.norm2.sqrt() + underflow(value_dim, dtype), queries.norm2.sqrt()
    middle = of_keys.wide.mean(2).square().sum(-1, keepdim=True)
    spread = ((k_square / keys - middle).clamp_min(0.0) / key_dim).sqrt()
    flat = (scale * q_norm * spread < ALIKE).to(acc)
    v_norm2 = v_square / keys + tiny
    same_p = flat.maximum(queries.alike)
    spread_p = (outs.norm2 / v_norm2 + 1.0 / keys).clamp_max(1.0)
    share = spread_p.maximum(same_p)
    same = queries.alike.maximum(flat * d_outs.alike)
    alike, of_runs = _sums(same, same * same.roll(groups, -1))
    counted = 1 + same * (1 + of_runs)
    # The share of the rounding error that comes from alike rows. It may be the same in every column of dK.
    common = 1.0 - count / (count + alike * (1 + of_runs))

    # Stacked, or a compiler computes them anew for each column. `total` is summed in two parts, in the squares' pass.
    same_p, other_p, noisy = torch.stack([same_p, 1 - same_p, counted * share]).unbind()
    of_same = _weighed(d_outs.wide, same_p)
    total = of_same + _weighed(d_outs.wide, other_p)
    column = COLUMN if dtype == acc else COLUMN_NARROW
    most_v = (d_square.sqrt() + underflow(count * value_dim, dtype)) * math.sqrt(count)
    rounded_once = (unit_once / unit).square()  # P and dS are, however often sums of them are rounded
    through_p = rounded_once * _weighed(d_outs.wide.square(), noisy)
    d_columns = _weighed(d_values.wide.square(), weight_dv) + tiny
    noise = d_columns + through_p + count * tiny
    # Partial sums of dV that are the same for all keys (because all queries share one dO) are rounded in one direction.
    in_part = total.abs() * (total.square() / (keys * d_columns)).clamp_max(1.0)
    if groups > 1 and not wide_sums:  # so are the partial sums of heads, even if these cancel
        of_heads = d_outs.wide.unflatten(2, (-1, groups)).sum(2).square().sum(2).sqrt()
        in_part = in_part.maximum(of_heads - total.abs())
    shared = unit_once * of_same.abs() + 2 * summed * total.abs() + 0.75 * (stored - once) * in_part
    parts = [
        Deviation(
            d_values.wide.sum(2) - total,
            column * unit * _capped(noise, most_v * math.sqrt(keys)) + torch.minimum(shared, most_v),
        )
    ]
    if plain_scores:
        of_p = spread_p.sqrt() * do_norm * (v_norm2 / value_dim).sqrt() + share.sqrt() * delta
        of_scores = 8 * wide_unit * scale * q_norm * k_most
        row = (once + 4 * wide_unit) * (crossed + of_p) + of_scores * of_p
        from_lse = largest_lse = torch.zeros_like(spread)
        if d_lse is not None:
            d_lse_rows = _Rows(d_lse.unsqueeze(-1), n_kv).wide
            from_lse = scale * (d_lse_rows * queries.wide).sum(2)
            largest_lse = d_lse_rows.abs().amax(2)
        row_most = 2 * do_norm.amax(-1, keepdim=True) * v_most + largest_lse
        most_q = scale * row_most * k_most
        q_size = (count * q_square).sqrt()
        most_k = scale * row_most * q_size
        weight_dq = 1 + d_queries.alike * (1 + d_queries.follows.sum(-1, keepdim=True))
        # The error of dK from rounding dS is estimated from dK itself and from dQ, which dS made as well (through_q).
        # pairs: the size of the terms of dQ = dS K.
        through_q, rows, pairs = _sums(
            weight_dq * d_queries.norm2 * queries.norm2,
            counted * row.square() * queries.norm2,
            d_outs.norm2 * queries.norm2,
        )
        through_q = rounded_once * through_q / (k_square / keys + tiny)
        squares = torch.maximum((weight_dk * d_keys.norm2).sum(-1, keepdim=True), through_q)
        rows = (rows + count * key_dim * tiny).sqrt()
        sigma = DK * (unit * _capped(squares, most_k * math.sqrt(keys)) + scale * rows)
        norm = torch.linalg.vector_norm
        of_lse = summed * torch.minimum(norm(from_lse, dim=-1, keepdim=True), most_k)
        # If rows of K are much alike, these terms cancel, and what remains is the accumulator's error.
        cancelled = (4 + math.sqrt(keys)) * wide_unit * scale * pairs.sqrt() * v_most * k_most
        of_queries = [_weighed(d_queries.wide, weight) for weight in queries.probes]
        most = most_q * q_size
        of_probes = rounded_once * _weighed(d_queries.wide.square(), weight_dq * queries.norm2)  # dQ is summed wide
        of_probes = unit * _capped(of_probes + k_columns, most)
        alike_terms = summed * torch.minimum(_together(of_queries), math.sqrt(PROBES) * most)
        parts += [
            Deviation(
                norm(d_keys.wide.sum(2) - from_lse, dim=-1, keepdim=True),
                _of_norm(dk, dk_square, common) * sigma + 2 * of_lse,
            ),
            Deviation(
                _together([a - b for a, b in zip(of_queries, of_k, strict=True)]),
                math.sqrt(PROBES) * ((PROBED if wide_sums else PROBED_NARROW) * of_probes + cancelled) + alike_terms,
            ),
        ]
    # The part that squares lose below the least normal number, and that values of the narrow dtype lose.
    lost = unit * underflow(count * (key_dim + value_dim), dtype) + count * vanishing(dtype)
    found = joined(*parts)
    return Deviation(found.residual, found.bound + (1 + q_most + k_most + v_most) * lost)


def _capped(squares: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Return a root of squares, at most what the operands allow: an infinite gradient must not widen its own bound."""
    return torch.minimum(squares.sqrt(), most)


def _of_norm(gradient: torch.Tensor, square: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """Return the multiple of its estimate by which the norm of a sum of rows may be off (B, N_kv, 1).

    The more the rows of a head point in one direction, the larger it is. This is measured, from 1 / √H to 1, by the
    root of the squared inner products of all pairs of rows, as a share of the products of their squared lengths. If
    rows are too short to be squared, one direction is assumed. gradient: the rows (B, L, N_kv, H). square: the sum of
    their squares. common: the share of the estimate, 0 to 1, that may be the same in every column.
    """
    acc, most_ways = accumulator(gradient.dtype), 1 / math.sqrt(gradient.shape[-1])
    by_head = gradient.permute(0, 2, 1, 3).flatten(0, 1)
    if gradient.dtype != acc and gradient.device.type != "cpu":
        gram = product.narrow_product(by_head.mT, by_head, acc)
    else:
        gram = by_head.to(acc).mT @ by_head.to(acc)
    apart = torch.linalg.vector_norm(gram / (square.view(-1, 1, 1) + torch.finfo(acc).tiny), dim=(-2, -1))
    one_way = torch.where(square > 1e6 * torch.finfo(acc).tiny, apart.view_as(square).clamp_max(1.0), 1.0)
    one_way = (one_way - most_ways).clamp_min(0.0) / max(1 - most_ways, most_ways)
    factor = ISOTROPIC * (1 + 5 * most_ways) + (ONE_WAY - ISOTROPIC) * one_way
    return factor + (COLUMN - factor) * common
