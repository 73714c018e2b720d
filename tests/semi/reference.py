"""Local SGD, DiLoCo and Streaming DiLoCo in one process, written from the papers, to compare runs with. It uses none of
Everstep's arithmetic.

Local SGD: arXiv 1805.09767. DiLoCo: arXiv 2311.08105, algorithm 1. Streaming DiLoCo: arXiv 2501.18512, algorithm 2,
with offsets t_p such that fragment p is sent τ steps before the end of its turn and taken over at the end. A worker's
inner optimizer is torch's AdamW, which keeps its state throughout. Gradients are clipped as in torch.nn.utils. Experts'
biases change with each worker's own loads (arXiv 2408.15664, in torchtitan's variant) and are averaged in every round.
Model: the config's, as torchtitan builds it. Data: the rows of Everstep's source for (step, slot), tested elsewhere.
"""

import copy
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from everstep.titan import cpu_attention


@dataclass
class Simulation:
    parameters: dict[str, torch.Tensor]
    """Name in a checkpoint -> θ after the last step."""
    losses: list[float]
    """Mean loss over the workers of each inner step. All workers have equally many tokens."""


def build(config):
    cpu_attention.prepare(config)
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = config.model_spec.model.build()
    model.to_empty(device="cpu")
    torch.manual_seed(config.debug.seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def fragment(name, fragments):
    """Return a parameter's fragment: layers strided (the paper's figure 3), embedding first, norm and head last."""
    parts = name.split(".")
    if "layers" in parts:
        return int(parts[parts.index("layers") + 1]) % fragments
    return 0 if parts[0] == "tok_embeddings" else fragments - 1


def balances(model):
    return [module for module in model.modules() if getattr(module, "expert_bias_E", None) is not None]


def simulate(config, data, outer=(0.7, 0.9, True)):
    """Return the result of a run of this config. `outer`: learning rate, momentum, whether it is Nesterov momentum."""
    semi, training, adam = config.semi_sync, config.training, config.optimizer.param_groups[0].optimizer_kwargs
    workers, fragments, slots = semi.workers, semi.fragments, training.global_batch_size  # a slot has one row
    warmup, lr = config.lr_scheduler.warmup_steps, adam["lr"]
    model = build(config)
    parts = {name: fragment(name, fragments) for name, _ in model.named_parameters()}
    theta = {name: p.detach().clone() for name, p in model.named_parameters()}
    velocity = {name: torch.zeros_like(p) for name, p in theta.items()}
    models = [copy.deepcopy(model) for _ in range(workers)]

    more = {"betas": (0.9, 0.95), "eps": adam["eps"], "weight_decay": 0.1}
    adams = [torch.optim.AdamW(m.parameters(), lr=lr, **more) for m in models]
    turn, each, losses, delta = semi.sync_steps // fragments, slots // workers, [], {}
    for step in range(1, training.steps + 1):
        losses.append(0.0)
        for worker, (local, adam) in enumerate(zip(models, adams, strict=True)):
            for group in adam.param_groups:
                group["lr"] = lr * min(1.0, step / warmup)
            adam.zero_grad()
            for slot in range(worker * each, (worker + 1) * each):
                inputs, labels = data.microbatch(step, slot)
                positions = inputs["positions"]
                masks = local.get_attention_masks(positions=positions)
                logits = local(inputs["input"], positions=positions, attention_masks=masks)
                loss = cross_entropy(logits.flatten(0, 1), labels.flatten()) / each
                loss.backward()
                losses[-1] += loss.item() / workers
            torch.nn.utils.clip_grad_norm_(local.parameters(), 1.0)
            adam.step()
            for moe in balances(local):
                load = moe.tokens_per_expert_E
                moved = moe.load_balance_coeff * torch.sign(load.mean() - load)
                moe.expert_bias_E += moved - moved.mean()
                load.zero_()
        now = [dict(local.named_parameters()) for local in models]
        part = ((step + semi.overlap_steps) // turn - 1) % fragments
        mine = [name for name in theta if parts[name] == part]
        with torch.no_grad():
            if (step + semi.overlap_steps) % turn == 0:
                delta = {name: torch.stack([theta[name] - w[name] for w in now]).mean(0) for name in mine}
            if step % turn:
                continue
            for same in zip(*map(balances, models), strict=True):
                mean = torch.stack([moe.expert_bias_E for moe in same]).double().mean(0)
                for moe in same:
                    moe.expert_bias_E.copy_(mean)
            for name in delta:
                if semi.method == "local_sgd":
                    theta[name] = torch.stack([w[name] for w in now]).mean(0)
                else:
                    rate, momentum, nesterov = outer
                    velocity[name] = momentum * velocity[name] + delta[name]
                    change = delta[name] + momentum * velocity[name] if nesterov else velocity[name]
                    theta[name] = theta[name] - rate * change
                for w in now:
                    w[name].copy_(semi.mixing * w[name].double() + (1 - semi.mixing) * theta[name].double())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(theta[name])
        for moe, mine in zip(balances(model), balances(models[0]), strict=True):
            moe.expert_bias_E.copy_(mine.expert_bias_E)
    return Simulation({name: tensor.clone() for name, tensor in model.state_dict().items()}, losses)
