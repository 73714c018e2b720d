"""The private name of torch that this room uses. If a release removes it, its use raises."""

import torch
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor as it lies in memory, any other tensor as it is. `to_local` takes ten times
    as long, as it makes a view for autograd or a parameter."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
