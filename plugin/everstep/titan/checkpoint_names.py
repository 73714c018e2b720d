"""All that Everstep takes of torchtitan's checkpoints; methods that it stands in for are marked `foreign.overrides`.

Tried with torchtitan 0.3.0. Its main branch has renamed `components.checkpoint_utils`.
"""

from torchtitan.components.checkpoint_utils import init_optim_state
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, TRAIN_STATE

__all__ = [
    "DATALOADER",
    "TRAIN_STATE",
    "BaseCheckpointManager",
    "CheckpointManager",
    "init_optim_state",
]
