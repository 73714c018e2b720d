"""The private names of other packages that Everstep relies on are there, with the signature it relies on."""

import inspect
import re
from pathlib import Path

import torch._utils
from datasets import Dataset
from datasets.iterable_dataset import BufferShuffledExamplesIterable, _BaseExamplesIterable
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torchtitan.components import metrics
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import activation_checkpoint
from torchtitan.hf_datasets.interleaved import InterleavedDataset
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset
from torchtitan.models.common import attention, moe
from torchtitan.trainer import Trainer

import everstep
from everstep.titan import private


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_torch_and_torchtitan_have_what_is_relied_on():
    assert parameters(torch._utils._get_available_device_type) == []
    assert parameters(compute_local_shape_and_global_offset)[:3] == ["global_shape", "mesh", "placements"]
    assert parameters(CheckpointManager._find_load_step) == ["self", "folder"]
    assert parameters(activation_checkpoint._get_default_save_ops) == []
    assert callable(Trainer._forward_backward_body)
    assert callable(attention._compiled_create_block_mask)
    assert hasattr(context_parallel, "_compiled_create_block_mask")
    assert parameters(metrics._get_metrics_rank) == ["parallel_dims", "pp_schedule"]
    assert {"llama3", "qwen3", "deepseek_v3"} <= set(private.models())
    assert private.EXPERT_LOADS in inspect.getsource(moe)
    assert "_local_tensor" in DTensor.__slots__


def test_what_is_read_of_datasets_is_there():
    assert issubclass(BufferShuffledExamplesIterable, _BaseExamplesIterable)
    data = Dataset.from_list([{"text": ""}]).to_iterable_dataset().shuffle(seed=1)
    assert isinstance(data._ex_iterable, BufferShuffledExamplesIterable)
    assert data._epoch == data.epoch == 0
    assert data._starting_state_dict is None
    assert callable(HuggingFaceTextDataset._get_data_iter)
    text = HuggingFaceTextDataset.__new__(HuggingFaceTextDataset)
    mixture = InterleavedDataset([text], [1.0], stopping_strategy="all_exhausted")
    assert (mixture._datasets, mixture._stopping_strategy) == ([text], "all_exhausted")


def test_torchtitans_data_and_checkpoints_are_named_in_one_file():
    """A release that renames them is met there."""
    package = Path(everstep.__file__).parent
    named = re.compile(r"torchtitan\.(components\.(dataloader|tokenizer|checkpoint)|hf_datasets)")
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if named.search(path.read_text())}
    assert found == {"titan/names.py"}
