"""A stock attention kernel, left as it is and watched.

Before the kernel q, k and v pass through a node that sees dQ, dK and dV; behind it the output passes through
one that sees dO. The first is the last to run in the backward and compares all of them, in one pass over each. What the
forward can see, values that no average of V can have, is repaired by running the kernel again; what only the backward
shows refuses the slot. A wrong score that round-off hides from the backward is found by running the kernel's forward
twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .findings import Deviation, outcome
from .guard import Guard
from .identities import (
    agreement_deviation,
    backward_deviation,
    forward_deviation,
    joined,
    lse_deviation,
)
from .injection import Fault
from .private import kept_logsumexp, unseen_by_checkpointing, watched
from .roundoff import accumulator

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""The kernel: q (B, L, N, H), k and v (B, L, N_kv, ·) to the context (B, L, N, H_v) and, where the kernel
hands it out, lse (B, L, N)."""

FORWARD, BACKWARD, RERUN = "attention.forward", "attention.backward", "attention.rerun"

FLOPS_PER_READ = 200
"""Of a kernel's FLOPs, how many take the time in which a check reads one element: 500 TFLOP/s of attention against
4.3 TB/s of bf16, on one H200."""

RESULTS = ("context", "dq", "dk", "dv")
"""The kernel's results that can be hit."""

SCORES = "scores"
"""Scores inside the kernel: their faults can be imitated for causal scaled_dot_product_attention on a CPU."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """What both sides of one call know."""

    guard: Guard
    scale: float
    plain_scores: bool
    wide_sums: bool
    checking: bool


class _Inputs(torch.autograd.Function):
    """Before the kernel; last in the backward, where it sees dQ, dK, dV and, as gradients of `links`, what `_Output`
    saw."""

    @staticmethod
    def forward(ctx, q, k, v, watch: _Watch):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v)
        ctx.watch = watch
        return q.view_as(q), k.view_as(k), v.view_as(v), *links(q, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv, *seen):
        watch: _Watch = ctx.watch
        guard = watch.guard
        q, k, v = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
        dq = guard.touch("dq", dq, backward=True)
        dk = guard.touch("dk", dk, backward=True)
        dv = guard.touch("dv", dv, backward=True)
        if watch.checking and seen[0] is not None:
            known = watch.scale, watch.plain_scores, watch.wide_sums
            compare_backward(guard, backward_deviation, q, k, v, dq, dk, dv, seen, *known)
        return dq, dk, dv, None


class _Output(torch.autograd.Function):
    """Behind the kernel; first in the backward, where it sees dO."""

    @staticmethod
    def forward(ctx, out, lse, link, link_out, link_lse, link_d_lse, watch: _Watch):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse)
        ctx.watch = watch
        return out.view_as(out), None if lse is None else lse.view_as(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out, d_lse):
        if not ctx.watch.checking:
            return d_out, d_lse, None, None, None, None, None
        out, lse = ctx.saved_tensors
        return d_out, d_lse, torch.zeros_like(out) if d_out is None else d_out, out, lse, d_lse, None


def links(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors without memory, of the shapes of O, O, lse and lse: as gradients of these what the output's side saw
    reaches the inputs' side, dO, O, lse and dlse."""
    acc = accumulator(q.dtype)
    of_out = (q.new_empty(1).expand(*q.shape[:3], v.shape[-1]) for _ in range(2))
    return *of_out, *(q.new_empty(1, dtype=acc).expand(q.shape[:3]) for _ in range(2))


def compare_backward(guard: Guard, compare, q, k, v, dq, dk, dv, seen, scale, plain_scores, wide_sums) -> None:
    """Compare and report.

    Args:
        compare: `backward_deviation`, or the same compiled.
        seen: dO, O, lse or None, and its gradient or None.
    """
    d_out, out, lse, d_lse = seen
    with guard.timing(BACKWARD, q.device):
        found = compare(
            *(q, k, v, out, d_out, dq, dk, dv, lse, d_lse, scale), plain_scores=plain_scores, wide_sums=wide_sums
        )
        found = guard.widened(BACKWARD, found)
        bad = found.bad()
        if not guard.looks(bad) or bad.any():
            guard.report(BACKWARD, outcome(found, refused=bad.sum()), backward=True)


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
    """`attend(q, k, v)`, watched.

    Args:
        attend: the kernel; also run for a single head, for everything once more after damage, and once more in
            every call where the guard asks for a second run.
        scale: of the scores; None: H ** -0.5.
        plain_scores: False where `attend` changes scores other than by the scale and the mask.
        wide_sums: whether `attend` adds up dK and dV, over all queries and the query heads of a group, in its
            accumulators, and rounds them once.

    Returns:
        What `attend` returns. The gradients are the kernel's, unchanged.
    """
    if guard.idle:
        return attend(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pairs = q.shape[0] * q.shape[2] * float(q.shape[1]) ** 2 / 2
    flops = 2 * pairs * (q.shape[-1] + v.shape[-1])
    forward = guard.checking(FORWARD, flops=flops, cost=float(q.numel() + v.numel()))
    rerun = guard.reruns and guard.checking(RERUN, flops=flops, cost=flops / FLOPS_PER_READ + 2.0 * q.numel())
    backward = guard.checking(BACKWARD, flops=2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1]), cost=10.0 * q.numel())
    watched = torch.is_grad_enabled() and (backward or guard.injecting)
    watch = _Watch(guard, scale, plain_scores, wide_sums, backward)
    link: list[torch.Tensor] = []
    if watched:
        q, k, v, *link = _Inputs.apply(q, k, v, watch)
    out, lse = attend(q, k, v)
    _strike(guard, out, q, k, v, scale)
    if forward or rerun:
        with guard.timing(RERUN if rerun else FORWARD, out.device):
            out, lse = _forward_check(attend, q, k, v, out, lse, watch, rerun)
    if watched:
        out, lse = _Output.apply(out, lse, *link, watch)
    return out, lse


