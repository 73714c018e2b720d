"""A stock attention kernel, unchanged, and watched from outside.

Before the kernel q, k and v pass through an autograd node that sees dQ, dK and dV. Behind the kernel the output passes
through a node that sees dO. In the backward the first node runs last, and compares all of these. In the forward the
kernel runs twice and the runs are compared, because round-off hides a wrong score from every cheaper check. Every
finding refuses the slot.
"""

import math
from collections.abc import Callable, Iterable

import torch

from .compiled import at_once, worst_of
from .guard import Guard
from .identities import SUMS, agreement_deviation, backward_deviation, probing_values
from .private import foreach_norm, unseen_by_checkpointing
from .roundoff import accumulator

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""The kernel. It takes q (B, L, N, H), k and v (B, L, N_kv, ·), and returns the context (B, L, N, H_v) and lse, the
log-sum-exp of each row (B, L, N), or None if it has no lse."""

FORWARD, BACKWARD = "attention.forward", "attention.backward"

SHORT, LOST = 512, 2.0**-14
"""Most positions for which `look_at_rows` sees a lost row of P. The most by which the sum of a healthy row differs from
1 in fp32, when scores are about a thousand."""

SMALL_BYTES = 4 << 20
"""Most bytes of Q for `look_at_rows`. A layer keeps four times as much for it until the slot is over."""

RESULTS = ("context", "dq", "dk", "dv")
"""The names of the kernel's results into which faults can be injected."""


class _Inputs(torch.autograd.Function):
    """The node before the kernel. It is the last to run in the backward, where it sees dQ, dK, dV and, as gradients of
    `links`, the tensors that `Output` saw."""

    @staticmethod
    def forward(ctx, q, k, v, guard: Guard, known: tuple[float, bool, bool]):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v)
        ctx.guard, ctx.known = guard, known
        return q.view_as(q), k.view_as(k), v.view_as(v), *links(q, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv, *seen):
        guard: Guard = ctx.guard
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
        dq = guard.inject("dq", dq, backward=True)
        dk = guard.inject("dk", dk, backward=True)
        dv = guard.inject("dv", dv, backward=True)
        if seen[0] is not None:
            compare_backward(guard, (q, k, v), (dq, dk, dv), seen, ctx.known)
        return dq, dk, dv, None, None


