"""What the inputs and outputs of any attention kernel must satisfy, whatever it does inside.

For O = P V with P = softmax(scale · Q Kᵀ + mask), without dropout, and given dO, dQ, dK, dV, for every sequence and key
head, query heads of a group added up:

    Σ_j dV_j = Σ_i dO_i                      rows of P sum to 1 (rows that see nothing left out)
    Σ_j dK_j = scale · Σ_i dlse_i Q_i        rows of dS sum to dlse, which is 0 where lse has no gradient
    Σ_i (Q_i·s) dQ_i = Σ_j (dK_j·s) K_j      for any s, as dQᵀ Q = Kᵀ dK: both are Σ_ij dS_ij q_i k_jᵀ, turned

They compare the backward, which makes S again, with the O and lse that the forward left. They cost one or two passes
over each (L, H) tensor, and no change to the kernel. They detect; they do not say which element is wrong.

What they cannot see: let the forward lose key j from row i, as a score that becomes -inf does, and let p be the weight
that key should have. Σ dV - Σ dO is then p/(1-p)·dO_i, one row's share of a sum over all rows, beside the rounding of P
and dV to the kernel's dtype: bf16's hides p of several percent. No sum of O(L·H) terms is finer. The forward is
therefore run twice, the second time on a few sums of V's columns, and compared (`agreement_deviation`).

The bounds follow the data. A kernel rounds P and dS to its dtype before it multiplies them, and rounds what it stores.
Such errors are independent, and their sums grow with Euclidean norms, as long as rows differ. Rows that are nearly
those before them (one token repeated, in a layer without positions) are rounded alike: n of them count n-fold in a sum
of squares, which is then at least the square of their plain sum (Cauchy and Schwarz).
"""

import math

import torch

from . import product
from .findings import Deviation
from .roundoff import accumulator, growth, norms, operand_roundoff, underflow, unit_roundoff, vanishing

ALIKE = 1 / 16
"""Rows, or scores, that differ by less than this share may be rounded alike in bf16."""

COLUMN, COLUMN_NARROW, COLUMN_ONCE = 6.5, 3.6, 2.4
"""Rounding errors of one column stay below so many times the estimate, which takes every rounding for the largest
possible: at least eight standard deviations of what they are. Where a wide dtype is summed, where partial sums are
rounded to a narrow one, and where the whole sum is rounded once."""

ISOTROPIC, ONE_WAY = 0.4, 2.4
"""The same for the norm over all columns of a head: where the rows point every way, which averages over columns, and
where all point one way, as one channel or a common offset has it. Between the two by `_concentration`."""

DK = 0.52
"""All of this for dK, whose estimate is the sum of three roundings, each at its largest."""

SUMS = 15
"""Sums of a row of V, and of O, by which two runs of a forward are compared."""

OF_P, OF_O = 3.0, 8.0
"""By how many units of the kernel's dtype they may differ: of what P makes of V's rows, and of themselves."""

PROBES, PROBED = 4, 2.6
"""How many s there are, of signs without a pattern; the same factor for the norm of one column over all of them."""


def probing_values(v: torch.Tensor, columns: int) -> torch.Tensor:
    """What a second run of a kernel takes in place of V (B, L, N_kv, H_v): (B, L, N_kv, columns).

    Sums of each row under signs, then the root of their mean square, which P turns into what its rounding can do; 0 in
    columns beyond SUMS + 1.
    """
    sums = _signed_sums(v)[..., : columns - 1]
    size = sums.square().mean(-1, keepdim=True).sqrt()
    return torch.nn.functional.pad(torch.cat([sums, size], -1), (0, columns - 1 - sums.shape[-1])).to(v.dtype)


def _signed_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of x (..., H) under signs, in the accumulator dtype (..., SUMS); none beyond x's largest."""
    acc = accumulator(x.dtype)
    # A power of two, by which nothing is rounded, keeps what fp16 is given within its range.
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
    """How far two runs of one forward differ beyond rounding; residual (B, L, N [· 2]).

    The second run had `probing_values` for V: the same P, so that it must give the same sums of O's rows. Both runs may
    round P at scales of their own and add up their terms, and those of scores, in another order; O is rounded, and so
    is what stood for V.

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
    own = expected.square().mean(-1).sqrt()
    if out.dtype == acc:  # beside a narrow unit what scores are off by is nothing
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
    """All of them, along the last dimension."""
    return Deviation(torch.cat([part.residual for part in parts], -1), torch.cat([part.bound for part in parts], -1))


def kernel_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Relative error of what a kernel stores in `dtype`; partial sums included where they are rounded as well."""
    if dtype == accumulator(dtype):
        return 4 * unit_roundoff(dtype)
    return unit_roundoff(dtype) * (4 if operand_roundoff(dtype, device) else 1)


