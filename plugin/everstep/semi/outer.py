"""The outer step: how the global parameters change by what all workers have made of them.

DiLoCo (arXiv 2311.08105, algorithm 1): the outer gradient is the mean over the M workers of θ_t − θ_m, what a worker
started a round with less what it ended with; the outer optimizer is SGD with Nesterov momentum. The same with learning
rate 1 and without momentum is the mean of the workers' parameters: local SGD (arXiv 1805.09767).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from everstep.semi.section import SemiSync


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """SGD with Nesterov momentum as `torch.optim.SGD` defines it, without dampening and weight decay."""

    lr: float
    momentum: float

    @staticmethod
    def of(settings: SemiSync) -> "OuterSGD":
        if settings.method == "local_sgd":
            return OuterSGD(1.0, 0.0)
        return OuterSGD(settings.outer_lr, settings.outer_momentum)

    @torch.no_grad()
    def step(self, params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        """Change `params` by their outer gradients, in place.

        Args:
            params, grads: of equal shapes, pair by pair.
            buffers: the momentum, of the same shapes and zero before the first step; empty without momentum.
        """
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            update = grad
            if self.momentum:
                buffer = buffers[index].mul_(self.momentum).add_(grad)
                update = grad.add(buffer, alpha=self.momentum)
            param.add_(update, alpha=-self.lr)
