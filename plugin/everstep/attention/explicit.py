"""Attention as matrices: scores, softmax and context are there to be checked, and corrected in place.

Query rows are taken in blocks, so memory grows with the sequence, not with its square. Each block makes two products
forward and five backward; each is checked by the cheapest sums that see every one of its elements:

    scores   S = Q Kᵀ      rows, over tiles of keys: Σ_j S_ij = q_i · Σ_j k_j
    context  O = P V       rows: Σ_h O_ih = Σ_j P_ij (Σ_h V_jh)
    dp       dP = dO Vᵀ    rows, over tiles of keys
    dv       dV = Pᵀ dO    columns: Σ_j dV_jh = Σ_i (Σ_j P_ij) dO_ih
    dq       dQ = dS K     rows
    dk       dK = dSᵀ Q    columns

Softmax breaks checksums, so the sums begin anew behind it, as in ATTNChecker; the backward makes the scores a second
time and requires that every row of P = exp(S - lse) sums to 1, which compares it with the forward.

Heads: N query heads share N_kv key heads in groups of G; a block works on (B, N_kv, G·rows, ...).
"""

import math

import torch

from .findings import Deviation, outcome
from .guard import Guard
from .masks import Visible
from .product import settle, unseen_by_checkpointing
from .roundoff import accumulator, growth, operand_roundoff, tiles, unit_roundoff

BLOCK = 128
"""Query rows that are worked on at once."""

RESULTS = ("scores", "context", "scores.backward", "dp", "dv", "dq", "dk")
"""The checked results of this path."""

FORWARD, BACKWARD = "attention.forward", "attention.backward"


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
        The context (B, L, N, H_v) in q's dtype, and the log of each row's sum of exponentials (B, L, N) in the accumulator
        dtype, -inf for a row that sees nothing. Both are differentiable.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return _Attention.apply(q, k, v, visible, scale, guard)


