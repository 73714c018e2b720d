"""Attention as matrices: scores, softmax and context are tensors that can be checked, and corrected in place.

Query rows are taken in blocks, so memory grows with the sequence, not with its square. Each block computes two
products in the forward and five in the backward. Each is checked by the cheapest sums that see all of its elements:

    scores   S = Q Kᵀ      rows, over tiles of keys: Σ_j S_ij = q_i · Σ_j k_j
    context  O = P V       rows: Σ_h O_ih = Σ_j P_ij (Σ_h V_jh)
    dp       dP = dO Vᵀ    rows, over tiles of keys
    dv       dV = Pᵀ dO    columns, with a weight for each key: Σ_j w_j dV_jh = Σ_i (Σ_j w_j P_ij) dO_ih
    dq       dQ = dS K     rows
    dk       dK = dSᵀ Q    columns, likewise

Checksums do not pass through softmax, so new ones are made behind it, as in ATTNChecker. The backward computes the
scores again and requires that every row of P = exp(S - lse) sums to 1, which compares them with the forward's.

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
from .product import InnerSums, check_product
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
"""Most query rows of a block."""

_CACHED = 1 << 21
"""Scores of a block on a CPU. In smaller blocks the calls would cost more than the caches save. On an accelerator a
block has all heads."""

RESULTS = ("scores", "context", "scores.backward", "dp", "dv", "dq", "dk")
"""The names of this path's checked results."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    *,
    scale: float | None = None,
    guard: Guard | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax attention with every product checked, forward and backward.

    Args:
        q: (B, L, N, H).
        k: (B, L, N_kv, H); N a multiple of N_kv.
        v: (B, L, N_kv, H_v).
        visible: the mask.
        scale: of the scores; None: H ** -0.5.
        guard: of this attention; None: the same is computed without checks.

    Returns:
        The context (B, L, N, H_v) in q's dtype, and lse, the log-sum-exp of each row (B, L, N), in the accumulator
        dtype; -inf for a row that sees no key. Both are differentiable.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if guard is not None and guard.runs_unguarded and not guard.checks.looks_at_rows:
        guard = None
    return _Attention.apply(q, k, v, visible, scale, guard)


