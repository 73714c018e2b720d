"""FlexAttention and varlen attention on a machine without an accelerator, under the model's own masks.

On a CPU PyTorch has no backward of FlexAttention and no varlen attention at all. Both are computed here by scaled dot
product attention, for which CPUs have a kernel, with the mask as a matrix. This is meant for trials and tests with rows
of a few hundred tokens. If a model also needs lse (for attention sinks), scores and weights are matrices too.

Shape suffixes, as torchtitan's: B batch, L positions, N heads, H head dimension; S positions of keys.
"""

from collections.abc import Callable, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata

from everstep.attention.masks import Visible, documents_of
from everstep.foreign import replace
from everstep.titan import private

Transform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MatrixMask(BlockMask):
    """A BlockMask of one block, with its mask as a matrix, made once for all layers.

    seen: bool [B or 1, N or 1, L, S], true where a query sees a key; None: the mask is causal, with no further rule.
    """

    seen: torch.Tensor | None


def prepare(config: Any) -> None:
    """Have this process compute FlexAttention and varlen attention by `forward`, with masks for a trainer config."""
    split_rows = config.parallelism.context_parallel_degree > 1  # context parallelism splits the masks, too
    private.make_masks_with(create_block_mask if split_rows else matrix_mask, create_block_mask)
    replace(FlexAttention, "forward", forward)
    replace(VarlenAttention, "forward", forward)


def matrix_mask(
    mask_mod: Callable[..., torch.Tensor],
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    device: Any = None,
    **blocks: Any,
) -> MatrixMask:
    """Make a MatrixMask, in place of torch's `create_block_mask`. blocks: sizes for a kernel; they are ignored."""
    sizes = batch or 1, heads or 1, queries, keys
    seen = _seen(Visible(causal=False, mod=mask_mod), sizes, device)
    one = torch.ones(*sizes[:2], 1, dtype=torch.int32, device=device)
    mask = MatrixMask.from_kv_blocks(
        one,
        torch.zeros_like(one).unsqueeze(-1),
        BLOCK_SIZE=(queries, keys),
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
        compute_q_blocks=False,
    )
    mask.seen = None if seen.equal(torch.ones_like(seen).tril()) else seen
    return mask


def _seen(visible: Visible, sizes: Sequence[int], device: Any) -> torch.Tensor:
    """Return a mask with at least one rule as a matrix, expanded to `sizes`: B, N, L and S."""
    batch, heads, queries, keys = sizes
    seen = visible.block(0, queries, 0, keys, batch=batch, heads=heads, device=device)
    assert seen is not None
    return seen.expand(*sizes)


def attend(
    q_BLNH: torch.Tensor,
    k_BSNH: torch.Tensor,
    v_BSNH: torch.Tensor,
    seen_BNLS: torch.Tensor | None,
    scale: float | None,
    out_transform: Transform | None,
) -> torch.Tensor:
    """Return attention under a mask (see `MatrixMask.seen`). Keys may have fewer heads than queries.

    Args:
        out_transform: makes the result from the output [B, L, N, H] and from lse [B, L, N], the log-sum-exp of each
            row. None: the result is the output.
    """
    q_BNLH, k_BNSH, v_BNSH = (part.transpose(1, 2) for part in (q_BLNH, k_BSNH, v_BSNH))
    grouped = k_BNSH.shape[1] != q_BNLH.shape[1]
    if out_transform is None:
        out = F.scaled_dot_product_attention(
            q_BNLH, k_BNSH, v_BNSH, seen_BNLS, is_causal=seen_BNLS is None, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    if grouped:
        repeats = q_BNLH.shape[1] // k_BNSH.shape[1]
        k_BNSH, v_BNSH = (part.repeat_interleave(repeats, dim=1) for part in (k_BNSH, v_BNSH))
    if seen_BNLS is None:
        seen_BNLS = torch.ones(q_BNLH.shape[2], k_BNSH.shape[2], dtype=torch.bool, device=q_BNLH.device).tril()
    scale = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
    scores_BNLS = (q_BNLH.float() @ k_BNSH.float().transpose(-1, -2)) * scale
    scores_BNLS = scores_BNLS.masked_fill(~seen_BNLS, float("-inf"))
    lse_BNL = scores_BNLS.logsumexp(-1)
    out_BNLH = (scores_BNLS - lse_BNL.unsqueeze(-1)).exp() @ v_BNSH.float()
    return out_transform(out_BNLH.to(q_BLNH.dtype).transpose(1, 2), lse_BNL.transpose(1, 2))


def forward(
    self: Any,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: BlockMask | VarlenMetadata,
    scale: float | None = None,
    out_transform: Transform | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute FlexAttention or VarlenAttention by scaled dot product attention, in the dtype of the inputs. torchtitan
    shards the arguments by their names. Raises NotImplementedError for a score_mod."""
    if kwargs.get("score_mod") is not None:
        raise NotImplementedError("score_mod of FlexAttention is not computed on a CPU: it needs an accelerator")
    with spmd.no_typecheck():
        if isinstance(attention_masks, VarlenMetadata):
            rows, length = q_BLNH.shape[:2]
            visible = visible_in(attention_masks, q_BLNH.shape[:2], self.window_size)
            seen = _seen(visible, (rows, 1, length, length), q_BLNH.device)
        elif isinstance(attention_masks, MatrixMask):
            seen = attention_masks.seen
        else:  # a part of a mask, since context parallelism splits rows among ranks
            sizes = *attention_masks.kv_num_blocks.shape[:2], q_BLNH.shape[1], k_BLNH.shape[1]
            seen = _seen(Visible(causal=False, mod=attention_masks.mask_mod), sizes, q_BLNH.device)
        return attend(q_BLNH, k_BLNH, v_BLNH, seen, scale, out_transform)


def visible_in(packed: VarlenMetadata, shape: torch.Size, window: tuple[int, int]) -> Visible:
    """Return the rules of the mask of packed rows.

    Args:
        shape: B, L.
        window: `window_size` of VarlenAttention.Config: positions seen back and ahead; below 0: all.
    """
    back, ahead = window
    return Visible(
        causal=ahead == 0,
        window=None if back < 0 else back,
        documents=documents_of(packed.cu_seq_q, *shape),
        mod=(lambda b, h, i, j: j - i <= ahead) if ahead > 0 else None,
    )
