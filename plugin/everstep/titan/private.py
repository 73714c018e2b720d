"""Private and undocumented names of torch and torchtitan that this room relies on, and what each is for.

A name that a release has removed raises an error where it is used, instead of a patch that silently does nothing.
tests/test_foreign.py covers the names whose loss would be silent. torchtitan is imported inside the functions, because
it chooses its device while it is imported, and `train_on` has to run before that.
"""

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import torch._utils
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from everstep.foreign import replace

EXPERT_LOADS = "tokens_per_expert_E"
"""Name of the buffer in which torchtitan's experts count their tokens for load balancing (`models/common/moe`)."""

local_box = compute_local_shape_and_global_offset
"""Function of a DTensor's (shape, mesh, placements) that returns the shape and offset of this rank's part."""


def train_on(device: str) -> None:
    """Make torchtitan use devices of this type, such as "cpu". To be called before torchtitan is imported."""
    replace(torch._utils, "_get_available_device_type", lambda: device)


def metrics_rank(parallel_dims: Any, pp_schedule: str) -> int:
    """Return the rank on which torchtitan logs; with a pipeline, one of the last stage."""
    from torchtitan.components.metrics import _get_metrics_rank

    return _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)


def make_masks_with(make: Callable[..., Any], make_parts: Callable[..., Any]) -> None:
    """Replace the functions that make FlexAttention's masks, which are compiled: torchtitan's by `make`, and that of
    PyTorch's context parallelism, which makes each rank's part of a mask, by `make_parts`."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
    from torchtitan.models.common import attention

    replace(attention, "_compiled_create_block_mask", make)
    replace(context_parallel, "_compiled_create_block_mask", make_parts)


def keep_in_checkpointing(operator: Any) -> None:
    """Have selective activation checkpointing save the results of `operator`, as it does for matrix products. A second
    call for an operator does nothing."""
    from torchtitan.distributed import activation_checkpoint

    default = activation_checkpoint._get_default_save_ops
    if operator not in default():
        replace(activation_checkpoint, "_get_default_save_ops", lambda: {*default(), operator})


def models() -> Collection[str]:
    """Return the names of torchtitan's models."""
    from torchtitan.models import _supported_models

    return _supported_models


def stages(config: Any) -> list[list[str]]:
    """Return the names of the modules of each pipeline stage of a trainer config; [] without any, or if a model splits
    itself. Raises ValueError if torchtitan has no such schedule, or the layers or the ranks do not fit the
    stages."""
    from torchtitan.distributed import pipeline_parallel

    parallelism, model, split = config.parallelism, config.model_spec.model, config.model_spec.pipelining_fn
    known = (pipeline_parallel.pipeline_llm, pipeline_parallel.pipeline_vlm)
    if parallelism.pipeline_parallel_degree == 1 or split not in known:
        return []
    dims: Any = SimpleNamespace(pp=parallelism.pipeline_parallel_degree)
    sizes = pipeline_parallel._get_pipeline_metadata(dims, parallelism, model)
    found = parallelism.module_fqns_per_model_part or pipeline_parallel._generate_llm_fqn_per_model_part(*sizes)
    schedule = parallelism.pipeline_parallel_schedule
    try:
        pipeline_parallel._get_pp_rank_to_stage_indices_mapping(0, dims.pp, schedule, len(found))
    except AssertionError as error:
        raise ValueError(str(error)) from None
    return found


def computes_eagerly(trainer: Any) -> bool:
    """Return whether a torchtitan trainer runs forward and backward directly, without replaying a recorded graph."""
    return trainer.fwd_bwd_fn == trainer._forward_backward_body


def newest_checkpoint(manager: Any) -> int:
    """Return the step of the newest checkpoint that the manager would load; -1 if there is none."""
    return manager._find_load_step()


def saves_after(manager: Any, step: int) -> bool:
    """Return whether the manager writes a checkpoint after `step` by its interval, or as the first step's. What it
    writes at the end of training does not count."""
    return manager._should_save(step)
