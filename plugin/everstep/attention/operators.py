"""The checks as operators of PyTorch, so that torch.compile takes a checked block as one graph.

Python cannot run inside a graph, and a check decides anew in each slot. So the graph holds one opaque operator for each
checked result, with a fake kernel for its shapes. The operator runs the code of eager mode. It finds its guard by
`ticket`, a small tensor on the host, which is an ordinary input of the graph. A number would be compiled into the
graph, once for every layer. Every operator is declared to mutate its ticket, so it is not dropped, merged or reordered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, infer_schema, register_fake

from .fused import FORWARD, Attend, Output, compare_backward, compare_forward, links
from .guard import Guard, guard_of
from .linear import input_gradient, project, weight_gradient, with_products

_LIBRARY = Library("everstep", "FRAGMENT")


def _operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function an operator of this name, declared to mutate its ticket. fake: makes the
    operator's result without values."""
    # `torch.library.custom_op` would work, but takes twice as long per call, for autograd that is not needed here.

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = infer_schema(function, mutates_args=("ticket",))
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        register_fake(f"everstep::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.everstep, name).default

    return made


@_operator("project", lambda x, weight, bias, ticket: x.new_empty(x.shape[0], weight.shape[0]))
def _project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ticket: torch.Tensor) -> torch.Tensor:
    return project(x, weight, bias, guard_of(ticket))


@_operator("input_gradient", lambda dy, weight, ticket: dy.new_empty(dy.shape[0], weight.shape[1]))
def _input_gradient(dy: torch.Tensor, weight: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    return input_gradient(dy, weight, guard_of(ticket))


@_operator("weight_gradient", lambda dy, x, ticket: dy.new_empty(dy.shape[1], x.shape[1]))
def _weight_gradient(dy: torch.Tensor, x: torch.Tensor, ticket: torch.Tensor) -> torch.Tensor:
    return weight_gradient(dy, x, guard_of(ticket))


_Linear = with_products(_project, _input_gradient, _weight_gradient)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, guard: Guard) -> torch.Tensor:
    """Return the result of `linear.linear`, in a graph."""
    return _Linear.apply(x, weight, bias, guard.ticket)


@_operator("touch", lambda x, ticket, section, backward: torch.empty_like(x))
def _touch(x: torch.Tensor, ticket: torch.Tensor, section: str, backward: bool) -> torch.Tensor:
    touched = guard_of(ticket).inject(section, x, backward=backward)
    return torch.empty_like(x).copy_(touched)  # with the strides of the fake result


@_operator("look_at_scores", lambda *_: None)
def _look_at_scores(lse: torch.Tensor, ticket: torch.Tensor) -> None:
    guard_of(ticket).look_at_scores(FORWARD, lse)


@_operator("run_again", lambda *_: None)
def _run_again(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    mask: torch.Tensor | None,
    ticket: torch.Tensor,
    scale: float,
) -> None:
    guard = guard_of(ticket)
    if guard.checked and guard.kernel is not None:
        compare_forward(guard, guard.kernel(mask, scale, lse is not None), (q, k, v), out, lse, scale)


@_operator("watch_backward", lambda *_: None)
def _watch_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    d_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    ticket: torch.Tensor,
    scale: float,
    plain_scores: bool,
    wide_sums: bool,
) -> None:
    with torch.no_grad():
        seen, known = (d_out, out, lse, d_lse), (scale, plain_scores, wide_sums)
        compare_backward(guard_of(ticket), (q, k, v), (dq, dk, dv), seen, known, in_graph=True)


class _Touched(torch.autograd.Function):
    """The attention's output, with the fault to inject, if one is due."""

    @staticmethod
    def forward(ctx, out, ticket):
        return _touch(out, ticket, "context", False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_out):
        return d_out, None


class _Inputs(torch.autograd.Function):
    """`fused._Inputs` for a graph, where absent gradients are zeros."""

    @staticmethod
    def forward(ctx, q, k, v, ticket, injecting, hands_out_lse, uses_lse, scale, plain_scores, wide_sums):
        ctx.save_for_backward(q, k, v)
        ctx.ticket, ctx.injecting, ctx.hands_out_lse, ctx.uses_lse = ticket, injecting, hands_out_lse, uses_lse
        ctx.known = scale, plain_scores, wide_sums
        return q.view_as(q), k.view_as(k), v.view_as(v), *links(q, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv, d_out, out, lse, d_lse):
        q, k, v = ctx.saved_tensors
        if ctx.injecting:
            dq = _touch(dq, ctx.ticket, "dq", True)
            dk = _touch(dk, ctx.ticket, "dk", True)
            dv = _touch(dv, ctx.ticket, "dv", True)
        of_lse = lse if ctx.hands_out_lse else None, d_lse if ctx.uses_lse else None
        _watch_backward(q, k, v, dq, dk, dv, d_out, out, *of_lse, ctx.ticket, *ctx.known)
        return dq, dk, dv, *(None,) * 7


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
    hands_out_lse: bool = False,
    uses_lse: bool = False,
    mask: torch.Tensor | None = None,
    twice: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Return the result of `fused.attention`, in a graph. The guard's `kernel` is the second run, outside of the graph.

    Args:
        hands_out_lse: whether `attend` returns lse. uses_lse: whether the model computes with it.
        mask: a tensor that identifies the mask to `kernel`; None: no mask.
        twice: whether the forward runs twice; only if `kernel` computes the same as `attend`.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ticket, injecting = guard.ticket, guard.checks.injector.active
    watched = torch.is_grad_enabled()
    link: list[torch.Tensor] = []
    if watched:
        of_lse = hands_out_lse, uses_lse
        q, k, v, *link = _Inputs.apply(q, k, v, ticket, injecting, *of_lse, scale, plain_scores, wide_sums)
    out, lse = attend(q, k, v)
    if lse is not None:
        _look_at_scores(lse.detach(), ticket)
    if injecting:
        out = _Touched.apply(out, ticket)
    if twice and guard.kernel is not None:
        _run_again(*(x if x is None else x.detach() for x in (q, k, v, out, lse)), mask, ticket, scale)
    if watched:
        out, lse = Output.apply(out, lse, *link)
    return out, lse
