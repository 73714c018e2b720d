"""A stock attention kernel, left as it is and watched.

Before the kernel q, k and v pass through a node that sees dQ, dK and dV; behind it the output passes through
one that sees dO. The first is the last to run in the backward and compares. What the forward can see, values
that no average of V can have, is repaired by running the kernel again; what only the backward shows refuses
the slot.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from .findings import Deviation, outcome
from .guard import Guard
from .identities import (
    OutputSide,
    backward_deviation,
    forward_deviation,
    joined,
    lse_deviation,
    output_side,
)
from .injection import Fault, inject
from .product import unseen_by_checkpointing

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""The kernel: q (B, L, N, H), k and v (B, L, N_kv, ·) to the context (B, L, N, H_v) and, where the kernel
hands it out, lse (B, L, N)."""

FORWARD, BACKWARD = "attention.forward", "attention.backward"

RESULTS = ("context", "dq", "dk", "dv")
"""The kernel's results that can be hit."""

SCORES = "scores"
"""Scores inside the kernel: their faults can be imitated for causal scaled_dot_product_attention on a CPU."""


@dataclass(slots=True)
class _Watch:
    """One call, from its forward to its backward."""

    guard: Guard
    scale: float
    plain_scores: bool
    checking: bool
    side: OutputSide | None = None


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, watch: _Watch):
        ctx.save_for_backward(q, k, v)
        ctx.watch = watch
        return q.view_as(q), k.view_as(k), v.view_as(v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv):
        watch: _Watch = ctx.watch
        guard = watch.guard
        dq = guard.touch("dq", dq, backward=True)
        dk = guard.touch("dk", dk, backward=True)
        dv = guard.touch("dv", dv, backward=True)
        if watch.checking and watch.side is not None:
            q, k, v = ctx.saved_tensors
            found = backward_deviation(q, k, v, dq, dk, dv, watch.side, watch.scale, plain_scores=watch.plain_scores)
            bad = found.bad()
            if bad.device.type != "cpu" or bad.any():
                guard.report(BACKWARD, outcome(found, refused=bad.sum()), backward=True)
        return dq, dk, dv, None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, lse, n_kv: int, watch: _Watch):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse)
        ctx.watch, ctx.n_kv = watch, n_kv
        return out.view_as(out), None if lse is None else lse.view_as(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        if ctx.watch.checking and d_out is not None:
            out, lse = ctx.saved_tensors
            sees = None if lse is None else lse > -torch.inf
            ctx.watch.side = output_side(d_out, out, d_lse, sees, ctx.n_kv)
        return d_out, d_lse, None, None


def attention(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    guard: Guard,
    plain_scores: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attend(q, k, v)`, watched.

    Args:
        attend: the kernel; also run for a single head, and for everything once more after damage.
        scale: of the scores; None: H ** -0.5.
        plain_scores: False where `attend` changes scores other than by the scale and the mask.

    Returns:
        What `attend` returns. The gradients are the kernel's, unchanged.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pairs = q.shape[0] * q.shape[2] * float(q.shape[1]) ** 2 / 2
    forward = guard.checking(FORWARD, flops=2 * pairs * (q.shape[-1] + v.shape[-1]), cost=float(q.numel() + v.numel()))
    backward = guard.checking(BACKWARD, flops=2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]), cost=10.0 * q.numel())
    watched = torch.is_grad_enabled() and (backward or guard.injecting)
    watch = _Watch(guard, scale, plain_scores, backward)
    if watched:
        q, k, v = _Inputs.apply(q, k, v, watch)
    out, lse = attend(q, k, v)
    _strike(guard, out, q, k, v, scale)
    if forward:
        out, lse = _forward_check(attend, q, k, v, out, lse, watch)
    if watched:
        out, lse = _Output.apply(out, lse, k.shape[2], watch)
    return out, lse


def _forward_check(attend: Attend, q, k, v, out, lse, watch: _Watch):
    guard = watch.guard
    on_host = out.device.type == "cpu"

    def look(out: torch.Tensor, lse: torch.Tensor | None) -> Deviation:
        found = forward_deviation(out.detach(), v.detach())
        if lse is None or not watch.plain_scores:
            return found
        return joined(found, lse_deviation(lse.detach(), q.detach(), k.detach(), watch.scale))

    with torch.no_grad(), unseen_by_checkpointing():
        found = look(out, lse)
        bad = found.bad()
        if on_host and not bad.any():
            return out, lse
        if not guard.correct:
            guard.report(FORWARD, outcome(found, refused=bad.sum()))
            return out, lse
        if not on_host:
            left = _repair_head(attend, q, k, v, out, bad[..., : v.shape[-1]])
            # A wrong lse stays with the kernel for its backward: no repair from here.
            left = left + bad[..., v.shape[-1] :].sum()
            guard.report(FORWARD, outcome(found, recomputed=bad.any(-1).sum(), refused=left))
            return out, lse
    if _len_torch_dispatch_stack():
        # Selective checkpointing keeps the kernel's outputs and would hand out the damaged ones again.
        with torch.no_grad(), unseen_by_checkpointing():
            out.data.copy_(attend(q, k, v)[0])
    else:
        out, lse = attend(q, k, v)
    with torch.no_grad(), unseen_by_checkpointing():
        left = look(out, lse).bad().sum()
        guard.report(FORWARD, outcome(found, recomputed=bad.any(-1).sum(), refused=left))
    return out, lse


def _repair_head(attend: Attend, q, k, v, out, bad: torch.Tensor) -> torch.Tensor:
    """Run the kernel again for the first damaged query head, on the device, whether there is one or not: 1/N
    of its work, and no look at the verdict. The repaired head replaces the damaged one where the kernel keeps
    it for the backward, too; if the kernel's lse was hit as well, the backward's identities see it.

    Returns:
        Sequence heads that stay damaged.
    """
    heads = bad.any(-1)
    head = heads.any(0).to(torch.float32).argmax().view(1)
    kv_head = head // (q.shape[2] // k.shape[2])
    again = attend(q.index_select(2, head), k.index_select(2, kv_head), v.index_select(2, kv_head))[0]
    old = out.index_select(2, head)
    damaged = heads.index_select(1, head)[:, None, :, None]
    out.data.index_copy_(2, head, torch.where(damaged, again.to(out.dtype), old))
    still = forward_deviation(out.detach(), v.detach()).bad().any(-1)
    return still.sum()


def _strike(guard: Guard, out: torch.Tensor, q, k, v, scale: float) -> None:
    """Inject what is due in the forward: into the kernel's own output, as a fault in it would leave it."""
    fault = guard.fault("context")
    if fault is not None:
        out.data.copy_(inject(out.detach(), fault))
    fault = guard.fault(SCORES)
    if fault is not None:
        strike_scores(out, q, k, v, scale, fault)


@torch.no_grad()
def strike_scores(out: torch.Tensor, q, k, v, scale: float, fault: Fault) -> None:
    """Leave `out`, and the lse that the kernel kept, as if one causal score had been wrong in its forward.

    Only for scaled_dot_product_attention on a CPU, whose autograd node shows its lse.
    """
    _, length, n, _ = out.shape
    where = fault.index(out[..., 0])
    b, i, head = where // (length * n), where // n % length, where % n
    kv_head = head // (n // k.shape[2])
    keys, values = k[b, : i + 1, kv_head].double(), v[b, : i + 1, kv_head].double()
    row = (keys @ q[b, i, head].double() * scale).to(torch.float32)
    j = int(fault.place * 104729) % (i + 1)
    row[j : j + 1] = fault.value(row[j : j + 1])
    row = row.double()
    out.data[b, i, head] = (row.softmax(0) @ values).to(out.dtype)
    node, seen = out.grad_fn, 0
    while node is not None and not hasattr(node, "_saved_logsumexp") and seen < 8:
        node, seen = (node.next_functions[0][0] if node.next_functions else None), seen + 1
    kept = getattr(node, "_saved_logsumexp", None)
    if kept is not None:
        # (B, N, L) on a CPU.
        kept.data[b, head, i] = row.logsumexp(0).to(kept.dtype)
