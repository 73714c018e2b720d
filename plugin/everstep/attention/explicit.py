"""Attention as matrices: scores, softmax and context are there to be checked, and corrected in place.

Query rows are taken in blocks, so memory grows with the sequence, not with its square. Each block makes two
products forward and five backward; each is checked by the cheapest sums that see every one of its elements:

    scores   S = Q Kᵀ      rows, over tiles of keys: Σ_j S_ij = q_i · Σ_j k_j
    context  O = P V       rows: Σ_h O_ih = Σ_j P_ij (Σ_h V_jh)
    dp       dP = dO Vᵀ    rows, over tiles of keys
    dv       dV = Pᵀ dO    columns, with a weight for each key: Σ_j w_j dV_jh = Σ_i (Σ_j w_j P_ij) dO_ih
    dq       dQ = dS K     rows
    dk       dK = dSᵀ Q    columns, likewise

Softmax breaks checksums, so the sums begin anew behind it, as in ATTNChecker; the backward makes the scores a
second time and requires that every row of P = exp(S - lse) sums to 1, which compares it with the forward.

Heads: N query heads share N_kv key heads in groups of G; a block works on (B, N_kv, G·rows, ...).
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch

from .findings import Deviation
from .guard import EXTREME_SCORE, Guard
from .masks import Visible
from .private import unseen_by_checkpointing
from .product import InnerSums, settle
from .roundoff import (
    accumulator,
    growth,
    norms,
    operand_roundoff,
    tile_totals,
    tiles,
    unit_roundoff,
)

BLOCK = 128
"""Most query rows that are worked on at once."""

_CACHED = 1 << 21
"""Scores that a CPU works on at once. In smaller blocks the calls cost more than the caches save. An accelerator
takes all heads together."""

RESULTS = ("scores", "context", "scores.backward", "dp", "dv", "dq", "dk")
"""The checked results of this path."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    *,
    scale: float | None = None,
    guard: Guard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention with every product checked, forward and backward.

    Args:
        q: (B, L, N, H).
        k: (B, L, N_kv, H); N a multiple of N_kv.
        v: (B, L, N_kv, H_v).
        visible: the mask.
        scale: of the scores; None: H ** -0.5.
        guard: None computes the same without checks.

    Returns:
        The context (B, L, N, H_v) in q's dtype, and the log of each row's sum of exponentials (B, L, N) in
        the accumulator dtype, -inf for a row that sees nothing. Both are differentiable.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if guard is not None and guard.idle and not guard.checks.looks_at_rows:
        guard = None
    return _Attention.apply(q, k, v, visible, scale, guard)