def _roundings(length: int, groups: int, like: torch.Tensor) -> float:
    """How often dK and dV are rounded, where not once. PyTorch's CPU kernel adds up blocks of queries in the narrow
    dtype, one head of a group after the other: half of them on average. Other kernels round the parts of heads."""
    blocks = 1
    if like.device.type == "cpu" and like.dtype != accumulator(like.dtype):
        blocks = math.ceil(length / (256 if length >= 768 else 64 if length >= 192 else 32))
    return blocks * (groups + 1) / 2 + (groups > 1)


class _Rows:
    """The rows of x (B, L, N, H) by key head: all query heads of a group are rows of one matrix.

    wide: (B, N_kv, L·G, H) in the accumulator dtype. norm2: |x_i|² (B, N_kv, L·G). alike: whether a row is nearly
    the one before it of the same head, likewise.
    """

    def __init__(self, x: torch.Tensor, n_kv: int) -> None:
        b, length, n, h = x.shape
        groups = n // n_kv
        wide = x.to(accumulator(x.dtype)).reshape(b, length, n_kv, groups, h)
        self.wide = wide.transpose(1, 2).flatten(2, 3)
        self.squares = self.wide.square()
        self.norm2 = self.squares.sum(-1)
        # In the shape of the norms, so that a compiler makes both in one pass.
        apart2 = (self.wide - self.wide.roll(groups, 2)).square().sum(-1)
        follows = torch.arange(length * groups, device=x.device) >= groups
        self.alike = (apart2 <= ALIKE**2 * self.norm2) & follows

    def longest(self) -> torch.Tensor:
        """The largest |x_i| (B, N_kv, 1)."""
        return self.norm2.amax(-1, keepdim=True).sqrt()


def _counted(alike: torch.Tensor) -> torch.Tensor:
    """How much each row (B, N_kv, rows) counts in a sum of squares: 1, and those that are alike as many as they are."""
    return 1.0 + alike * alike.sum(-1, keepdim=True)


def _weighed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sums of rows (B, N_kv, rows, H), each with its weight (B, N_kv, rows): (B, N_kv, H).

    A matrix product, which a CPU is fast at; a compiler makes sums one pass with what they are of, and a product two.
    """
    if torch.compiler.is_compiling():
        return (weight.unsqueeze(-1) * rows).sum(-2)
    return (weight.unsqueeze(-2) @ rows).squeeze(-2)


def _concentration(x: torch.Tensor) -> torch.Tensor:
    """How much the rows of x (B, L, N, H) of a head point one way, from 1 / √H to 1 (B, N, 1): the root of the share of
    two rows' squared inner products in that of their lengths."""
    acc = accumulator(x.dtype)
    by_head = x.permute(0, 2, 1, 3).flatten(0, 1)
    if x.dtype != acc and x.device.type != "cpu":
        gram = product.narrow_product(by_head.mT, by_head, acc)
    else:
        gram = by_head.to(acc).mT @ by_head.to(acc)
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    apart = torch.linalg.vector_norm(gram / (size.view(-1, 1, 1) + torch.finfo(acc).tiny), dim=(-2, -1))
    # Of rows too short to be squared nothing is known.
    known = size > 1e6 * torch.finfo(acc).tiny
    return torch.where(known, apart.clamp_max(1.0), 1.0).view(x.shape[0], x.shape[2], 1)