def _by_key_head(x: torch.Tensor, groups: int, scale: float = 1.0) -> torch.Tensor:
    """Return x (B, L, N, H) as (B, N/groups, groups, L, H), times `scale`, in the accumulator dtype, contiguous."""
    b, length, n, h = x.shape
    wide = x.new_empty(b, n // groups, groups, length, h, dtype=accumulator(x.dtype))
    wide.copy_(x.permute(0, 2, 1, 3).reshape(wide.shape))
    return wide.mul_(scale) if scale != 1.0 else wide


def _from_key_head(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the inverse of `_by_key_head`, contiguous."""
    return x.flatten(1, 2).permute(0, 2, 1, 3).to(dtype).contiguous()


class _Block(NamedTuple):
    """A block: some key heads, some query rows, and the keys that those rows can see. seen: their mask, or None."""

    heads: slice
    rows: slice
    keys: slice
    seen: torch.Tensor | None

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return this block's rows of x (B, N_kv, G, L, ...) as (B, heads, G·rows, ...)."""
        return x[:, self.heads, :, self.rows].flatten(2, 3)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return this block's keys of x (B, N_kv, L, ...)."""
        return x[:, self.heads, self.keys]

    def put_rows(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the rows that `of_rows` reads."""
        x[:, self.heads, :, self.rows] = rows.unflatten(2, (x.shape[2], -1))

    def add_keys(self, x: torch.Tensor, keys: torch.Tensor) -> None:
        """Add to the keys that `of_keys` reads."""
        x[:, self.heads, self.keys] += keys

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Set scores (B, heads, G·rows, keys) to -inf, in place, where a query does not see a key; return them."""
        if self.seen is not None:
            groups = scores.shape[2] // (self.rows.stop - self.rows.start)
            scores.unflatten(2, (groups, -1)).masked_fill_(~self.seen, -math.inf)
        return scores


class _Operands:
    """The operands of one call in the accumulator dtype, and the blocks into which they are cut."""

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
        """Return the result of `make`, which is called once for all blocks."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def norms(self, name: Literal["q", "k", "v"]) -> torch.Tensor:
        """Return the norms of q (B, N_kv, G, L), k or v (B, N_kv, L)."""
        return self.kept(f"{name} norms", lambda: norms(getattr(self, name), -1))

    def key_weights(self, block: "_Block") -> torch.Tensor:
        """Return three weights for each of a block's keys (B, heads, 3, keys): 1, its `_key_weights`, and Σ_h k_jh."""

        def make() -> torch.Tensor:
            total = self.k.sum(-1)
            either = _key_weights(total.shape[-1], total).expand_as(total)
            return torch.stack([torch.ones_like(total), either, total], dim=-2)

        return self.kept("key weights", make)[:, block.heads, :, block.keys]

    def k_sizes(self, block: "_Block") -> torch.Tensor:
        """Return Σ_h |k_jh| of a block's keys (B, heads, keys)."""
        return block.of_keys(self.kept("k sizes", lambda: self.k.abs().sum(-1)))

    def tiled(self, name: Literal["k", "v"], block: "_Block") -> InnerSums:
        """Return the InnerSums of a block's rows of k or v: plain (B, heads, H, T), norms (B, heads, T)."""
        plain = tiles(block.of_keys(getattr(self, name)), -2).sum(-2)
        return InnerSums(plain.transpose(-1, -2), tile_totals(block.of_keys(self.norms(name))))

    def v_sums(self, block: "_Block") -> torch.Tensor:
        """Return Σ_h v_jh and Σ_h |v_jh| of a block's keys (B, heads, 2, keys)."""
        made = self.kept("v sums", lambda: torch.stack([self.v.sum(-1), self.v.abs().sum(-1)], dim=-2))
        return made[:, block.heads, :, block.keys]

    def growth(self, inner: int) -> float:
        """Return the relative error of a product of these operands."""
        return growth(inner, self.q.dtype) + self.loss


def _sums_over(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the sums of x's rows (..., rows, keys) under each of W weights (..., W, keys): W tensors (..., rows)."""
    # On a CPU `x @ weights.mT` would take twice as long.
    return (weights @ x.mT).unbind(-2)


def _inner_tiles(y: torch.Tensor, a: torch.Tensor, a_norms: torch.Tensor, b_sums: InnerSums, loss: float) -> Deviation:
    """Return how far the row tiles of y = a bᵀ are from their checksums. As b has few sums, y is read only once."""
    reach = a_norms.unsqueeze(-1) * b_sums.norms.unsqueeze(-2)
    return Deviation(a @ b_sums.plain - tile_totals(y), loss * reach + torch.finfo(y.dtype).tiny)


def _row_sums(y: torch.Tensor, p: torch.Tensor, v_sums: torch.Tensor, loss: float) -> Deviation:
    """Return how far the rows of y = p v, with p >= 0, are from their checksums."""
    expected, reach = _sums_over(p, v_sums)
    return Deviation(expected - y.sum(-1), loss * reach + torch.finfo(y.dtype).tiny)


def _signed_row_sums(
    y: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, k_sizes: torch.Tensor, loss: float
) -> Deviation:
    """Return how far the rows of y = s k are from their checksums. expected: Σ_j s_ij Σ_h k_jh. size: Σ_j |s_ij|.
    k_sizes: Σ_h |k_jh|."""
    reach = size * k_sizes.amax(-1, keepdim=True)
    return Deviation(expected - y.sum(-1), loss * reach + torch.finfo(y.dtype).tiny)


def _key_weights(n: int, like: torch.Tensor) -> torch.Tensor:
    """Return n weights of either sign, of magnitudes from 1/2 to 1, without a pattern, always the same (n,).

    Plain column sums of dK are 0 over every document, so an error that scales all of a document's dK would not change
    them. Signs alone would cancel an error that puts one value into all of an aligned tile.
    """
    mixed = (torch.arange(n, device=like.device, dtype=torch.int64) + 1) * 0x9E3779B1 & 0x7FFFFFFF
    mixed = (mixed ^ mixed >> 15) * 0x85EBCA6B >> 13
    return ((64 + mixed % 64) * (mixed // 64 % 2 * 2 - 1)).to(like.dtype) / 128


def _column_sums(
    y: torch.Tensor, each: torch.Tensor, row_sums: torch.Tensor, size: torch.Tensor, x: torch.Tensor, loss: float
) -> Deviation:
    """Return how far the columns of y = sᵀ x, with a weight w_j for each row of y, are from their checksums.
    each: w_j. row_sums: Σ_j w_j s_ij. size: Σ_j |s_ij|."""
    expected = (row_sums.unsqueeze(-2) @ x).squeeze(-2)
    reach = (size.unsqueeze(-2) @ x.abs()).squeeze(-2)
    total = (each.unsqueeze(-2) @ y).squeeze(-2)
    return Deviation(expected - total, loss * reach + torch.finfo(y.dtype).tiny)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible: Visible, scale: float, guard: Guard | None):
        # Selective checkpointing would keep the scores of every block, the very square that blocks avoid.
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
        # d_lse enters dS like -delta: both multiply P.
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
    """The products of all blocks of one call, in one direction. `part` is the number of the current block."""

    def __init__(self, ops: _Operands, guard: Guard | None, *, backward: bool) -> None:
        self.ops, self.backward, self.part = ops, backward, 0
        self.guard = None if guard is None or guard.runs_unguarded else guard
        self.checking = guard is not None and guard.checked
        self.looks = guard if guard is not None and guard.checks.looks_at_rows and not guard.checked else None

    def _touch(self, section: str, y: torch.Tensor) -> torch.Tensor:
        if self.guard is None:
            return y
        return self.guard.inject(section, y, backward=self.backward, part=self.part, parts=len(self.ops.blocks))

    def _product(
        self, section: str, a: torch.Tensor, b: torch.Tensor, check: Callable[[torch.Tensor], Deviation]
    ) -> torch.Tensor:
        """Return a @ b, checked as the result `section` if this call is checked."""
        y = self._touch(section, a @ b)
        if self.guard is None or not self.checking:
            return y
        with self._timing():
            return check_product(self.guard, section, y, a, b, check, backward=self.backward)

    def _timing(self) -> AbstractContextManager[None]:
        """Measure the time that a check adds."""
        return nullcontext() if self.guard is None else self.guard.timing()

    def context(self, block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
        """Return O and lse of a block's rows."""
        ops = self.ops
        q, k, v = block.of_rows(ops.q), block.of_keys(ops.k), block.of_keys(ops.v)

        def of_scores(y: torch.Tensor) -> Deviation:
            return _inner_tiles(y, q, block.of_rows(ops.norms("q")), ops.tiled("k", block), ops.growth(q.shape[-1]))

        scores = self._product("scores", q, k.transpose(-1, -2), of_scores)
        if self.looks is not None:  # no look for +INF: it turns its whole row to NaN
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
        """Return dQ / scale of a block's rows, and what they add to dK and dV of its keys."""
        ops = self.ops
        q, k, v = block.of_rows(ops.q), block.of_keys(ops.k), block.of_keys(ops.v)
        p, p_sums, weighed = self._probabilities(block, q, k, lse)
        # If the call is not checked, nothing below reads these.
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
                # p is not read again. Its memory takes the magnitudes, so that nothing of that size is allocated.
                size = torch.abs(ds, out=p).sum(-1)
                # The weighted sums of dS, and the checksums of dQ's rows, in one pass over dS.
                weighed_ds, expected = _sums_over(ds, weights[..., 1:, :])
        inner = ops.growth(k.shape[-2] + k.shape[-1])
        dq = self._product("dq", ds, k, lambda y: _signed_row_sums(y, expected, size, ops.k_sizes(block), inner))
        dk = self._product("dk", ds.transpose(-1, -2), q, lambda y: _column_sums(y, each, weighed_ds, size, q, outer))
        return dq, dk, dv

    def _probabilities(
        self, block: _Block, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return P = exp(S - lse) of a block, its row sums, and its row sums under the keys' weights. Both sums are
        empty if this call is not checked.

        S is computed again. It agrees with the forward if every row of P sums to 1. This test needs no sums of S, and
        also sees a forward whose scores or sums were wrong. Mode `correct` repeats a block that does not agree.
        """
        unseen = lse == -math.inf
        lse = torch.where(unseen, torch.zeros_like(lse), lse)
        scores = self._touch("scores.backward", q @ k.transpose(-1, -2))
        if self.looks is not None:  # no look for +INF: it makes gradients that are not finite
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