def _by_key_head(x: torch.Tensor, groups: int, scale: float = 1.0) -> torch.Tensor:
    """(B, L, N, H) as (B, N/groups, groups, L, H), times `scale`, in the accumulator dtype, contiguous."""
    b, length, n, h = x.shape
    wide = x.new_empty(b, n // groups, groups, length, h, dtype=accumulator(x.dtype))
    wide.copy_(x.permute(0, 2, 1, 3).reshape(wide.shape))
    return wide.mul_(scale) if scale != 1.0 else wide


def _from_key_head(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_by_key_head`, contiguous."""
    return x.flatten(1, 2).permute(0, 2, 1, 3).to(dtype).contiguous()


class _Block(NamedTuple):
    """Some key heads, some query rows, and the keys those rows can see."""

    heads: slice
    rows: slice
    keys: slice
    seen: torch.Tensor | None

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This block's rows of x (B, N_kv, G, L, ...) as (B, heads, G·rows, ...)."""
        return x[:, self.heads, :, self.rows].flatten(2, 3)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """This block's keys of x (B, N_kv, L, ...)."""
        return x[:, self.heads, self.keys]

    def put_rows(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write what `of_rows` reads."""
        x[:, self.heads, :, self.rows] = rows.unflatten(2, (x.shape[2], -1))

    def add_keys(self, x: torch.Tensor, keys: torch.Tensor) -> None:
        """Add to what `of_keys` reads."""
        x[:, self.heads, self.keys] += keys

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """scores (B, heads, G·rows, keys) with -inf where nothing is seen, in place."""
        if self.seen is not None:
            groups = scores.shape[2] // (self.rows.stop - self.rows.start)
            scores.unflatten(2, (groups, -1)).masked_fill_(~self.seen, -math.inf)
        return scores


class _Operands:
    """One call's operands in the accumulator dtype, and the blocks they are cut into."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, scale: float) -> None:
        self.groups = q.shape[2] // k.shape[2]
        self.q = _by_key_head(q, self.groups, scale)
        self.k = _by_key_head(k, 1).squeeze(2)
        self.v = _by_key_head(v, 1).squeeze(2)
        self.loss = operand_roundoff(self.q.dtype, q.device)
        self._kept: dict[str, torch.Tensor] = {}
        self.blocks = list(self._cut(visible))

    def _cut(self, visible: Visible):
        batch, n_kv, groups, length, _ = self.q.shape
        heads, rows = n_kv, min(BLOCK, length)
        if self.q.device.type == "cpu":
            heads = min(n_kv, max(1, _CACHED // (batch * groups * rows * length)))
            rows = min(rows, max(16, _CACHED // (batch * groups * heads * length)))
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            low, high = visible.keys(start, stop, length)
            seen = visible.block(start, stop, low, high, batch=batch, heads=n_kv * groups, device=self.q.device)
            if seen is not None:
                by_head = seen.shape[1] == n_kv * groups > 1
                seen = seen.unflatten(1, (n_kv, groups)) if by_head else seen.unsqueeze(1)
            for head in range(0, n_kv, heads):
                taken = slice(head, min(head + heads, n_kv))
                of_heads = seen[:, taken] if seen is not None and seen.shape[1] > 1 else seen
                yield _Block(taken, slice(start, stop), slice(low, high), of_heads)

    def kept(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `make` returns, made once for all blocks."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def norms(self, name: Literal["q", "k", "v"]) -> torch.Tensor:
        """Norms of q (B, N_kv, G, L), k or v (B, N_kv, L)."""
        return self.kept(f"{name} norms", lambda: norms(getattr(self, name), -1))

    def key_weights(self, block: "_Block") -> torch.Tensor:
        """For each of a block's keys: a one, one of `_key_weights`, and Σ_h k_jh (B, heads, 3, keys)."""

        def make() -> torch.Tensor:
            total = self.k.sum(-1)
            either = _key_weights(total.shape[-1], total).expand_as(total)
            return torch.stack([torch.ones_like(total), either, total], dim=-2)

        return self.kept("key weights", make)[:, block.heads, :, block.keys]

    def k_sizes(self, block: "_Block") -> torch.Tensor:
        """Σ_h |k_jh| of a block's keys (B, heads, keys)."""
        return block.of_keys(self.kept("k sizes", lambda: self.k.abs().sum(-1)))

    def tiled(self, name: Literal["k", "v"], block: "_Block") -> InnerSums:
        """Of a block's rows of k or v, with tiles of rows: sums (B, heads, H, T) and summed norms (B, heads, T)."""
        plain = tiles(block.of_keys(getattr(self, name)), -2).sum(-2)
        return InnerSums(plain.transpose(-1, -2), tile_totals(block.of_keys(self.norms(name))))

    def v_sums(self, block: "_Block") -> torch.Tensor:
        """Σ_h v_jh and Σ_h |v_jh| of a block's keys (B, heads, 2, keys)."""
        made = self.kept("v sums", lambda: torch.stack([self.v.sum(-1), self.v.abs().sum(-1)], dim=-2))
        return made[:, block.heads, :, block.keys]

    def growth(self, inner: int) -> float:
        """Relative error of a product of these operands."""
        return growth(inner, self.q.dtype) + self.loss


def _sums_over(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of x's rows (..., rows, keys) under each of some weights (..., W, keys); W times (..., rows).

    In this order: on a CPU `x @ weights.mT` takes twice as long.
    """
    return (weights @ x.mT).unbind(-2)


def _inner_tiles(y: torch.Tensor, a: torch.Tensor, a_norms: torch.Tensor, b_sums: InnerSums, loss: float) -> Deviation:
    """Row tiles of y = a bᵀ: the sums of b's rows are a few, so no pass over y but the one."""
    reach = a_norms.unsqueeze(-1) * b_sums.norms.unsqueeze(-2)
    return Deviation(a @ b_sums.plain - tile_totals(y), loss * reach + torch.finfo(y.dtype).tiny)


def _row_sums(y: torch.Tensor, p: torch.Tensor, v_sums: torch.Tensor, loss: float) -> Deviation:
    """Rows of y = p v for p >= 0."""
    expected, reach = _sums_over(p, v_sums)
    return Deviation(expected - y.sum(-1), loss * reach + torch.finfo(y.dtype).tiny)


def _signed_row_sums(
    y: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, k_sizes: torch.Tensor, loss: float
) -> Deviation:
    """Rows of y = s k, with expected = Σ_j s_ij Σ_h k_jh, size = Σ_j |s_ij| and k_sizes = Σ_h |k_jh|."""
    reach = size * k_sizes.amax(-1, keepdim=True)
    return Deviation(expected - y.sum(-1), loss * reach + torch.finfo(y.dtype).tiny)


def _key_weights(n: int, like: torch.Tensor) -> torch.Tensor:
    """n weights of either sign, from 1/2 to 1, without a pattern, always the same ones (n,).

    Plain column sums of dK are 0 over every document, so an error that scales all of a document's dK would
    leave them as they are. Signs alone would cancel what puts one value in all of an aligned tile.
    """
    mixed = (torch.arange(n, device=like.device, dtype=torch.int64) + 1) * 0x9E3779B1 & 0x7FFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B >> 13
    return ((64 + mixed % 64) * (mixed // 64 % 2 * 2 - 1)).to(like.dtype) / 128


def _column_sums(
    y: torch.Tensor, each: torch.Tensor, row_sums: torch.Tensor, size: torch.Tensor, x: torch.Tensor, loss: float
) -> Deviation:
    """Columns of y = sᵀ x under weights w for each of its rows, with row_sums = Σ_j w_j s_ij and size = Σ_j |s_ij|."""
    expected = (row_sums.unsqueeze(-2) @ x).squeeze(-2)
    reach = (size.unsqueeze(-2) @ x.abs()).squeeze(-2)
    total = (each.unsqueeze(-2) @ y).squeeze(-2)
    return Deviation(expected - total, loss * reach + torch.finfo(y.dtype).tiny)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible: Visible, scale: float, guard: Guard | None):
        # Checkpointing would keep every block's scores, the very square that blocks avoid.
        with unseen_by_checkpointing():
            ops = _Operands(q, k, v, visible, scale)
            forward = _Products(ops, guard, backward=False)
            out = ops.q.new_empty(*ops.q.shape[:-1], v.shape[-1])
            lse = ops.q.new_empty(*ops.q.shape[:-1], 1)
            for forward.part, block in enumerate(ops.blocks):
                context, block_lse = forward.context(block)
                block.put_rows(out, context)
                block.put_rows(lse, block_lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible, ctx.scale, ctx.guard = visible, scale, guard
        return _from_key_head(out, q.dtype), _from_key_head(lse, lse.dtype).squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        guard: Guard | None = ctx.guard
        ops = _Operands(q, k, v, ctx.visible, ctx.scale)
        d_out = _by_key_head(d_out, ops.groups)
        # d lse enters dS as -delta does: both multiply P.
        delta = (d_out * out).sum(-1, keepdim=True) - _by_key_head(d_lse.unsqueeze(-1), ops.groups)
        dq, dk, dv = torch.empty_like(ops.q), torch.zeros_like(ops.k), torch.zeros_like(ops.v)
        backward = _Products(ops, guard, backward=True)
        if guard is not None and guard.checks.looks_at_rows:
            guard.look_at_scores("scores.backward", lse)
        for backward.part, block in enumerate(ops.blocks):
            dq_rows, dk_part, dv_part = backward.gradients(
                block, block.of_rows(d_out), block.of_rows(lse), block.of_rows(delta)
            )
            block.put_rows(dq, dq_rows)
            block.add_keys(dk, dk_part)
            block.add_keys(dv, dv_part)
        dq *= ctx.scale
        return (
            _from_key_head(dq, q.dtype),
            _from_key_head(dk.unsqueeze(2), k.dtype),
            _from_key_head(dv.unsqueeze(2), v.dtype),
            None,
            None,
            None,
        )


class _Products:
    """The products of the blocks of one call, one direction; `part` is the block's number."""

    def __init__(self, ops: _Operands, guard: Guard | None, *, backward: bool) -> None:
        self.ops, self.backward, self.part = ops, backward, 0
        self.guard = None if guard is None or guard.idle else guard
        self.checking = guard is not None and guard.checked
        self.looks = guard if guard is not None and guard.checks.looks_at_rows and not guard.checked else None

    def _touch(self, section: str, y: torch.Tensor) -> torch.Tensor:
        if self.guard is None:
            return y
        return self.guard.touch(section, y, backward=self.backward, part=self.part, parts=len(self.ops.blocks))

    def _product(
        self, section: str, a: torch.Tensor, b: torch.Tensor, check: Callable[[torch.Tensor], Deviation]
    ) -> torch.Tensor:
        """a @ b under its name, checked when this call is."""
        y = self._touch(section, a @ b)
        if self.guard is None or not self.checking:
            return y
        with self._timing():
            return settle(self.guard, section, y, a, b, check, backward=self.backward)

    def _timing(self) -> AbstractContextManager[None]:
        """Around what a check adds."""
        return nullcontext() if self.guard is None else self.guard.timing()

    def context(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
        """O and the log of the sum of exponentials of a block's rows."""
        ops = self.ops
        q, k, v = block.of_rows(ops.q), block.of_keys(ops.k), block.of_keys(ops.v)

        def of_scores(y: torch.Tensor) -> Deviation:
            return _inner_tiles(y, q, block.of_rows(ops.norms("q")), ops.tiled("k", block), ops.growth(q.shape[-1]))

        scores = self._product("scores", q, k.transpose(-1, -2), of_scores)
        if self.looks is not None:  # one that is +INF makes NaN of its row
            self.looks.report("scores", scores.amin(), "refused", backward=self.backward, bound=-EXTREME_SCORE)
        block.mask(scores)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == -math.inf, torch.zeros_like(top), top)
        p = scores.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        out = self._product("context", p, v, lambda y: _row_sums(y, p, ops.v_sums(block), ops.growth(k.shape[-2])))
        return out / torch.where(total == 0, torch.ones_like(total), total), top + total.log()

    def gradients(
        self, block: _Block, d_out: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dQ / scale of a block's rows, and what they add to dK and dV of its keys."""
        ops = self.ops
        q, k, v = block.of_rows(ops.q), block.of_keys(ops.k), block.of_keys(ops.v)
        p, p_sums, weighed = self._probabilities(block, q, k, lse)
        # Nothing below reads these where the call is not checked.
        weights = each = size = expected = weighed_ds = p_sums
        if self.checking:
            with self._timing():
                weights = ops.key_weights(block)
                each = weights[..., 1, :]
        outer = ops.growth(q.shape[-2] + k.shape[-2])
        dv = self._product(
            "dv", p.transpose(-1, -2), d_out, lambda y: _column_sums(y, each, weighed, p_sums, d_out, outer)
        )
        dp = self._product(
            "dp",
            d_out,
            v.transpose(-1, -2),
            lambda y: _inner_tiles(y, d_out, norms(d_out, -1), ops.tiled("v", block), ops.growth(v.shape[-1])),
        )
        ds = dp.sub_(delta).mul_(p)
        if self.checking:
            with self._timing():
                # p is not read again: its memory takes the magnitudes, and nothing of that size is allocated.
                size = torch.abs(ds, out=p).sum(-1)
                # Weighed sums of dS and sums of dQ's rows in one pass over dS.
                weighed_ds, expected = _sums_over(ds, weights[..., 1:, :])
        inner = ops.growth(k.shape[-2] + k.shape[-1])
        dq = self._product("dq", ds, k, lambda y: _signed_row_sums(y, expected, size, ops.k_sizes(block), inner))
        dk = self._product("dk", ds.transpose(-1, -2), q, lambda y: _column_sums(y, each, weighed_ds, size, q, outer))
        return dq, dk, dv

    def _probabilities(
        self, block: _Block, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """P = exp(S - lse) of a block, its row sums, and those under the keys' weights; both are empty when this call
        is not checked.

        S is made anew, and what it must agree with is the forward: every row of P sums to 1. That needs no
        sums of S, and sees as well a forward whose scores or sums were wrong. A block that does not agree is
        made again.
        """
        unseen = lse == -math.inf
        lse = torch.where(unseen, torch.zeros_like(lse), lse)
        scores = self._touch("scores.backward", q @ k.transpose(-1, -2))
        if self.looks is not None:  # one that is +INF makes NaN of its row
            self.looks.report("scores.backward", scores.amin(), "refused", backward=self.backward, bound=-EXTREME_SCORE)
        p = block.mask(scores).sub_(lse).exp_()
        if self.guard is None or not self.checking:
            return p, p.new_empty(0), p.new_empty(0)
        with self._timing():
            largest = block.of_rows(self.ops.norms("q")) * block.of_keys(self.ops.norms("k")).amax(-1, keepdim=True)
            unit = unit_roundoff(p.dtype) + self.ops.loss
            bound = self.ops.growth(k.shape[-2]) + 8 * unit * (lse.squeeze(-1).abs() + largest)
            expected = (~unseen).squeeze(-1).to(p.dtype)
            weights = self.ops.key_weights(block)[..., :2, :]
            sums, weighed = _sums_over(p, weights)
            found = Deviation(expected - sums, bound)
            if not found.bad().any():
                return p, sums, weighed
            action = "refused"
            if self.guard.correct:
                p = block.mask(q @ k.transpose(-1, -2)).sub_(lse).exp_()
                sums, weighed = _sums_over(p, weights)
                if not Deviation(expected - sums, bound).bad().any():
                    action = "recomputed"
            self.guard.report("scores.backward", found.worst(), action, backward=True)
            return p, sums, weighed
