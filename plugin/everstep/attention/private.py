"""Private names of torch that this room relies on, each with what it is for.

The tests of this room fail if a release takes one away.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

foreach_norm = torch._foreach_norm
"""Euclidean norms of some tensors, in one call."""


def recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


def unseen_by_checkpointing() -> AbstractContextManager:
    """What is computed in here is not counted by selective activation checkpointing.

    It replays the n-th product of the first forward as the n-th of the second. A repair adds products to one
    of the two only, and every later product would be given another's result.
    """
    # Entered for each check: without a mode to disable it is for nothing, and takes as long as a small sum.
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