class Output(torch.autograd.Function):
    """The node behind the kernel. It is the first to run in the backward, where it sees dO."""

    @staticmethod
    def forward(ctx, out, lse, link, link_out, link_lse, link_d_lse):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse)
        return out.view_as(out), None if lse is None else lse.view_as(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        out, lse = ctx.saved_tensors
        return d_out, d_lse, torch.zeros_like(out) if d_out is None else d_out, out, lse, d_lse


def links(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors without memory, of the shapes of O, O, lse and lse. As the gradients of these, dO, O, lse and dlse
    pass from `Output` to `_Inputs`."""
    acc = accumulator(q.dtype)
    of_out = (q.new_empty(1).expand(*q.shape[:3], v.shape[-1]) for _ in range(2))
    return *of_out, *(q.new_empty(1, dtype=acc).expand(q.shape[:3]) for _ in range(2))


def compare_forward(
    guard: Guard,
    attend: Attend,
    operands: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
) -> None:
    """Run the kernel a second time, on Q, K and sums of V's columns, compare both runs, and report."""
    with torch.no_grad(), unseen_by_checkpointing(), guard.timing():
        q, k, v = operands
        columns = SUMS + 1 if guard.narrow else v.shape[-1]
        again, lse_again = attend(q, k, at_once(probing_values, v)(v, columns))
        worst = worst_of(agreement_deviation, out)(q, k, out, lse, again, lse_again, scale)
        guard.report(FORWARD, worst, "refused")


def compare_backward(guard: Guard, operands, gradients, seen, known, *, in_graph: bool = False) -> None:
    """Compare and report what is due in this slot: everything, only lost rows of P, or nothing.

    Args:
        operands, gradients: Q, K, V and dQ, dK, dV.
        seen: dO, O, lse or None, and the gradient of lse or None.
        known: scale, plain_scores and wide_sums, as in `attention`.
        in_graph: whether the model is compiled.
    """
    d_out, out, lse, d_lse = seen
    scale, plain_scores, wide_sums = known
    if not guard.checked:
        if not guard.checks.looks_at_rows:
            return
        plain_scores = False
    with guard.timing() if guard.checked else guard.looking():
        worst = worst_of(backward_deviation, out, in_graph=in_graph)(
            *operands, out, d_out, *gradients, lse, d_lse, scale, plain_scores=plain_scores, wide_sums=wide_sums
        )
        guard.report(BACKWARD, worst, "refused", backward=True)


def look_at_rows(calls: Iterable[tuple[Guard, torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
    """Refuse the slot if a row of P is lost, for a wide dtype and short sequences. Tests Σ dV = Σ dO with sums alone.

    The bound allows each dO_i an error of LOST times itself, which hides no lost row if rows are few. For more rows
    `backward_deviation` is used instead.

    Args:
        calls: of each call its guard, V (B, L, N_kv, H_v) as only the kernel reads it, O (B, L, N, H_v), and lse
            (B, L, N) or None. V and O retain their gradients, but have none in the first forward of checkpointing.
    """
    guards, d_outs, apart = [], [], []
    for guard, v, out, lse in calls:
        if out.grad is None or v.grad is None:
            continue
        d_out = out.grad if lse is None else torch.where((lse > -torch.inf).unsqueeze(-1), out.grad, 0)
        total, groups = d_out.sum(1), d_out.shape[2] // v.shape[2]
        if groups > 1:
            total = total.unflatten(1, (-1, groups)).sum(2)
        guards.append((guard, LOST * math.sqrt(d_out.shape[1] * groups)))
        d_outs.append(d_out)
        apart.append(total.sub_(v.grad.sum(1)))
    if guards:
        sizes = torch.stack(foreach_norm(d_outs)) + torch.finfo(apart[0].dtype).tiny
        shares = torch.stack(foreach_norm(apart)) / sizes
        for (guard, bound), share in zip(guards, shares.unbind(), strict=True):
            guard.report(BACKWARD, share, "refused", backward=True, bound=bound)


def attention(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    guard: Guard,
    plain_scores: bool = True,
    wide_sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `attend(q, k, v)`, watched.

    Args:
        attend: the kernel; run twice if the call is checked.
        scale: of the scores; None: H ** -0.5.
        plain_scores: False if `attend` changes scores other than by the scale and the mask.
        wide_sums: whether `attend` adds up dK and dV, over all queries and the query heads of a group, in its
            accumulators, and rounds them once.

    Returns:
        What `attend` returns. The gradients are the kernel's, unchanged.
    """
    watched = torch.is_grad_enabled()
    short = q.dtype == accumulator(q.dtype) and q.shape[1] <= SHORT and q.nbytes <= SMALL_BYTES
    if guard.runs_unguarded and (short or not guard.checks.looks_at_rows):
        rows = guard.checks.looks_at_rows and watched and v.requires_grad
        v = v.view_as(v) if rows else v
        out, lse = attend(q, k, v)
        guard.look_at_scores(FORWARD, lse)
        if rows:
            v.retain_grad()
            out.retain_grad()
            guard.checks.look_later(look_at_rows, (guard, v, out, None if lse is None else lse.detach()))
        return out, lse
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    link: list[torch.Tensor] = []
    if watched:
        q, k, v, *link = _Inputs.apply(q, k, v, guard, (scale, plain_scores, wide_sums))
    out, lse = attend(q, k, v)
    guard.look_at_scores(FORWARD, lse)
    hit = guard.inject("context", out.detach())
    if hit.data_ptr() != out.data_ptr():
        out.data.copy_(hit)  # as a fault in the kernel would leave it
    if guard.checked:
        compare_forward(guard, attend, (q, k, v), out, lse, scale)
    if watched:
        out, lse = Output.apply(out, lse, *link)
    return out, lse