class _Seen(NamedTuple):
    """What a forward shows of itself, and of a second run of it; residuals (B, N, ...).

    inside: O in the range of V. lse: within what the largest score allows. runs: both runs agree.
    """

    inside: Deviation
    lse: Deviation | None
    runs: Deviation | None

    def all(self) -> Deviation:
        """All of it, along the last dimension."""
        return joined(*(part for part in self if part is not None))


def look(
    q,
    k,
    v,
    out,
    lse,
    other: tuple[torch.Tensor, torch.Tensor | None] | None,
    guard: Guard,
    scale: float,
    plain_scores: bool,
) -> _Seen:
    """What a forward shows, and where there is one what a second run (`other`) shows of it."""
    same = other is None or (
        guard.looks(out) and torch.equal(out, other[0]) and (lse is None or torch.equal(lse, other[1]))
    )
    parts = (
        forward_deviation(out, v),
        lse_deviation(lse, q, k, scale) if lse is not None and plain_scores else None,
        None if same else agreement_deviation(out, lse, *other, v),
    )
    return _Seen(*(None if part is None else guard.widened(FORWARD, part) for part in parts))


def _look(q, k, v, out, lse, other: tuple[torch.Tensor, torch.Tensor | None] | None, watch: _Watch) -> _Seen:
    return look(q, k, v, out, lse, other, watch.guard, watch.scale, watch.plain_scores)


def _forward_check(attend: Attend, q, k, v, out, lse, watch: _Watch, rerun: bool):
    guard = watch.guard
    selective = watched()
    with torch.no_grad(), unseen_by_checkpointing():
        other = attend(q, k, v) if rerun else None
        seen = _look(q, k, v, out, lse, other, watch)
        found = seen.all()
        bad = found.bad()
        count = bad.any(-1).sum()
        if not guard.looks(out):
            left = _repair_on_device(attend, q, k, v, out, seen, other) if guard.correct else count
            guard.report(FORWARD, outcome(found, recomputed=count * guard.correct, refused=left))
            return out, lse
        if not count:
            return out, lse
        if not guard.correct:
            guard.report(FORWARD, outcome(found, refused=count))
            return out, lse
        if selective:
            # Selective checkpointing keeps the kernel's outputs and would hand out the damaged ones again. The lse
            # inside the kernel cannot be repaired: what moved O without leaving its range may be in there.
            hidden = seen.runs is not None and not seen.inside.bad().any()
            out.data.copy_(attend(q, k, v)[0])
            left = count if hidden else _look(q, k, v, out, lse, other, watch).all().bad().sum()
            guard.report(FORWARD, outcome(found, recomputed=count, refused=left))
            return out, lse
    third, third_lse = attend(q, k, v)
    with torch.no_grad(), unseen_by_checkpointing():
        left = _look(q, k, v, third, third_lse, other, watch).all().bad().sum()
        if other is not None and left:
            # The second run may be the wrong one: then the third agrees with the first.
            left = _look(q, k, v, third, third_lse, (out, lse), watch).all().bad().sum()
        guard.report(FORWARD, outcome(found, recomputed=count, refused=left))
    return third, third_lse


def _repair_on_device(attend: Attend, q, k, v, out, seen: _Seen, other) -> torch.Tensor:
    """Replace what is outside the range of V, in the storage that the kernel keeps for its backward, whether there
    is any or not, and with no look at the verdict: by the second run where there was one, else by running the kernel
    again for the first damaged query head, 1/N of its work. If an lse that the kernel does not hand out was hit as
    well, the backward's identities see it.

    Returns:
        How much stays wrong: sequence heads that stay damaged; an impossible lse; runs that differ in the range of
        V, where nothing says which of them is right.
    """
    damaged = seen.inside.bad().any(-1)
    if other is None:
        head = damaged.any(0).to(torch.int8).argmax().view(1)
        kv_head = head // (q.shape[2] // k.shape[2])
        again = attend(q.index_select(2, head), k.index_select(2, kv_head), v.index_select(2, kv_head))[0]
        of_head = damaged.index_select(1, head)[:, None, :, None]
        out.data.index_copy_(2, head, torch.where(of_head, again.to(out.dtype), out.index_select(2, head)))
    else:
        out.data.copy_(torch.where(damaged[:, None, :, None], other[0], out))
    left = forward_deviation(out, v).bad().any(-1).sum()
    if seen.lse is not None:
        left = left + seen.lse.bad().sum()
    if seen.runs is not None:
        of_out, of_lse = seen.runs.bad().tensor_split([v.shape[-1]], dim=-1)
        left = left + (of_out.any(-1) & ~damaged).sum() + of_lse.sum()
    return left


def _strike(guard: Guard, out: torch.Tensor, q, k, v, scale: float) -> None:
    """Inject what is due in the forward: into the kernel's own output, as a fault in it would leave it."""
    plain = out.detach()
    hit = guard.touch("context", plain)
    if hit is not plain:
        out.data.copy_(hit)
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
    kept = kept_logsumexp(out)
    if kept is not None:
        # (B, N, L) on a CPU.
        kept.data[b, head, i] = row.logsumexp(0).to(kept.dtype)
