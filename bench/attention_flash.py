"""FlashAttention-2, forward and backward, tile by tile in PyTorch: a fused kernel into which faults can be put.

It computes as the kernels on accelerators do: scores, P, dP and dS of one tile at a time in fp32; P and dS rounded to
the operands' dtype before they are multiplied again; online softmax; fp32 accumulators for O, dQ, dK and dV; lse and
delta = rowsum(dO ∘ O) between forward and backward. Every intermediate of every tile passes through a hook.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from everstep.attention.injection import Fault, inject

FORWARD = ("s", "p", "m", "l", "acc", "out", "lse")
"""Intermediates of the forward, in the order in which a tile computes them; `out` and `lse` are its results."""

BACKWARD = ("saved lse", "saved out", "delta", "bs", "bp", "dp", "ds", "dv acc", "dk acc", "dq acc", "dq", "dk", "dv")
"""Intermediates of the backward. The saved ones are results of the forward, hit before the backward reads them."""

Hook = Callable[[str, torch.Tensor], torch.Tensor]


def untouched(name: str, tile: torch.Tensor) -> torch.Tensor:
    """Return the tile unchanged: the hook of a healthy device."""
    return tile


@dataclass
class Strike:
    """A hook that puts a fault into one intermediate of one tile, once. Without a fault it only counts tiles."""

    name: str = ""
    tile: int = 0
    fault: Fault | None = None

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.hit = False

    def __call__(self, name: str, tile: torch.Tensor) -> torch.Tensor:
        at, self.counts[name] = self.counts[name], self.counts[name] + 1
        if self.fault is None or name != self.name or at != self.tile:
            return tile
        self.hit = True
        return inject(tile, self.fault)


def exponent_or_sign(dtype: torch.dtype, draw: random.Random) -> Fault:
    """Draw a fault that flips one exponent bit, or the sign bit, of a number of this dtype."""
    low, high = {torch.float32: (23, 31), torch.bfloat16: (7, 15), torch.float16: (10, 15)}[dtype]
    return Fault("bitflip", draw.random(), bit=draw.randint(low, high))


class Flash(torch.autograd.Function):
    """The autograd function of `flash` below."""

    @staticmethod
    def forward(ctx, q, k, v, scale: float, causal: bool, block: int, hook: Hook):
        groups = q.shape[2] // k.shape[2]
        q_, k_, v_ = (_heads_first(x, n) for x, n in ((q, 1), (k, groups), (v, groups)))
        out, lse = _forward(q_, k_, v_, scale, causal, block, hook)
        out = out.transpose(1, 2).contiguous()
        lse = lse.transpose(1, 2).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal, ctx.block, ctx.hook = scale, causal, block, hook
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, _):  # pyrefly: ignore[bad-override] torch declares backward(ctx, *grads)
        q, k, v, out, lse = ctx.saved_tensors
        hook = ctx.hook
        groups = q.shape[2] // k.shape[2]
        q_, k_, v_ = (_heads_first(x, n) for x, n in ((q, 1), (k, groups), (v, groups)))
        lse, out = hook("saved lse", lse.transpose(1, 2)), hook("saved out", out.transpose(1, 2))
        d_out = d_out.transpose(1, 2)
        dq, dk, dv = _backward(q_, k_, v_, out, lse, d_out, ctx.scale, ctx.causal, ctx.block, hook)
        dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
        dq, dk, dv = (x.transpose(1, 2).to(q.dtype).contiguous() for x in (dq, dk, dv))
        return hook("dq", dq), hook("dk", dk), hook("dv", dv), None, None, None, None


def flash(hook: Hook = untouched, *, causal: bool = True, block: int = 64, scale: float | None = None):
    """Return a kernel for `fused.attention`: it maps q (B, L, N, H) and k, v (B, L, N_kv, ·) to context and lse
    (B, L, N). If values and keys have different widths, its tiles have half the size, as a tuned kernel's might."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tile = block if v.shape[-1] == k.shape[-1] else block // 2
        return Flash.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal, tile, hook)

    return attend


