"""The private name of torch that this room relies on: one that is gone raises where it is used."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, as it lies in memory: `to_local` makes a view for autograd or a parameter, which
    takes ten times as long. Any other tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
