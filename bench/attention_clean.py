"""Count false alarms of the attention check, on healthy attention with data that is likely to cause them.

    python bench/attention_clean.py --cases 10000

A case is one layer's attention with its projections, forward and backward, with every check on. Its data are one token
or runs of tokens repeated, two values, mostly zeros, or padding without loss; with rotary embedding or none; causal,
full, in windows or in documents; with sinks, outlier channels, flat or sharp scores; 1 to 8 key heads with 1 to 4 query
heads each; gradients from 1 to 1e-12; bf16 or fp32; by PyTorch's kernel, an emulated kernel, or explicit matrices.

`--style period` repeats 2 to 16 tokens throughout. Such rows do raise alarms: their roundings are alike, which bounds
for alike rows that follow each other directly do not cover.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from attention_flash import flash
from everstep.attention import explicit, fused, linear
from everstep.attention.guard import Checks
from everstep.attention.masks import Visible
from everstep.attention.section import AttentionCheck

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
KERNELS = ("sdpa", "sdpa", "flash", "matrices", "explicit path")
LENGTHS = (64, 100, 200)
STYLES = ("text", "one token", "runs", "padding", "two values", "sparse")


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return x (B, L, N, H) with rotary embedding."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1]).view(-1, 1) * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = (t.view(1, x.shape[1], 1, half).to(x.dtype) for t in (angle.cos(), angle.sin()))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def tokens(draw: random.Random, length: int, dim: int, style: str) -> torch.Tensor:
    """Return an input of attention (1, L, D), as the norm before it would give it."""
    x = torch.randn(1, length, dim)
    style = style or draw.choice(STYLES)
    if style == "period":
        x = x[:, torch.arange(length) % draw.randint(2, 16)]
    if style == "one token":
        first = draw.choice((1, 4, 16))
        x[:, first:] = x[:, first : first + 1]
    if style == "runs":
        x = x[:, torch.arange(length) // draw.choice((3, 16, 50))]
    if style == "padding":
        x[:, length // 2 :] = torch.randn(dim)
    if style == "two values":
        x = torch.where(x > 0.3, 1.3, -0.7)
    if style == "sparse":
        x = torch.where(torch.rand(x.shape) < 0.95, 0.0, x)
    if draw.random() < 0.3:
        x[..., torch.randperm(dim)[:3]] *= torch.tensor([300.0, 50.0, 10.0])
    return F.rms_norm(x, (dim,))


def sdpa(visible: Visible):
    """Return PyTorch's kernel under a mask."""

    def attend(q, k, v):
        mask = visible.block(0, q.shape[1], 0, q.shape[1], batch=1, heads=q.shape[2], device=q.device)
        by_head = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=q.shape[2] != k.shape[2])
        return out.transpose(1, 2), None

    return attend


def case(seed: int, lengths: Sequence[int] = LENGTHS, style: str = "") -> tuple[str, list[dict]]:
    """Run one case, with one of these sequence lengths and this style of data, or any of STYLES. Returns what it was,
    and what the checks found."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dtype, kernel, kv_heads = draw.choice(DTYPES), draw.choice(KERNELS), draw.choice((1, 2, 4, 8))
    heads, head, length = kv_heads * draw.choice((1, 2, 4)), draw.choice((16, 64)), draw.choice(lengths)
    documents = (torch.arange(length) // draw.choice((7, 40))).view(1, -1)
    masks = {
        "causal": Visible(),
        "documents": Visible(documents=documents),
        "full": Visible(causal=False),
        "window": Visible(window=draw.choice((3, 30))),
    }
    mask = "causal" if kernel == "flash" else draw.choice(sorted(masks))
    visible = masks[mask]
    dim, rope, sinks = 128, draw.random() < 0.5, kernel == "matrices" and draw.random() < 0.5
    sharp = draw.choice((1.0, 1.0, 4.0, 1 / 30))
    x = tokens(draw, length, dim, style).to(dtype).requires_grad_()
    qkv = torch.randn((heads + 2 * kv_heads) * head, dim) / math.sqrt(dim)
    qkv[: heads * head] *= sharp
    wqkv, wo = qkv.to(dtype).requires_grad_(), (torch.randn(dim, heads * head) / 16).to(dtype).requires_grad_()
    dy = torch.randn(1, 1, dim) + draw.choice((0.0, 0.01, 0.1, 1.0, 30.0)) * torch.randn(1, length, dim)
    dy *= draw.choice((1.0, 1.0, 1e-3, 1e-12))
    if draw.random() < 0.3:
        dy[:, length // 2 :] = 0

    checks = Checks(AttentionCheck(enable=True, frequency=1.0, mode=draw.choice(("detect", "correct"))))
    of_qkv, of_inner, of_out = (checks.guard(0, name, ()) for name in ("wqkv", "inner", "wo"))
    of_inner.narrow = kernel in ("flash", "matrices")
    checks.begin(1, 0)
    parts = linear.linear(x, wqkv, None, of_qkv).unflatten(-1, (-1, head))
    q, k, v = parts.split((heads, kv_heads, kv_heads), 2)
    if rope:
        q, k = rotated(q), rotated(k)
    if kernel == "explicit path":
        out, lse = explicit.attention(q, k, v, visible, guard=of_inner)
    else:
        plain = lambda q, k, v: explicit.attention(q, k, v, visible)  # noqa: E731
        attend = {"sdpa": sdpa(visible), "flash": flash(), "matrices": plain}[kernel]
        out, lse = fused.attention(attend, q, k, v, scale=None, guard=of_inner, wide_sums=kernel != "sdpa")
    if sinks and lse is not None:
        out = out * torch.sigmoid(lse - torch.randn(heads)).unsqueeze(-1).to(dtype)
    y = linear.linear(out.flatten(2), wo, None, of_out)
    finite = all(g.isfinite().all() for g in torch.autograd.grad(y, (x, wqkv, wo), dy.to(dtype)))
    checks.refused()
    what = f"{dtype} {kernel} {mask} L{length} H{head} {heads}/{kv_heads} rope {rope} sinks {sinks} sharp {sharp:.2g}"
    return what, checks.findings.drain() if finite and y.isfinite().all() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths to draw from")
    parser.add_argument(
        "--style", choices=(*STYLES, "period"), default="", help="style of the data; default: any but period"
    )
    args = parser.parse_args()
    alarms: Counter[str] = Counter()
    for seed in range(args.seed, args.seed + args.cases):
        what, findings = case(seed, args.lengths, args.style)
        if findings:
            alarms[findings[0]["section"]] += 1
            said = ", ".join(f"{f['section']} {f['action']} {f['magnitude'] or f['kind']}" for f in findings)
            print(f"seed {seed}: {what}: {said}", flush=True)
    print(f"{args.cases} cases, {sum(alarms.values())} alarms: {dict(alarms)}")


if __name__ == "__main__":
    main()
