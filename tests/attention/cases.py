"""Attentions to check, with data of every kind: badly scaled, constant and large included."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from everstep.attention import fused
from everstep.attention.guard import Guard

STYLES = (
    "normal",
    "constant",
    "offset",
    "large",
    "small",
    "badly scaled",
    "outliers",
    "two values",
    "sparse",
)


@dataclass
class Case:
    """One computation: its outputs as a function of a guard."""

    name: str
    run: Callable[[Guard], list[torch.Tensor]]


def data(shape: tuple[int, ...], dtype: torch.dtype, style: str, generator: torch.Generator) -> torch.Tensor:
    """A tensor of one of the styles; "normal" unless false alarms are provoked."""
    x = torch.randn(shape, generator=generator)
    if style == "constant":
        x = torch.full(shape, 0.37)
    elif style == "offset":
        x = x + 5
    elif style == "large":
        x = x * (100 if dtype == torch.float16 else 1e6)
    elif style == "small":
        x = x * (1e-2 if dtype == torch.float16 else 1e-9)
    elif style == "badly scaled":
        rows = torch.logspace(1, -3, shape[1]).view(1, -1, *[1] * (len(shape) - 2))
        x = x * torch.logspace(-4, 2, shape[-1]) * rows
    elif style == "outliers":
        x = torch.where(torch.rand(shape, generator=generator) < 1e-3, x * 1e3, x)
    elif style == "two values":
        x = torch.where(x > 0.3, 1.3, -0.7)
    elif style == "sparse":
        x = torch.where(torch.rand(shape, generator=generator) < 0.95, torch.zeros(()), x)
    return x.to(dtype)


def sdpa(mask: torch.Tensor | None = None) -> fused.Attend:
    """torch's kernel on (B, L, N, H): causal, or under a mask that broadcasts to (B, N, L, L)."""

    def attend(q, k, v):
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2), None

    return attend


def with_lse(q, k, v):
    """A causal kernel that hands out its lse, as flex and varlen do."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("blnh,bmnh->bnlm", q, k).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bnlm,bmnh->blnh", (scores - lse.unsqueeze(-1)).exp(), v.float())
    return out.to(q.dtype), lse.transpose(1, 2)


def attention_case(length: int, groups: int, mask: str, head: int, dtype: torch.dtype, style: str, seed: int) -> Case:
    """One attention; batch 2 where it is short."""
    g = torch.Generator().manual_seed(seed)
    batch, n = (2 if length <= 256 else 1), (8 if length <= 256 else max(2, groups))
    # Scores of large inputs would be one-hot and their gradients zero: only v and dO take extreme styles
    # then.
    of_scores = "normal" if style in ("large", "small", "outliers") else style
    q = data((batch, length, n, head), dtype, of_scores, g)
    k = data((batch, length, n // groups, head), dtype, of_scores, g)
    v = data((batch, length, n // groups, head), dtype, style, g)
    do = data((batch, length, n, head), dtype, style, g)
    for x in (q, k, v):
        x.requires_grad_()
    i, j = torch.arange(length).view(-1, 1), torch.arange(length).view(1, -1)
    part = max(1, length // 3)
    kernel = sdpa(
        {
            "causal": None,
            "document": (j <= i) & (i // part == j // part),
            "window": (j <= i) & (i - j <= max(1, length // 4)),
            "block": i // 16 == j // 16,
            "full": torch.ones(length, length, dtype=torch.bool),
        }[mask]
    )

    def run(watcher):
        out = fused.attention(kernel, q, k, v, scale=None, guard=watcher)[0]
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]

    return Case(f"{length} {mask} G{groups}", run)
