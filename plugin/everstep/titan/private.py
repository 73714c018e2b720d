"""Private and undocumented names of torch and torchtitan that this room relies on, each with what it is for.

A name that is gone raises where it is used, instead of a patch that silently does nothing; of those whose loss would be
silent tests/test_foreign.py tells. torchtitan is imported by whoever calls: it asks for its device while it is
imported, and `train_on` comes before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch._utils
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from everstep.foreign import replace

EXPERT_LOADS = "tokens_per_expert_E"
"""Buffer in which torchtitan's experts count their tokens (`models/common/moe`); what its balancing reads."""

local_box = compute_local_shape_and_global_offset
"""(shape, mesh, placements) → shape and offset of this rank's part of a DTensor."""


def train_on(device: str) -> None:
    """The kind of device that torchtitan finds when it is imported from now on."""
    replace(torch._utils, "_get_available_device_type", lambda: device)


def metrics_rank(parallel_dims: Any, pp_schedule: str) -> int:
    """The rank that torchtitan logs on: with a pipeline one of the last stage's."""
    from torchtitan.components.metrics import _get_metrics_rank

    return _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)


def make_masks_with(make: Callable[..., Any], make_parts: Callable[..., Any]) -> None:
    """What torchtitan makes FlexAttention's masks with, and what PyTorch's context parallelism makes the parts of them
    with that its ranks have; their own are compiled."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
    from torchtitan.models.common import attention

    replace(attention, "_compiled_create_block_mask", make)
    replace(context_parallel, "_compiled_create_block_mask", make_parts)


def keep_in_checkpointing(operator: Any) -> None:
    """Have selective activation checkpointing keep what an operator computes, as it keeps a matrix product's."""
    from torchtitan.distributed import activation_checkpoint

    default = activation_checkpoint._get_default_save_ops
    if operator not in default():
        replace(activation_checkpoint, "_get_default_save_ops", lambda: {*default(), operator})


def models() -> Mapping[str, Any] | frozenset[str]:
    """The names of torchtitan's models."""
    from torchtitan.models import _supported_models

    return _supported_models


def computes_eagerly(trainer: Any) -> bool:
    """Whether a torchtitan trainer runs forward and backward as they are, and replays no recorded graph."""
    return trainer.fwd_bwd_fn == trainer._forward_backward_body


def newest_checkpoint(manager: Any) -> int:
    """The step of the newest checkpoint that the manager would load; -1 for none."""
    return manager._find_load_step()


def saves_after(manager: Any, step: int) -> bool:
    """Whether the manager writes a checkpoint after a step that is not the last."""
    return manager._should_save(step)
