"""Attention as matrices, for models whose masks say more than "causal" on a machine without an accelerator.

PyTorch has no backward of FlexAttention on a CPU and no varlen attention at all. Both are computed here from their own
masks, with the whole score matrix in memory: for tries and tests, with rows of a few hundred tokens.

Shape suffixes, as torchtitan's: B batch, L positions, N heads, H head dimension; S positions of keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask, create_mask
from torchtitan.config.override import derive
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from everstep.titan import private


def keep_masks(model_config: Any) -> None:
    """Have FlexAttention and varlen attention computed as matrices, in this process and in a model config.

    Args:
        model_config: a `BaseModel.Config`; changed in place.
    """
    private.make_masks_with(create_block_mask)
    private.compute_flex_with(flex_attention)
    for _, config, parent, field in list(model_config.traverse(VarlenAttention.Config)):
        setattr(parent, field, derive(config, DenseVarlenAttention.Config))


def attend(
    q_BNLH: torch.Tensor, k_BNSH: torch.Tensor, v_BNSH: torch.Tensor, mask_BNLS: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention under a mask (true: is seen), with fewer heads of keys than of queries where there are.

    Returns:
        the output [B, N, L, H], and the logarithm of each row's sum of exponentials [B, N, L].
    """
    if k_BNSH.shape[1] != q_BNLH.shape[1]:
        repeats = q_BNLH.shape[1] // k_BNSH.shape[1]
        k_BNSH, v_BNSH = (part.repeat_interleave(repeats, dim=1) for part in (k_BNSH, v_BNSH))
    scale = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
    scores_BNLS = (q_BNLH @ k_BNSH.transpose(-1, -2)).float() * scale
    scores_BNLS = scores_BNLS.masked_fill(~mask_BNLS, float("-inf"))
    lse_BNL = scores_BNLS.logsumexp(-1)
    weights_BNLS = (scores_BNLS - lse_BNL.unsqueeze(-1)).exp().to(v_BNSH.dtype)
    return weights_BNLS @ v_BNSH, lse_BNL


def flex_attention(
    q_BNLH: torch.Tensor,
    k_BNSH: torch.Tensor,
    v_BNSH: torch.Tensor,
    *,
    score_mod: Callable | None,
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
    return_aux: AuxRequest,
    kernel_options: dict,
) -> tuple[torch.Tensor, AuxOutput]:
    """In place of `torch.nn.attention.flex_attention.flex_attention`, as torchtitan calls it."""
    if score_mod is not None:
        raise NotImplementedError("score_mod of FlexAttention is not computed on a CPU: it needs an accelerator")
    rows, heads = block_mask.kv_num_blocks.shape[:2]
    mask_BNLS = create_mask(
        block_mask.mask_mod, rows, heads, q_BNLH.shape[2], k_BNSH.shape[2], device=str(q_BNLH.device)
    )
    out_BNLH, lse_BNL = attend(q_BNLH, k_BNSH, v_BNSH, mask_BNLS, scale)
    return out_BNLH, AuxOutput(lse=lse_BNL if return_aux.lse else None)


class DenseVarlenAttention(VarlenAttention):
    """Varlen attention as matrices, in the dtype of its inputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As VarlenAttention's."""
        with spmd.no_typecheck():
            mask = _document_mask(attention_masks.cu_seq_q, q_BLNH.shape[:2], self.window_size)
            q_BNLH, k_BNLH, v_BNLH = (part.transpose(1, 2) for part in (q_BLNH, k_BLNH, v_BLNH))
            out_BNLH, lse_BNL = attend(q_BNLH, k_BNLH, v_BNLH, mask, scale)
        out_BLNH = out_BNLH.transpose(1, 2)
        return out_BLNH if out_transform is None else out_transform(out_BLNH, lse_BNL.transpose(1, 2))


def _document_mask(starts: torch.Tensor, shape: torch.Size, window: tuple[int, int]) -> torch.Tensor:
    """Bool [B, 1, L, L]: which key a query sees, of rows packed one behind the other.

    Args:
        starts: where documents begin in the packed rows, and where the last one ends; `cu_seq_q`.
        shape: B, L.
        window: of VarlenAttention.Config.
    """
    rows, length = shape
    token = torch.arange(rows * length, device=starts.device).view(rows, length)
    document = torch.bucketize(token, starts, right=True)
    distance = token[:, :, None] - token[:, None, :]
    back, ahead = window
    seen = document[:, :, None] == document[:, None, :]
    if back >= 0:
        seen &= distance <= back
    if ahead >= 0:
        seen &= distance >= -ahead
    return seen.unsqueeze(1)
