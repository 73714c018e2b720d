"""The sums of the backward's identities by Triton kernels: q, k, v, O and their gradients are read once, q and k twice.

`identities.identity_sums` says what is summed, and sums it with PyTorch where these kernels do not fit. Each program
takes a share of the rows of one sequence and key head, keeps its sums in registers and writes them once; the shares are
added up behind. As operators of PyTorch with fake kernels: what looks at shapes alone needs no device.
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch.library import custom_op

from .sums import FLAT, OutputSums, PairSums, Rounding, Sums

PROGRAMS = 128
"""At least so many at a time, where there are rows enough: about as many as a device has multiprocessors."""

PAIR_ROWS, OUTPUT_ROWS = 64, 32
"""Rows that a program holds at once."""

SHARE = 4
"""The least number of such blocks that a program takes."""

WARPS = 8
WIDEST = 128
"""Columns of a head: a program keeps two matrices of so many columns a side in registers."""


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _most(x):
    """The largest of x (n); NaN where there is one."""
    missing = tl.max(tl.where(x != x, 1.0, 0.0), 0)
    return tl.where(missing == 1.0, float("nan"), tl.max(x, 0))


@triton.jit
def _block(x, batch, length, head, column, rows, first, count, width, groups: tl.constexpr, columns: tl.constexpr):
    """Rows of a (B, L, N, H) tensor, given its strides, whose group of heads begins at `first`; 0 beyond its end."""
    h = tl.arange(0, columns)
    at = x + batch + (rows // groups).to(tl.int64)[:, None] * length + (first + rows % groups)[:, None] * head
    return tl.load(at + h[None, :] * column, mask=(rows < count)[:, None] & (h < width)[None, :], other=0.0)


@triton.jit
def _put(to, place, values, width, columns: tl.constexpr):
    """The place-th of the vectors behind a matrix."""
    h = tl.arange(0, columns)
    tl.store(to + (width + place) * width + h, values, mask=h < width)


@triton.jit
def _put_matrix(to, values, width, columns: tl.constexpr):
    h = tl.arange(0, columns)
    tl.store(to + h[:, None] * width + h[None, :], values, mask=(h < width)[:, None] & (h < width)[None, :])


@triton.jit
def _totals(x, s0, s1, s2, s3, to, heads, count, width, share, rows_: tl.constexpr, columns: tl.constexpr):
    """Column sums of x."""
    pair, part = tl.program_id(0), tl.program_id(1)
    batch = (pair // heads).to(tl.int64) * s0
    total = tl.zeros((columns,), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, count), rows_):
        rows = start + tl.arange(0, rows_)
        total += tl.sum(_block(x, batch, s1, s2, s3, rows, pair % heads, count, width, 1, columns).to(tl.float32), 0)
    h = tl.arange(0, columns)
    tl.store(to + (pair * tl.num_programs(1) + part) * width + h, total, mask=h < width)


@triton.jit
def _pairs(
    x, s0, s1, s2, s3,
    dx, d0, d1, d2, d3,
    totals, to, most_to,
    heads, count, width, share,
    groups: tl.constexpr, rows_: tl.constexpr, columns: tl.constexpr, parts_: tl.constexpr, centred: tl.constexpr,
):  # fmt: skip
    """PairSums of x and dx, and Σ |x - mean| where it is asked for."""
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, first = (pair // heads).to(tl.int64), (pair % heads) * groups
    product = tl.zeros((columns, columns), tl.float32)
    total = tl.zeros((columns,), tl.float32)
    squares, d_total, d_squares, of_rows, of_columns, apart, mean = total, total, total, total, total, total, total
    if centred:
        h, p = tl.arange(0, columns), tl.arange(0, parts_)
        at = totals + (pair * parts + p)[:, None] * width + h[None, :]
        mean = tl.sum(tl.load(at, mask=(p < parts)[:, None] & (h < width)[None, :], other=0.0), 0) / count
    most2 = tl.zeros((rows_,), tl.float32)
    d_most = most2
    for start in range(part * share, tl.minimum((part + 1) * share, count), rows_):
        rows = start + tl.arange(0, rows_)
        narrow = _block(x, b * s0, s1, s2, s3, rows, first, count, width, groups, columns)
        d_narrow = _block(dx, b * d0, d1, d2, d3, rows, first, count, width, groups, columns)
        product = tl.dot(tl.trans(narrow), d_narrow, product, input_precision="ieee")
        wide, d_wide = narrow.to(tl.float32), d_narrow.to(tl.float32)
        square, d_square = wide * wide, d_wide * d_wide
        norm2, d_norm2 = tl.sum(square, 1), tl.sum(d_square, 1)
        total += tl.sum(wide, 0)
        squares += tl.sum(square, 0)
        d_total += tl.sum(d_wide, 0)
        d_squares += tl.sum(d_square, 0)
        of_rows += tl.sum(square * tl.expand_dims(d_norm2, 1), 0)
        of_columns += tl.sum(tl.expand_dims(norm2, 1) * d_square, 0)
        if centred:
            apart += tl.sum(tl.where((rows < count)[:, None], tl.abs(wide - mean[None, :]), 0.0), 0)
        most2 = _larger(most2, norm2)
        d_most = _larger(d_most, tl.where(d_norm2 != d_norm2, d_norm2, tl.max(tl.abs(d_wide), 1)))
    at = (pair * parts + part).to(tl.int64)
    to += at * width * (width + 7)
    _put_matrix(to, product, width, columns)
    _put(to, 0, total, width, columns)
    _put(to, 1, squares, width, columns)
    _put(to, 2, d_total, width, columns)
    _put(to, 3, d_squares, width, columns)
    _put(to, 4, of_rows, width, columns)
    _put(to, 5, of_columns, width, columns)
    _put(to, 6, apart, width, columns)
    tl.store(most_to + at * 2, _most(most2))
    tl.store(most_to + at * 2 + 1, _most(d_most))


@triton.jit
def _outputs(
    q, q0, q1, q2, q3,
    o, o0, o1, o2, o3,
    do, do0, do1, do2, do3,
    lse, l0, l1, l2,
    dlse, dl0, dl1, dl2,
    k_apart, a1, k_most2, m1, v_squares, s1,
    to, most_to,
    heads, count, keys, key_dim, value_dim, share, key_parts,
    scale, unit, wide_unit, lost, grown, root_dim, tiny, level,
    groups: tl.constexpr, rows_: tl.constexpr, key_columns: tl.constexpr, value_columns: tl.constexpr,
    key_parts_: tl.constexpr, has_lse: tl.constexpr, has_dlse: tl.constexpr,
):  # fmt: skip
    """OutputSums."""
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    b, first = (pair // heads).to(tl.int64), (pair % heads) * groups
    h, w, p = tl.arange(0, key_columns), tl.arange(0, value_columns), tl.arange(0, key_parts_)
    of_part = (pair * key_parts + p).to(tl.int64)
    there = p < key_parts
    at = k_apart + of_part[:, None] * a1 + h[None, :]
    spread = tl.sum(tl.load(at, mask=there[:, None] & (h < key_dim)[None, :], other=0.0)) / (keys * key_dim)
    at = v_squares + of_part[:, None] * s1 + w[None, :]
    v_norm2 = tl.sum(tl.load(at, mask=there[:, None] & (w < value_dim)[None, :], other=0.0)) / keys + tiny
    k_norm = tl.sqrt(_most(tl.load(k_most2 + of_part * m1, mask=there, other=0.0)))
    v_usual = tl.sqrt(v_norm2) / root_dim

    product = tl.zeros((value_columns, value_columns), tl.float32)
    noise = tl.zeros((key_columns,), tl.float32)
    from_lse = noise
    total = tl.zeros((value_columns,), tl.float32)
    out_total, out_squares, alike, terms, of_rows, of_columns = total, total, total, total, total, total
    one = tl.zeros((rows_,), tl.float32)
    square, alike_rows, shared, pairs = one, one, one, one
    varied, largest2, largest_lse = one, one, one
    for start in range(part * share, tl.minimum((part + 1) * share, count), rows_):
        rows = start + tl.arange(0, rows_)
        inside, of_query, head = rows < count, (rows // groups).to(tl.int64), first + rows % groups
        x = _block(q, b * q0, q1, q2, q3, rows, first, count, key_dim, groups, key_columns).to(tl.float32)
        x2 = x * x
        q_norm2 = tl.sum(x2, 1)
        if has_dlse:
            d_lse = tl.load(dlse + b * dl0 + of_query * dl1 + head * dl2, mask=inside, other=0.0).to(tl.float32)
            from_lse += tl.sum(d_lse[:, None] * x, 0)
            largest_lse = _larger(largest_lse, tl.abs(d_lse))

        y = _block(o, b * o0, o1, o2, o3, rows, first, count, value_dim, groups, value_columns)
        dy = _block(do, b * do0, do1, do2, do3, rows, first, count, value_dim, groups, value_columns)
        if has_lse:
            seen = tl.load(lse + b * l0 + of_query * l1 + head * l2, mask=inside, other=0.0) > -float("inf")
            dy = tl.where(seen[:, None], dy, tl.zeros_like(dy))
        product = tl.dot(tl.trans(y), dy, product, input_precision="ieee")
        y, dy = y.to(tl.float32), dy.to(tl.float32)
        y2, dy2 = y * y, dy * dy
        o_norm2, do_norm2 = tl.sum(y2, 1), tl.sum(dy2, 1)
        delta, crossed = tl.abs(tl.sum(y * dy, 1)), tl.sqrt(tl.sum(y2 * dy2, 1)) + lost
        q_norm = tl.sqrt(q_norm2)
        flat = (scale * q_norm * spread < level) & inside
        usual = tl.minimum(o_norm2 / v_norm2 + 1.0 / keys, 1.0, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.where(flat, 1.0, usual)
        of_p = tl.sqrt(weight) * ((tl.sqrt(do_norm2) + lost) * v_usual + delta)
        row = unit * (crossed + of_p) + 8 * wide_unit * scale * q_norm * k_norm * of_p
        row = tl.where(inside, row, 0.0)
        total += tl.sum(dy, 0)
        out_total += tl.sum(y, 0)
        out_squares += tl.sum(y2, 0)
        alike += tl.sum(dy * flat.to(tl.float32)[:, None], 0)
        terms += tl.sum(weight[:, None] * dy2, 0)
        of_rows += tl.sum(y2 * tl.expand_dims(do_norm2, 1), 0)
        of_columns += tl.sum(dy2 * tl.expand_dims(o_norm2, 1), 0)
        noise += tl.sum((row * row)[:, None] * x2, 0)
        square += do_norm2
        alike_rows += root_dim * row + grown * delta
        shared += weight * do_norm2
        pairs += do_norm2 * q_norm2
        varied = tl.maximum(varied, tl.where(inside & (flat == 0), 1.0, 0.0))
        largest2 = _larger(largest2, do_norm2)
    at = (pair * parts + part).to(tl.int64)
    to += at * (value_dim * (value_dim + 7) + 2 * key_dim + 4)
    _put_matrix(to, product, value_dim, value_columns)
    _put(to, 0, total, value_dim, value_columns)
    _put(to, 1, out_total, value_dim, value_columns)
    _put(to, 2, out_squares, value_dim, value_columns)
    _put(to, 3, alike, value_dim, value_columns)
    _put(to, 4, terms, value_dim, value_columns)
    _put(to, 5, of_rows, value_dim, value_columns)
    _put(to, 6, of_columns, value_dim, value_columns)
    to += value_dim * (value_dim + 7)
    tl.store(to + h, noise, mask=h < key_dim)
    tl.store(to + key_dim + h, from_lse, mask=h < key_dim)
    to += 2 * key_dim
    tl.store(to, tl.sum(square, 0))
    tl.store(to + 1, tl.sum(alike_rows, 0))
    tl.store(to + 2, tl.sum(shared, 0))
    tl.store(to + 3, tl.sum(pairs, 0))
    tl.store(most_to + at * 3, tl.max(varied, 0))
    tl.store(most_to + at * 3 + 1, _most(largest2))
    tl.store(most_to + at * 3 + 2, _most(largest_lse))


def _shares(rows: int, heads: int, at_once: int) -> tuple[int, int]:
    """Into how many parts the rows of each head are split, and how many rows a part has."""
    parts = max(1, min(rows // (SHARE * at_once), -(-PROGRAMS // heads)))
    share = -(-rows // (parts * at_once)) * at_once
    return -(-rows // share), share


def _columns(width: int) -> int:
    return max(16, triton.next_power_of_2(width))


def _empty(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


def _launched(kernel, grid: tuple[int, ...], like: torch.Tensor, *args, **constants) -> None:
    here = contextlib.nullcontext() if like.device.type == "cpu" else torch.accelerator.device_index(like.device.index)
    with here:
        kernel[grid](*args, **constants, num_warps=WARPS)


def _totals_empty(k: torch.Tensor) -> torch.Tensor:
    heads = k.shape[0] * k.shape[2]
    return _empty(k, heads, _shares(k.shape[1], heads, PAIR_ROWS)[0], k.shape[3])


@custom_op("everstep::column_totals", mutates_args=())
def column_totals(k: torch.Tensor) -> torch.Tensor:
    """Σ k of each share of the keys of k (B, L, N, H): (B·N, shares, H)."""
    to = _totals_empty(k)
    share = _shares(k.shape[1], to.shape[0], PAIR_ROWS)[1]
    args = (k, *k.stride(), to, k.shape[2], k.shape[1], k.shape[3], share)
    _launched(_totals, to.shape[:2], k, *args, rows_=PAIR_ROWS, columns=_columns(k.shape[3]))
    return to


column_totals.register_fake(_totals_empty)


def _pairs_empty(x, dx, totals, n_kv) -> tuple[torch.Tensor, torch.Tensor]:
    heads, width = x.shape[0] * n_kv, x.shape[3]
    parts = _shares(x.shape[1] * (x.shape[2] // n_kv), heads, PAIR_ROWS)[0]
    return _empty(x, heads, parts, width * (width + 7)), _empty(x, heads, parts, 2)


@custom_op("everstep::pair_sums", mutates_args=())
def pair_sums(
    x: torch.Tensor, dx: torch.Tensor, totals: torch.Tensor | None, n_kv: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """PairSums of each share of the rows of x and dx (B, L, N, H), and their two maxima. totals: `column_totals` of x,
    where Σ |x - mean x| shall stand behind the others."""
    made = _pairs_empty(x, dx, totals, n_kv)
    (heads, parts, _), groups = made[0].shape, x.shape[2] // n_kv
    rows, width = x.shape[1] * groups, x.shape[3]
    args = (
        *(*(x, *x.stride()), *(dx, *dx.stride()), x if totals is None else totals, *made),
        *(n_kv, rows, width, _shares(rows, heads, PAIR_ROWS)[1]),
    )
    constants = {"rows_": PAIR_ROWS, "columns": _columns(width), "parts_": triton.next_power_of_2(parts)}
    _launched(_pairs, (heads, parts), x, *args, **constants, groups=groups, centred=totals is not None)
    return made


pair_sums.register_fake(_pairs_empty)


def _outputs_empty(q, out, d_out, lse, d_lse, k_apart, k_most2, v_squares, scale, keys, unit, lost, grown):
    heads, (h, w) = k_apart.shape[0], (q.shape[3], out.shape[3])
    parts = _shares(q.shape[1] * (q.shape[2] * q.shape[0] // heads), heads, OUTPUT_ROWS)[0]
    return _empty(q, heads, parts, w * (w + 7) + 2 * h + 4), _empty(q, heads, parts, 3)


@custom_op("everstep::output_sums", mutates_args=())
def output_sums(
    q: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    lse: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    k_apart: torch.Tensor,
    k_most2: torch.Tensor,
    v_squares: torch.Tensor,
    scale: float,
    keys: int,
    unit: float,
    lost: float,
    grown: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """OutputSums of each share of the rows of q (B, L, N, H), out and d_out (B, L, N, V), lse and its gradient
    (B, L, N), and their three maxima."""
    made = _outputs_empty(q, out, d_out, lse, d_lse, k_apart, k_most2, v_squares, scale, keys, unit, lost, grown)
    heads, parts, key_dim = made[0].shape[0], made[0].shape[1], q.shape[3]
    n_kv, value_dim = heads // q.shape[0], out.shape[3]
    groups = q.shape[2] // n_kv
    rows, key_parts = q.shape[1] * groups, k_apart.shape[1]
    info = torch.finfo(torch.float32)
    of = [y for x in (q, out, d_out) for y in (x, *x.stride())]
    of += [y for x in (lse, d_lse) for y in ((q, 0, 0, 0) if x is None else (x, *x.stride()))]
    of += [y for x in (k_apart, k_most2, v_squares) for y in (x, x.stride(1))]
    args = (
        *(*of, *made, n_kv, rows, keys, key_dim, value_dim, _shares(rows, heads, OUTPUT_ROWS)[1], key_parts),
        *(scale, unit, info.eps / 2, lost, grown, value_dim**0.5, info.tiny, FLAT),
    )
    constants = {"key_columns": _columns(key_dim), "value_columns": _columns(value_dim), "groups": groups}
    constants |= {"rows_": OUTPUT_ROWS, "key_parts_": triton.next_power_of_2(key_parts)}
    constants |= {"has_lse": lse is not None, "has_dlse": d_lse is not None}
    _launched(_outputs, (heads, parts), q, *args, **constants)
    return made


output_sums.register_fake(_outputs_empty)


def fits(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether these kernels sum operands such as q (B, L, N, H) and v (B, L, N_kv, V), on an accelerator."""
    return q.dtype in (torch.bfloat16, torch.float16, torch.float32) and max(q.shape[3], v.shape[3]) <= WIDEST


