"""Lets torchtitan train where there is no accelerator.

torchtitan takes its device from the accelerator that PyTorch reports, and assumes a GPU when there is none.
The stand-in answers "cpu" instead and adds the handful of `torch.cpu` functions that torchtitan calls on a device
module. It has to run before anything of torchtitan is imported; `everstep.train` sees to that.
"""

import ctypes
import types
from typing import Any

import psutil
import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule

from everstep.quorum.streams import WITH_ATTENTION_KERNELS
from everstep.titan import private

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""Of malloc.h."""


def has_accelerator() -> bool:
    """Whether PyTorch sees a device of its own to train on. Initialises none."""
    return torch.accelerator.is_available()


def has_attention_kernels() -> bool:
    """Whether PyTorch's kernels of FlexAttention and varlen attention run on the device to train on."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type in WITH_ATTENTION_KERNELS


def stand_in() -> None:
    """Make `torch.cpu` answer as a torchtitan device module, and Gloo take what torchtitan sends. Idempotent."""
    private.train_on("cpu")
    total = psutil.virtual_memory().total
    answers = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=total),
        "reset_peak_memory_stats": lambda *args: None,
        "empty_cache": lambda *args: None,
        "memory_stats": lambda *args: {},
        "set_device": lambda *args: None,
        # torchtitan passes the current device to barrier(device_ids=[...])
        "current_device": lambda *args: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    torch.distributed.all_to_all = all_to_all


def keep_freed_memory() -> None:
    """Have glibc keep what tensors give back (mallopt(3)): by itself it returns it to the kernel, which makes each page
    anew for the gradients and activations of the next slot. Another C library goes on as it does."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
        mallopt(M_TOP_PAD, 64 << 20)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> None:
    """`torch.distributed.all_to_all` over Gloo, whose own wants all parts to be of one size. Experts get as many tokens
    as their router gives them.

    Args:
        output_tensor_list, input_tensor_list: by rank, alike but for their first dimension.
        group, async_op: as there; it has to be done when this returns.
    """
    assert not async_op
    received = torch.empty_like(torch.cat(output_tensor_list))
    sizes = [len(part) for part in output_tensor_list]
    sent = [len(part) for part in input_tensor_list]
    torch.distributed.all_to_all_single(received, torch.cat(input_tensor_list), sizes, sent, group=group)
    for part, piece in zip(output_tensor_list, received.split(sizes), strict=True):
        part.copy_(piece)


def sum_only_collectives(model_parts: list[torch.nn.Module]) -> None:
    """Have FSDP scale gradients itself: Gloo knows no pre-multiplied sum.

    Args:
        model_parts: the modules torchtitan parallelized, FSDP applied or not.
    """
    for part in model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
