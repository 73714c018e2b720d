"""Attentions to check, with data of every kind: badly scaled, constant and large included."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from everstep.attention import explicit, fused
from everstep.attention.guard import Guard
from everstep.attention.masks import Visible

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


def sdpa(visible: Visible) -> fused.Attend:
    """torch's kernel on (B, L, N, H) under a mask."""
    plain = visible == Visible()

    def attend(q, k, v):
        batch, length, heads = q.shape[:3]
        mask = None if plain else visible.block(0, length, 0, length, batch=batch, heads=heads, device=q.device)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=plain,
            enable_gqa=heads != k.shape[2],
        )
        return out.transpose(1, 2), None

    return attend


def attention_case(
    path: str, length: int, groups: int, mask: str, head: int, dtype: torch.dtype, style: str, seed: int
) -> Case:
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
    documents = torch.arange(length).expand(batch, -1) // max(1, length // 3)
    visible = {
        "causal": Visible(),
        "document": Visible(documents=documents),
        "window": Visible(window=max(1, length // 4)),
        "block": Visible(causal=False, mod=lambda b, h, i, j: i // 16 == j // 16),
        "full": Visible(causal=False),
    }[mask]

    def run(watcher):
        if path == "explicit":
            out = explicit.attention(q, k, v, visible, guard=watcher)[0]
        else:
            out = fused.attention(sdpa(visible), q, k, v, scale=None, guard=watcher)[0]
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]

    return Case(f"{path} {length} {mask} G{groups}", run)
