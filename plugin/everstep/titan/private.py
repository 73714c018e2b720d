"""Private and undocumented names of torch and torchtitan that this room relies on, each with what it is for.

A name that is gone raises where it is used, instead of a patch that silently does nothing; tests/titan/test_private.py
says which, before a run does.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import _get_metrics_rank
from torchtitan.models import _supported_models
from torchtitan.models.common import attention

from everstep.titan.cpu import replace

EXPERT_LOADS = "tokens_per_expert_E"
"""Buffer in which torchtitan's experts count their tokens (`models/common/moe`); what its balancing reads."""

local_box = compute_local_shape_and_global_offset
"""(shape, mesh, placements) → shape and offset of this rank's part of a DTensor."""


metrics_rank = _get_metrics_rank
"""(parallel_dims, pp_schedule) → the rank that torchtitan logs on: with a pipeline one of the last stage's."""


def make_masks_with(create_block_mask: Callable[..., Any]) -> None:
    """What torchtitan, and PyTorch's context parallelism, make FlexAttention's masks with; their own are compiled."""
    replace(attention, "_compiled_create_block_mask", create_block_mask)
    replace(context_parallel, "_compiled_create_block_mask", create_block_mask)


def compute_flex_with(flex_attention: Callable[..., Any]) -> None:
    """What torchtitan computes FlexAttention with; its own is compiled, and has no backward on a CPU."""
    replace(attention.FlexAttention, "_compiled_flex_attn", staticmethod(flex_attention))


def models() -> Mapping[str, Any] | frozenset[str]:
    """The names of torchtitan's models."""
    return _supported_models


def newest_checkpoint(manager: CheckpointManager) -> int:
    """The step of the newest checkpoint that the manager would load; -1 for none."""
    return manager._find_load_step()


def is_due(manager: CheckpointManager, step: int) -> bool:
    """Whether torchtitan's own manager would write a checkpoint of this step."""
    return CheckpointManager._should_save(manager, step)
