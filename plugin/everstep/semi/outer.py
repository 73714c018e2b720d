"""The outer step, which updates the global parameters at the end of a round.

DiLoCo (arXiv 2311.08105, algorithm 1): the outer gradient is the mean over the M workers of θ_t − θ_m, a worker's
parameters at the start of the round minus those at its end. The outer optimizer is SGD with Nesterov momentum.
Learning rate 1 without momentum gives the mean of the workers' parameters, which is local SGD (arXiv 1805.09767).
"""

from collections.abc import Iterable

import torch

from everstep.semi.section import SemiSync


def lr_and_momentum(settings: SemiSync) -> tuple[float, float]:
    """Return the outer step's learning rate and momentum. Local SGD takes the mean of the workers."""
    return (1.0, 0.0) if settings.method == "local_sgd" else (settings.outer_lr, settings.outer_momentum)


@torch.no_grad()
def outer_step(
    settings: SemiSync, params: Iterable[torch.Tensor], grads: Iterable[torch.Tensor], buffers: list[torch.Tensor]
) -> None:
    """Update `params` in place: one step of SGD with Nesterov momentum as `torch.optim.SGD` defines it, without
    dampening or weight decay.

    Args:
        params, grads: parameters and their outer gradients, pairwise of equal shape.
        buffers: momentum of each parameter, of the same shape, zero before the first step. Empty without momentum.
    """
    lr, momentum = lr_and_momentum(settings)
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        update = grad
        if momentum:
            buffer = buffers[index].mul_(momentum).add_(grad)
            update = grad.add(buffer, alpha=momentum)
        param.add_(update, alpha=-lr)