def identity_sums(
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
) -> Sums:
    """`identities.identity_sums`, of operands that fit."""
    known, (b, length, n_kv, key_dim), value_dim = Rounding.of(out, k, scale), k.shape, v.shape[3]
    k_sums, k_most = pair_sums(k, dk, column_totals(k), n_kv)
    v_sums, v_most = pair_sums(v, dv, None, n_kv)
    q_sums, q_most = pair_sums(q, dq, None, n_kv)
    k_apart, v_squares = (
        x[..., w * (w + at) :][..., :w] for x, w, at in ((k_sums, key_dim, 6), (v_sums, value_dim, 1))
    )
    o_sums, o_most = output_sums(
        *(q, out, d_out, lse, d_lse, k_apart, k_most[..., 0], v_squares),
        *(scale, length, known.unit, known.lost, known.grown),
    )

    def added(sums: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
        return list(sums.sum(1).view(b, n_kv, -1).split(sizes, -1))

    def pair(sums: torch.Tensor, most: torch.Tensor, width: int) -> tuple[PairSums, torch.Tensor]:
        product, *parts, apart = added(sums, width * width, *[width] * 7)
        largest = most.amax(1).view(b, n_kv, 2).split(1, -1)
        return PairSums(product.unflatten(-1, (width, width)), *parts, *largest), apart

    queries, _ = pair(q_sums, q_most, key_dim)
    keys, apart = pair(k_sums, k_most, key_dim)
    values, _ = pair(v_sums, v_most, value_dim)
    wide, ones = [value_dim] * 7, [1] * 4
    product, *vectors, rows, from_lse, square, alike_rows, shared, pairs = added(
        o_sums, value_dim * value_dim, *wide, key_dim, key_dim, *ones
    )
    total, out_total, out_squares, alike, terms, of_rows, of_columns = vectors
    varied, largest2, largest_lse = o_most.amax(1).view(b, n_kv, 3).split(1, -1)
    outputs = OutputSums(
        product=product.unflatten(-1, (value_dim, value_dim)),
        total=total,
        out_total=out_total,
        out_squares=out_squares,
        alike=alike,
        terms=terms,
        of_rows=of_rows,
        of_columns=of_columns,
        rows=rows,
        from_lse=from_lse,
        square=square,
        alike_rows=alike_rows,
        shared=shared,
        pairs=pairs,
        varied=varied,
        largest2=largest2,
        largest_lse=largest_lse,
    )
    spread = apart.sum(-1, keepdim=True) / (length * key_dim)
    return Sums(queries, keys, values, outputs, spread)
