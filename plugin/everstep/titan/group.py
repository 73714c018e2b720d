"""Collectives of the ranks of one group, on the backend that the trainer has."""

from typing import Any

import torch
import torch.distributed as dist

from everstep.run import typed


def group_device() -> torch.device:
    """Where the group's collectives want their tensors."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if dist.get_backend() == "gloo" or accelerator is None else accelerator


def all_in_group(flag: bool) -> bool:
    """Whether `flag` holds on all ranks of the group; a collective of the group."""
    return bool(least_in_group(flag)[0])


def least_in_group(*values: int) -> list[int]:
    """The least of each value of all ranks of the group, of int64; a collective of the group."""
    if dist.get_world_size() == 1:
        return list(values)
    least = torch.tensor(values, dtype=torch.int64, device=group_device())
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.tolist()


def sum_in_group(value: int) -> int:
    """Sum of an integer over the group's ranks, modulo 2^62; a collective of the group."""
    if dist.get_world_size() > 1:
        total = torch.tensor([value], dtype=torch.int64, device=group_device())
        dist.all_reduce(total)
        value = int(total)
    return value & (1 << 62) - 1


def gather_json(value: Any) -> list[Any]:
    """Every rank's value, by rank; a collective of the group. Not `all_gather_object`, which unpickles what comes."""
    mine = torch.frombuffer(bytearray(typed.dumps(value)), dtype=torch.uint8).to(group_device())
    length = torch.tensor([len(mine)], device=mine.device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    padded = mine.new_zeros(max(map(int, lengths)))
    padded[: len(mine)] = mine
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded)
    return [
        typed.loads(said[: int(n)].cpu().numpy().tobytes(), 1 << 31) for said, n in zip(everyone, lengths, strict=True)
    ]
