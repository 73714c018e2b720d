"""The private names of other packages that Everstep relies on are there, with the signature it relies on."""

import inspect

import pytest
import torch._utils
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.models.common import attention

from everstep.titan import cpu, private


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_torch_and_torchtitan_have_what_is_relied_on():
    assert parameters(torch._utils._get_available_device_type) == []
    assert parameters(compute_local_shape_and_global_offset)[:3] == ["global_shape", "mesh", "placements"]
    assert parameters(CheckpointManager._find_load_step) == ["self", "folder"]
    assert parameters(CheckpointManager._should_save) == ["self", "curr_step", "last_step"]
    assert callable(attention._compiled_create_block_mask)
    assert hasattr(context_parallel, "_compiled_create_block_mask")
    assert parameters(private.metrics_rank) == ["parallel_dims", "pp_schedule"]
    assert callable(attention.FlexAttention._compiled_flex_attn)
    assert {"llama3", "qwen3", "deepseek_v3"} <= set(private.models())


def test_experts_count_their_tokens_under_the_name_that_is_looked_for():
    from torchtitan.models.common import moe

    assert private.EXPERT_LOADS in inspect.getsource(moe)


def test_a_patch_of_what_is_gone_raises(monkeypatch):
    monkeypatch.delattr(torch._utils, "_get_available_device_type")
    with pytest.raises(AttributeError, match="_get_available_device_type any more"):
        cpu.stand_in()
