"""Lets torchtitan train on a machine without an accelerator.

torchtitan trains on the accelerator that PyTorch reports, and assumes a GPU if there is none. `stand_in` sets the
device to "cpu" instead and adds the few `torch.cpu` functions that torchtitan calls on a device module. It must run
before anything of torchtitan is imported; `everstep.train` ensures that.
"""

import ctypes
import types
from typing import Any

import psutil
import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule

from everstep.titan import private

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of mallopt(3), as malloc.h numbers them."""


def has_accelerator() -> bool:
    """Return whether PyTorch sees an accelerator to train on, without initialising it."""
    return torch.accelerator.is_available()


def has_attention_kernels() -> bool:
    """Return whether there is an accelerator on which PyTorch's FlexAttention and varlen attention kernels run."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type in ("cuda", "xpu")


def stand_in() -> None:
    """Make `torch.cpu` usable as torchtitan's device module, and replace `all_to_all` by one for Gloo. Idempotent."""
    private.train_on("cpu")
    total = psutil.virtual_memory().total
    answers = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=total),
        "reset_peak_memory_stats": lambda *args: None,
        "empty_cache": lambda *args: None,
        "memory_stats": lambda *args: {},
        # torchtitan passes the current device to barrier(device_ids=[...])
        "current_device": lambda *args: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    torch.distributed.all_to_all = all_to_all


def keep_freed_memory() -> None:
    """Make glibc keep freed memory of tensors (mallopt(3)). By default glibc returns it to the kernel, which then must
    provide each page again for the gradients and activations of the next slot. No effect with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc accepts
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
        mallopt(M_TOP_PAD, 64 << 20)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch.distributed.all_to_all` for Gloo, with parts of different sizes. Gloo's own needs equal sizes, but the
    router sends each expert a different number of tokens.

    Args:
        output_tensor_list, input_tensor_list: one tensor for each rank, of equal shape except the first dimension.
        group: as in torch.distributed.
        async_op: must be False; the exchange is complete on return.
    """
    assert not async_op
    received = torch.empty_like(torch.cat(output_tensor_list))
    sizes = [len(part) for part in output_tensor_list]
    sent = [len(part) for part in input_tensor_list]
    torch.distributed.all_to_all_single(received, torch.cat(input_tensor_list), sizes, sent, group=group)
    for part, piece in zip(output_tensor_list, received.split(sizes), strict=True):
        part.copy_(piece)


def sum_only_collectives(model_parts: list[torch.nn.Module]) -> None:
    """Make FSDP scale gradients itself, because Gloo has no pre-multiplied sum.

    Args:
        model_parts: the modules that torchtitan parallelized, with or without FSDP.
    """
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