def _probed(by: _Rows, rows: _Rows) -> torch.Tensor:
    """Σ_i (by_i · s) rows_i for each s: (B, N_kv, PROBES, H)."""
    signs = product.signs(by.wide.shape[-1], by.wide.dtype, by.wide.device)[:, :PROBES]
    return torch.stack([_weighed(rows.wide, (by.wide * s).sum(-1)) for s in signs.unbind(-1)], -2)


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

    Columns of Σ dV - Σ dO and their norm; with plain scores the norm of Σ dK and columns of the probes' sums.

    Args:
        q, dq: (B, L, N, H); k, dk: (B, L, N_kv, H); v, dv: (B, L, N_kv, H_v); out, d_out: (B, L, N, H_v).
        lse: (B, L, N), -inf where a query sees no key; None: every query sees one.
        d_lse: gradient of lse (B, L, N), or None.
        plain_scores: False where the scores are changed further (a score_mod), or only lost rows of P are looked for:
            then dq and dk are not read.
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
    queries, outs, d_outs, of_keys, values, d_values = (_Rows(x, n_kv) for x in (q, out, d_out, k, v, dv))
    q_most, k_most, v_most = queries.longest(), of_keys.longest(), values.longest()

    # The forward's S and the backward's agree to a few units of the largest score, and P with them.
    unit = stored + 8 * wide_unit * (1 + scale * q_most * k_most) + wide_unit * math.sqrt(count)
    summed = growth(count, dtype)  # of terms of one sign
    # A row of P whose scores are all but equal is rounded alike; else its roundings are as many as it has large terms,
    # and |O|² / mean |V|² is about Σ_j P_ij².
    do_norm, q_norm = d_outs.norm2.sqrt() + underflow(value_dim, dtype), queries.norm2.sqrt()
    spread = (of_keys.wide - of_keys.wide.mean(2, keepdim=True)).abs().mean(-1).mean(-1, keepdim=True)
    flat = scale * q_norm * spread < ALIKE
    v_norm2 = values.norm2.mean(-1, keepdim=True) + tiny
    same_p = flat | queries.alike
    share = torch.where(same_p, 1.0, (outs.norm2 / v_norm2 + 1.0 / keys).clamp_max(1.0))
    counted = _counted(queries.alike | (flat & d_outs.alike))
    # Alike rows of dO are alike in every partial sum of dV and dK that a kernel rounds.
    together = _counted(d_outs.alike).mean(-1, keepdim=True)
    # Of all that rounding does, the share that alike rows do: to every column in the same measure.
    common = 1.0 - count / counted.sum(-1, keepdim=True)

    of_same, total = _weighed(d_outs.wide, same_p.to(acc)), d_outs.wide.sum(2)
    if torch.compiler.is_compiling():  # two parts of one sum, which are made in the pass that adds up squares
        total = of_same + _weighed(d_outs.wide, 1 - same_p.to(acc))
    d_square = d_outs.norm2.sum(-1, keepdim=True)
    most_v = (d_square.sqrt() + underflow(count * value_dim, dtype)) * math.sqrt(count)
    rounded_once = (1 - (stored - once) / unit).square()  # as P and dS are, however often sums of them
    through_p = rounded_once * _weighed(d_outs.squares, counted * share)
    weight_dv = _counted(d_values.alike).maximum(together)
    noise = _weighed(d_values.squares, weight_dv) + through_p + count * tiny
    if groups > 1 and not wide_sums:  # heads whose parts of dV cancel: of each at least its sum, spread over all keys
        of_heads = d_outs.wide.unflatten(2, (-1, groups)).sum(2).square().sum(2)
        noise = noise + weight_dv.mean(-1, keepdim=True) * of_heads / keys
    shared = unit * of_same.abs() + summed * total.abs()
    parts = [
        _columns(
            d_values.wide.sum(2) - total,
            unit * _capped(noise, most_v * math.sqrt(keys)),
            torch.minimum(shared, most_v),
            COLUMN if dtype == acc else COLUMN_ONCE if wide_sums else COLUMN_NARROW,
            _of_norm(dv, common),
        ),
    ]
    if plain_scores:
        d_queries, d_keys = _Rows(dq, n_kv), _Rows(dk, n_kv)
        # delta = rowsum(dO ∘ O) takes O rounded, and O was made of a rounded P: what a row of dS then sums to.
        delta = (d_outs.wide * outs.wide).sum(-1).abs()
        of_p = share.sqrt() * (do_norm * (v_norm2 / value_dim).sqrt() + delta)
        of_scores = 8 * wide_unit * scale * q_norm * k_most
        crossed = (d_outs.squares * outs.squares).sum(-1).sqrt() + underflow(value_dim, dtype)
        row = (once + 4 * wide_unit) * (crossed + of_p) + of_scores * of_p
        from_lse, largest_lse = torch.zeros_like(queries.wide[:, :, 0]), torch.zeros_like(spread)
        if d_lse is not None:
            d_lse_rows = _Rows(d_lse.unsqueeze(-1), n_kv).wide
            from_lse = scale * (d_lse_rows * queries.wide).sum(2)
            largest_lse = d_lse_rows.abs().amax(2)
        row_most = 2 * do_norm.amax(-1, keepdim=True) * v_most + largest_lse
        most_q = scale * row_most * k_most
        q_size = queries.norm2.sum(-1, keepdim=True).sqrt()
        most_k = scale * row_most * math.sqrt(count) * q_size
        weight_dq, weight_dk = _counted(d_queries.alike), _counted(d_keys.alike).maximum(together)
        # What rounding dS does to dK, by dK itself and by dQ, which dS made as well.
        through_q = (weight_dq * d_queries.norm2 * queries.norm2).sum(-1, keepdim=True)
        through_q = rounded_once * through_q / (of_keys.norm2.mean(-1, keepdim=True) + tiny)
        squares = torch.maximum((weight_dk * d_keys.norm2).sum(-1, keepdim=True), through_q)
        rows = (counted * row.square() * queries.norm2).sum(-1, keepdim=True) + count * key_dim * tiny
        sigma = DK * (unit * _capped(squares, most_k * math.sqrt(keys)) + scale * rows.sqrt())
        norm = torch.linalg.vector_norm
        of_lse = summed * torch.minimum(norm(from_lse, dim=-1, keepdim=True), most_k)
        # Terms of dQ = dS K that cancel, where rows of K are much alike, leave what the accumulator lost of them.
        pairs = (d_outs.norm2 * queries.norm2).sum(-1, keepdim=True)
        cancelled = (4 + math.sqrt(keys)) * wide_unit * scale * pairs.sqrt() * v_most * k_most
        probed = _probed(queries, d_queries)
        most = most_q * math.sqrt(count) * q_size
        of_probes = _weighed(d_queries.squares, weight_dq * queries.norm2)
        of_probes = unit * _capped(of_probes + _weighed(of_keys.squares, weight_dk * d_keys.norm2), most)
        alike_terms = summed * torch.minimum(norm(probed, dim=-2), math.sqrt(PROBES) * most)
        parts += [
            Deviation(
                norm(d_keys.wide.sum(2) - from_lse, dim=-1, keepdim=True),
                _of_norm(dk, common) * sigma + 2 * of_lse,
            ),
            Deviation(
                norm(probed - _probed(d_keys, of_keys), dim=-2),
                math.sqrt(PROBES) * (PROBED * of_probes + cancelled) + alike_terms,
            ),
        ]
    # What squares lose below the least normal number, and values of the narrow dtype do.
    lost = unit * underflow(count * (key_dim + value_dim), dtype) + count * vanishing(dtype)
    found = joined(*parts)
    return Deviation(found.residual, found.bound + (1 + q_most + k_most + v_most) * lost)