def _by_key_head(x: torch.Tensor, groups: int, scale: float = 1.0) -> torch.Tensor:
    """(B, L, N, H) as (B, N/groups, groups, L, H), times `scale`, in the accumulator dtype."""
    b, length, n, h = x.shape
    wide = x.to(accumulator(x.dtype)).permute(0, 2, 1, 3).reshape(b, n // groups, groups, length, h)
    return wide * scale if scale != 1.0 else wide


def _from_key_head(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_by_key_head`, contiguous."""
    return x.flatten(1, 2).permute(0, 2, 1, 3).to(dtype).contiguous()


class _Blocks:
    """The operands of one call, and how a block is cut from them."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, scale: float) -> None:
        self.groups = q.shape[2] // k.shape[2]
        self.length, self.visible, self.scale = q.shape[1], visible, scale
        self.q = _by_key_head(q, self.groups, scale)
        self.k = _by_key_head(k, 1).squeeze(2)
        self.v = _by_key_head(v, 1).squeeze(2)
        self.loss = operand_roundoff(self.q.dtype, q.device)

    def __iter__(self):
        for start in range(0, self.length, BLOCK):
            stop = min(start + BLOCK, self.length)
            yield start, stop, *self.visible.keys(start, stop, self.length)

    def __len__(self) -> int:
        return -(-self.length // BLOCK)

    def rows(self, x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of x (B, N_kv, G, L, H) as (B, N_kv, G·rows, H)."""
        return x[:, :, :, start:stop].flatten(2, 3)

    def growth(self, inner: int) -> float:
        return growth(inner, self.q.dtype) + self.loss

    def masked(self, scores: torch.Tensor, start: int, stop: int, low: int, high: int) -> torch.Tensor:
        """scores (B, N_kv, G·rows, keys) with -inf where nothing is seen, in place."""
        b, n_kv = scores.shape[:2]
        heads = n_kv * self.groups
        seen = self.visible.block(start, stop, low, high, batch=b, heads=heads, device=scores.device)
        if seen is not None:
            by_head = scores.view(b, n_kv, self.groups, stop - start, high - low)
            seen = seen.unflatten(1, (n_kv, self.groups)) if seen.shape[1] == heads > 1 else seen.unsqueeze(1)
            by_head.masked_fill_(~seen, -math.inf)
        return scores


def _inner_tiles(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, loss: float) -> Deviation:
    """Row tiles of y = a bᵀ, for b (..., N, K): the sums of b's rows are a few, so no pass over y but the one."""
    b_tiles = tiles(b, -2)
    expected = a @ b_tiles.sum(-2).transpose(-1, -2)
    norms = tiles(torch.linalg.vector_norm(b, dim=-1)).sum(-1)
    reach = torch.linalg.vector_norm(a, dim=-1, keepdim=True) * norms.unsqueeze(-2)
    return Deviation(expected - tiles(y).sum(-1), loss * reach + torch.finfo(y.dtype).tiny, reach)


def _row_sums(y: torch.Tensor, p: torch.Tensor, v: torch.Tensor, loss: float) -> Deviation:
    """Rows of y = p v for p >= 0."""
    sums = p @ torch.stack([v.sum(-1), v.abs().sum(-1)], dim=-1)
    reach = sums[..., 1]
    return Deviation(sums[..., 0] - y.sum(-1), loss * reach + torch.finfo(y.dtype).tiny, reach)


def _signed_row_sums(
    y: torch.Tensor, s: torch.Tensor, size: torch.Tensor, k: torch.Tensor, loss: float
) -> Deviation:
    """Rows of y = s k, with size = Σ_j |s_ij|."""
    expected = (s @ k.sum(-1, keepdim=True)).squeeze(-1)
    reach = size * k.abs().sum(-1).amax(-1, keepdim=True)
    return Deviation(expected - y.sum(-1), loss * reach + torch.finfo(y.dtype).tiny, reach)


def _column_sums(
    y: torch.Tensor, row_sums: torch.Tensor, size: torch.Tensor, x: torch.Tensor, loss: float
) -> Deviation:
    """Columns of y = sᵀ x, with row_sums = Σ_j s_ij and size = Σ_j |s_ij|."""
    expected = (row_sums.unsqueeze(-2) @ x).squeeze(-2)
    reach = (size.unsqueeze(-2) @ x.abs()).squeeze(-2)
    return Deviation(expected - y.sum(-2), loss * reach + torch.finfo(y.dtype).tiny, reach)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible: Visible, scale: float, guard: Guard | None):
        blocks = _Blocks(q, k, v, visible, scale)
        b, n_kv, groups, length, _ = blocks.q.shape
        pairs = float(b * n_kv * groups * length * length) / (2 if visible.causal else 1)
        flops = 2 * pairs * (q.shape[-1] + v.shape[-1])
        checking = guard is not None and guard.checking(FORWARD, flops=flops, cost=2 * pairs)
        out = blocks.q.new_empty(b, n_kv, groups, length, v.shape[-1])
        lse = blocks.q.new_empty(b, n_kv, groups, length)
        for part, (start, stop, low, high) in enumerate(blocks):
            q_rows, keys, values = blocks.rows(blocks.q, start, stop), blocks.k[:, :, low:high], blocks.v[:, :, low:high]
            scores = q_rows @ keys.transpose(-1, -2)
            if guard is not None:
                scores = guard.touch("scores", scores, part=part, parts=len(blocks))
            if checking:
                loss = blocks.growth(q.shape[-1])
                scores = settle(
                    guard,
                    "scores",
                    scores,
                    q_rows,
                    keys.transpose(-1, -2),
                    lambda y, a=q_rows, k=keys, loss=loss: _inner_tiles(y, a, k, loss),
                )
            scores = blocks.masked(scores, start, stop, low, high)
            top = scores.amax(-1, keepdim=True)
            top = torch.where(top == -math.inf, torch.zeros_like(top), top)
            p = scores.sub_(top).exp_()
            total = p.sum(-1, keepdim=True)
            context = p @ values
            if guard is not None:
                context = guard.touch("context", context, part=part, parts=len(blocks))
            if checking:
                loss = blocks.growth(high - low)
                context = settle(
                    guard,
                    "context",
                    context,
                    p,
                    values,
                    lambda y, p=p, v=values, loss=loss: _row_sums(y, p, v, loss),
                )
            context = context / torch.where(total == 0, torch.ones_like(total), total)
            out[:, :, :, start:stop] = context.unflatten(2, (groups, -1))
            lse[:, :, :, start:stop] = (top + total.log()).squeeze(-1).unflatten(2, (groups, -1))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.visible, ctx.scale, ctx.guard = visible, scale, guard
        return _from_key_head(out, q.dtype), _from_key_head(lse.unsqueeze(-1), lse.dtype).squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, out, lse = ctx.saved_tensors
        guard: Guard | None = ctx.guard
        blocks = _Blocks(q, k, v, ctx.visible, ctx.scale)
        groups = blocks.groups
        do = _by_key_head(d_out, groups)
        # d lse enters dS as -delta does: both multiply P.
        delta = (do * out).sum(-1) - _by_key_head(d_lse.unsqueeze(-1), groups).squeeze(-1)
        lse = torch.where(lse == -math.inf, torch.zeros_like(lse), lse)
        b, n_kv, _, length, head = blocks.q.shape
        pairs = float(b * n_kv * groups * length * length) / (2 if ctx.visible.causal else 1)
        flops = 2 * pairs * (3 * head + 2 * v.shape[-1])
        checking = guard is not None and guard.checking(BACKWARD, flops=flops, cost=6 * pairs, backward=True)
        dq = torch.empty_like(blocks.q)
        dk, dv = torch.zeros_like(blocks.k), torch.zeros_like(blocks.v)
        block = _BlockBackward(guard, checking, blocks)
        for part, (start, stop, low, high) in enumerate(blocks):
            block.part = part
            dq_rows, dk_part, dv_part = block.run(
                start,
                stop,
                low,
                high,
                blocks.rows(do, start, stop),
                blocks.rows(lse.unsqueeze(-1), start, stop),
                blocks.rows(delta.unsqueeze(-1), start, stop),
            )
            dq[:, :, :, start:stop] = dq_rows.unflatten(2, (groups, -1))
            dk[:, :, low:high] += dk_part
            dv[:, :, low:high] += dv_part
        dq *= ctx.scale
        return (
            _from_key_head(dq, q.dtype),
            _from_key_head(dk.unsqueeze(2), k.dtype),
            _from_key_head(dv.unsqueeze(2), v.dtype),
            None,
            None,
            None,
        )


class _BlockBackward:
    """The five products of one block of query rows."""

    def __init__(self, guard: Guard | None, checking: bool, blocks: _Blocks) -> None:
        self.guard, self.checking, self.blocks, self.part = guard, checking, blocks, 0

    def product(self, section: str, a: torch.Tensor, b: torch.Tensor, check) -> torch.Tensor:
        """a @ b under its name, checked when this call is."""
        y = a @ b
        if self.guard is not None:
            y = self.guard.touch(section, y, backward=True, part=self.part, parts=len(self.blocks))
        return settle(self.guard, section, y, a, b, check, backward=True) if self.checking and self.guard else y

    def run(self, start, stop, low, high, do, lse, delta):
        """dQ of the rows, and what they add to dK and dV of the keys low..high."""
        blocks = self.blocks
        q, k, v = blocks.rows(blocks.q, start, stop), blocks.k[:, :, low:high], blocks.v[:, :, low:high]
        scores = self.product(
            "scores.backward",
            q,
            k.transpose(-1, -2),
            lambda y: _inner_tiles(y, q, k, blocks.growth(q.shape[-1])),
        )
        p = blocks.masked(scores, start, stop, low, high).sub_(lse).exp_()
        sums = p.sum(-1) if self.checking else None
        if self.checking:
            self.compare(p, sums, q, k, lse)
        outer = blocks.growth(q.shape[-2] + high - low)
        dv = self.product("dv", p.transpose(-1, -2), do, lambda y: _column_sums(y, sums, sums, do, outer))
        dp = self.product(
            "dp",
            do,
            v.transpose(-1, -2),
            lambda y: _inner_tiles(y, do, v, blocks.growth(do.shape[-1])),
        )
        ds = dp.sub_(delta).mul_(p)
        size = torch.linalg.vector_norm(ds, ord=1, dim=-1) if self.checking else None
        dq = self.product(
            "dq", ds, k, lambda y: _signed_row_sums(y, ds, size, k, blocks.growth(high - low + k.shape[-1]))
        )
        dk = self.product(
            "dk", ds.transpose(-1, -2), q, lambda y: _column_sums(y, ds.sum(-1), size, q, outer)
        )
        return dq, dk, dv

    def compare(self, p: torch.Tensor, sums: torch.Tensor, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor) -> None:
        """Refuse rows of P that do not sum to 1: the forward's scores or sums were others than these."""
        assert self.guard is not None
        with unseen_by_checkpointing():
            seen = p.shape[-1]
            # A row that sees nothing sums to 0, in the forward and here.
            expected = (sums != 0).to(sums.dtype)
            largest = torch.linalg.vector_norm(q, dim=-1) * torch.linalg.vector_norm(k, dim=-1).amax(-1, keepdim=True)
            bound = self.blocks.growth(seen) + 8 * (unit_roundoff(p.dtype) + self.blocks.loss) * (
                lse.squeeze(-1).abs() + largest
            )
            found = Deviation(expected - sums, bound, torch.full_like(sums, float(seen)))
            bad = found.bad()
            if p.device.type != "cpu" or bad.any():
                self.guard.report("softmax", outcome(found, refused=bad.sum()), backward=True)
