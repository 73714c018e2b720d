"""The outer step: how the global parameters change by what all workers have made of them.

DiLoCo (arXiv 2311.08105, algorithm 1): the outer gradient is the mean over the M workers of θ_t − θ_m, what a worker
started a round with less what it ended with; the outer optimizer is SGD with Nesterov momentum. The same with learning
rate 1 and without momentum is the mean of the workers' parameters: local SGD (arXiv 1805.09767).
"""

from collections.abc import Iterable

import torch

from everstep.semi.section import SemiSync


def lr_and_momentum(settings: SemiSync) -> tuple[float, float]:
    return (1.0, 0.0) if settings.method == "local_sgd" else (settings.outer_lr, settings.outer_momentum)


@torch.no_grad()
def outer_step(
    settings: SemiSync, params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor], buffers: list[torch.Tensor]
) -> None:
    """Change `params` by their outer gradients, in place: SGD with Nesterov momentum as `torch.optim.SGD` defines it,
    without dampening and weight decay.

    Args:
        params, grads: of equal shapes, pair by pair.
        buffers: the momentum, of the same shapes and zero before the first step; empty without momentum.
    """
    lr, momentum = lr_and_momentum(settings)
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        update = grad
        if momentum:
            buffer = buffers[index].mul_(momentum).add_(grad)
            update = grad.add(buffer, alpha=momentum)
        param.add_(update, alpha=-lr)