def _heads_first(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.transpose(1, 2).repeat_interleave(groups, 1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b, accumulated in fp32 as in a matrix unit."""
    return a.float() @ b.float()


def _scores(q, k, scale: float, causal: bool, row: int, column: int) -> torch.Tensor:
    s = _product(q, k.transpose(-1, -2)) * scale
    if causal and column + s.shape[-1] - 1 > row:
        i = torch.arange(row, row + s.shape[-2]).view(-1, 1)
        s = s.masked_fill(torch.arange(column, column + s.shape[-1]) > i, -math.inf)
    return s


def _forward(q, k, v, scale: float, causal: bool, block: int, hook: Hook):
    length = q.shape[2]
    outs, lses = [], []
    for row in range(0, length, block):
        q_i = q[:, :, row : row + block]
        m = q.new_full(q_i.shape[:-1], -math.inf, dtype=torch.float32)
        total = torch.zeros_like(m)
        acc = q.new_zeros(*q_i.shape[:-1], v.shape[-1], dtype=torch.float32)
        for column in range(0, min(row + block, length) if causal else length, block):
            k_j, v_j = k[:, :, column : column + block], v[:, :, column : column + block]
            s = hook("s", _scores(q_i, k_j, scale, causal, row, column))
            new = hook("m", torch.maximum(m, s.amax(-1)))
            p = hook("p", (s - new.unsqueeze(-1)).exp())
            shrink = (m - new).exp()
            total = hook("l", total * shrink + p.sum(-1))
            acc = hook("acc", acc * shrink.unsqueeze(-1) + _product(p.to(q.dtype), v_j))
            m = new
        outs.append((acc / total.unsqueeze(-1)).to(q.dtype))
        lses.append(m + total.log())
    return hook("out", torch.cat(outs, 2)), hook("lse", torch.cat(lses, 2))


def _backward(q, k, v, out, lse, d_out, scale: float, causal: bool, block: int, hook: Hook):
    length = q.shape[2]
    delta = hook("delta", (d_out.float() * out.float()).sum(-1))
    dq = torch.zeros_like(q, dtype=torch.float32)
    dks, dvs = [], []
    for column in range(0, length, block):
        k_j, v_j = k[:, :, column : column + block], v[:, :, column : column + block]
        dk, dv = torch.zeros_like(k_j, dtype=torch.float32), torch.zeros_like(v_j, dtype=torch.float32)
        for row in range(column if causal else 0, length, block):
            rows = slice(row, row + block)
            q_i, do_i = q[:, :, rows], d_out[:, :, rows]
            s = hook("bs", _scores(q_i, k_j, scale, causal, row, column))
            p = hook("bp", (s - lse[:, :, rows].unsqueeze(-1)).exp())
            dv = hook("dv acc", dv + _product(p.to(q.dtype).transpose(-1, -2), do_i))
            dp = hook("dp", _product(do_i, v_j.transpose(-1, -2)))
            ds = hook("ds", p * (dp - delta[:, :, rows].unsqueeze(-1)))
            narrow = ds.to(q.dtype)
            dk = hook("dk acc", dk + _product(narrow.transpose(-1, -2), q_i) * scale)
            dq[:, :, rows] = hook("dq acc", dq[:, :, rows] + _product(narrow, k_j) * scale)
        dks.append(dk)
        dvs.append(dv)
    return dq, torch.cat(dks, 2), torch.cat(dvs, 2)


hooks: list[Hook] = [untouched]
"""The last of these hooks sees the intermediates of `flash_operator`."""


class Saved:
    """The part of an autograd function's context that `Flash` uses."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep these tensors."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Do nothing."""


@torch.library.custom_op("bench::flash", mutates_args=())
def flash_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash`, causal, as an operator that a graph can hold."""
    return Flash.forward(Saved(), q, k, v, q.shape[-1] ** -0.5, True, 64, hooks[-1])


@flash_operator.register_fake
def _(q, k, v):
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("bench::flash_backward", mutates_args=())
def flash_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, d_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Flash.backward` as an operator."""
    ctx = Saved()
    ctx.saved_tensors = q, k, v, out, lse
    ctx.scale, ctx.causal, ctx.block, ctx.hook = q.shape[-1] ** -0.5, True, 64, hooks[-1]
    return Flash.backward(ctx, d_out, None)[:3]


@flash_backward.register_fake
def _(q, k, v, out, lse, d_out):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, *output)


flash_operator.register_autograd(
    lambda ctx, d_out, d_lse: flash_backward(*ctx.saved_tensors, d_out), setup_context=_keep
)
