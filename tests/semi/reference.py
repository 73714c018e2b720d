"""Local SGD and DiLoCo in one process, written from the papers, to hold runs against. None of Everstep's arithmetic.

DiLoCo: arXiv 2311.08105, algorithm 1; local SGD: arXiv 1805.09767. A worker's inner optimizer is torch's AdamW, kept
from round to round; gradients are clipped as in torch.nn.utils. Model: the config's, as torchtitan builds it. Data: the
rows that Everstep's source gives for (step, slot), which is not what is tested here.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from everstep.titan.cpu import use_plain_attention


@dataclass
class Simulation:
    parameters: dict[str, torch.Tensor]
    """θ after the last round, by the names of checkpoints."""
    losses: list[list[float]]
    """By round, by inner step: mean over the workers, who all have equally many tokens."""


def simulate(config, data, *, method, workers, sync_steps, rounds, slots, warmup, lr, eps, outer=(0.7, 0.9, True)):
    use_plain_attention(config.model_spec.model)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(config.debug.seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    theta = [p.detach().clone() for p in model.parameters()]
    velocity = [torch.zeros_like(p) for p in theta]
    inner = [None] * workers
    losses = []
    for round_ in range(rounds):
        ends, round_losses = [], [0.0] * sync_steps
        for worker in range(workers):
            with torch.no_grad():
                for p, start in zip(model.parameters(), theta, strict=True):
                    p.copy_(start)
            adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.1)
            if inner[worker] is not None:
                adam.load_state_dict(inner[worker])
            for h in range(sync_steps):
                step = round_ * sync_steps + h + 1
                for group in adam.param_groups:
                    group["lr"] = lr * min(1.0, step / warmup)
                adam.zero_grad()
                each = slots // workers
                for slot in range(worker * each, (worker + 1) * each):
                    inputs, labels = data.microbatch(step, slot)
                    logits = model(inputs["input"], positions=inputs["positions"])
                    loss = cross_entropy(logits.flatten(0, 1).float(), labels.flatten()) / each
                    loss.backward()
                    round_losses[h] += loss.item() / workers
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                adam.step()
            inner[worker] = adam.state_dict()
            ends.append([p.detach().clone() for p in model.parameters()])
        losses.append(round_losses)
        if method == "local_sgd":
            theta = [torch.stack(parts).mean(0) for parts in zip(*ends, strict=True)]
            continue
        rate, momentum, nesterov = outer
        for index, parts in enumerate(zip(*ends, strict=True)):
            delta = torch.stack([theta[index] - part for part in parts]).mean(0)
            velocity[index] = momentum * velocity[index] + delta
            change = delta + momentum * velocity[index] if nesterov else velocity[index]
            theta[index] = theta[index] - rate * change
    with torch.no_grad():
        for p, end in zip(model.parameters(), theta, strict=True):
            p.copy_(end)
    return Simulation({name: tensor.clone() for name, tensor in model.state_dict().items()}, losses)
