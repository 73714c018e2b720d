"""What tests of semi-synchronous runs share: a config, and what a run left behind."""

import torch
import torch.distributed.checkpoint as dcp

from watched import write_config

WORKERS, SYNC_STEPS, ROUNDS, SLOTS, WARMUP, LR, EPS = 4, 3, 5, 8, 4, 1e-3, 1e-5
"""EPS: with Adam's usual one, a gradient that is nothing but rounding moves a parameter by a whole learning rate."""


DEADLINE_S = 900.0
"""Of a run that takes half a minute on a quiet machine."""


def semi_config(path, **sections):
    """A config of five rounds of four workers."""
    table = {
        "job": {"module": "tiny_llama", "config": "tiny"},
        "training": {"steps": ROUNDS * SYNC_STEPS, "seq_len": 32, "local_batch_size": 1, "global_batch_size": SLOTS},
        "optimizer": {"lr": LR, "eps": EPS, "implementation": "foreach"},
        "lr_scheduler": {"warmup_steps": WARMUP, "total_steps": 10_000, "decay_ratio": 0.1},
        "semi_sync": {"method": "diloco", "workers": WORKERS, "sync_steps": SYNC_STEPS},
        "fault_tolerance": {
            "groups": 2,
            "stall_timeout_s": 300.0,
            "startup_timeout_s": 900.0,
            "reduce_timeout_s": 60.0,
            "quorum_timeout_s": 90.0,
        },
        "checkpoint": {"interval": 1000 * SYNC_STEPS},
    }
    names = table.keys() | sections.keys()
    return write_config(path, **{name: table.get(name, {}) | sections.get(name, {}) for name in names})


def final_parameters(run_dir, expected, step=ROUNDS * SYNC_STEPS):
    """The global parameters in the last checkpoint, as stock torchtitan would load them."""
    tensors = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(tensors, checkpoint_id=str(run_dir / "checkpoint" / f"step-{step}"), no_dist=True)
    return tensors


def soon(run, condition):
    """What `condition()` gives once it is true, on a machine however slow; while the run lasts."""
    return run.until(condition, "it", DEADLINE_S)


def losses_of(run):
    """The losses by inner step, as one group tells them."""
    told = {event["step"]: event["inner_losses"] for event in run.events("commit", rank=0)}
    return [loss for round_ in sorted(told) for loss in told[round_]]


def worst(run, expected, step=ROUNDS * SYNC_STEPS):
    found = final_parameters(run.run_dir, expected.parameters, step)
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.parameters.items())


def worst_loss(run, expected):
    return float((torch.tensor(losses_of(run)) - torch.tensor(expected.losses)).abs().max())
