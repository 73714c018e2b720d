"""The optimizer step of a torchtitan trainer: clip, step, learning rate."""

import torch
from torchtitan.distributed import utils as dist_utils
from torchtitan.trainer import Trainer

from everstep.attention.guard import Checks
from everstep.titan.state import slot_seed

OPTIMIZER_SLOT = -1
"""The slot that a step of the optimizer is seeded as."""


class OptimizerStep:
    """Steps with the gradients that the parameters have.

    Args:
        trainer: whose model, optimizers, schedule and checkpointer.
        seed, dp_rank: of `slot_seed`.
        checks: what looks at the model's arithmetic, if anything.
    """

    def __init__(self, trainer: Trainer, seed: int, dp_rank: int, checks: Checks | None) -> None:
        self._trainer, self._seed, self._dp_rank, self._checks = trainer, seed, dp_rank, checks

    def step(self, step: int, seeded_as: int = OPTIMIZER_SLOT) -> torch.Tensor:
        """Clip the gradients and step with them; their norm before. `seeded_as`: a slot's number, for `slot_seed`."""
        trainer = self._trainer
        torch.manual_seed(slot_seed(self._seed, step, seeded_as, self._dp_rank))
        grad_norm = self.clip(trainer.config.training.max_norm)
        trainer.checkpointer.maybe_wait_for_staging()
        trainer.optimizers.step()
        trainer.lr_schedulers.step()
        if self._checks is not None:
            self._checks.weights_changed()
        return grad_norm

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients' norm over the whole group; what it was."""
        trainer = self._trainer
        return dist_utils.clip_grad_norm_(
            [p for part in trainer.model_parts for p in part.parameters()],
            max_norm,
            foreach=True,
            pp_mesh=trainer.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=trainer.parallel_dims.ep_enabled,
        )