def _capped(squares: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """A root of squares, at most what the operands allow: an infinite gradient must not excuse itself."""
    return torch.minimum(squares.sqrt(), most)


def _of_norm(gradient: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """How many times the estimate the norm of a sum of `gradient`'s rows may be off (B, N_kv, 1); common: the share of
    the estimate, 0 to 1, that may be the same in every column."""
    most_ways = 1 / math.sqrt(gradient.shape[-1])
    one_way = (_concentration(gradient) - most_ways).clamp_min(0.0) / max(1 - most_ways, most_ways)
    factor = ISOTROPIC * (1 + 5 * most_ways) + (ONE_WAY - ISOTROPIC) * one_way
    return factor + (COLUMN - factor) * common


def _columns(
    residual: torch.Tensor, sigma: torch.Tensor, shared: torch.Tensor, column: float, of_norm: torch.Tensor
) -> Deviation:
    """Residual columns (B, N_kv, H), with their norm as one column more.

    Args:
        sigma: what rounding does to a column.
        shared: what all terms may have in common.
        column, of_norm: how many times sigma a column, and its norm their norm, may be off.
    """
    norm = torch.linalg.vector_norm
    of_all = of_norm * norm(sigma, dim=-1, keepdim=True) + 2 * norm(shared, dim=-1, keepdim=True)
    return Deviation(
        torch.cat([residual, norm(residual, dim=-1, keepdim=True)], -1),
        torch.cat([column * sigma + 2 * shared, of_all], -1),
    )
