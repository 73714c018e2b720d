"""Private names of torch that this room relies on, each with its purpose.

The tests of this room fail if a release of torch removes one.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

foreach_norm = torch._foreach_norm
"""Computes the Euclidean norms of several tensors in one call."""


def recomputing() -> bool:
    """Return whether this forward runs inside a backward, since activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


def unseen_by_checkpointing() -> AbstractContextManager:
    """Return a context in which selective activation checkpointing does not count what is computed.

    Checkpointing replays the n-th product of the first forward as the n-th of the second. A repair adds products to
    only one of the two, so every later product would get the result of another.
    """
    # Every check enters this. Without an active mode there is nothing to disable, and trying takes as long as a sum.
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
