"""Shared by the tests of semi-synchronous runs: configs, and comparisons of a run's results with the reference."""

import torch
import torch.distributed.checkpoint as dcp

from watched import PATIENT, write_config

WORKERS, SYNC_STEPS, SLOTS, WARMUP, LR, EPS = 4, 3, 8, 4, 1e-3, 1e-5
"""EPS: with Adam's default eps, a gradient that is only rounding error changes a parameter by a whole learning rate."""


def semi_config(path, **sections):
    """Write a config of four workers."""
    table = {
        "job": {"module": "tiny_llama", "config": "tiny"},
        "training": {"seq_len": 32, "local_batch_size": 1, "global_batch_size": SLOTS},
        "optimizer": {"lr": LR, "eps": EPS, "implementation": "foreach"},
        "lr_scheduler": {"warmup_steps": WARMUP, "total_steps": 10_000, "decay_ratio": 0.1},
        "semi_sync": {"method": "diloco", "workers": WORKERS, "sync_steps": SYNC_STEPS},
        "fault_tolerance": {"groups": 2} | PATIENT,
        "checkpoint": {"interval": 1000 * SYNC_STEPS},
    }
    names = table.keys() | sections.keys()
    return write_config(path, **{name: table.get(name, {}) | sections.get(name, {}) for name in names})


def quick_config(path, rounds, model="tiny", *, workers=WORKERS, **sections):
    """Write a config of workers with one slot each, with short timeouts, so that groups soon notice a dead one."""
    return semi_config(
        path, job={"config": model}, training={"steps": rounds * SYNC_STEPS, "global_batch_size": workers},
        semi_sync={"workers": workers}, fault_tolerance={"reduce_timeout_s": 8.0, "quorum_timeout_s": 15.0},
        **sections,
    )  # fmt: skip


def worst(run, expected, step):
    """Return the largest difference between the last checkpoint's global parameters and the reference's."""
    found = {name: torch.empty_like(tensor) for name, tensor in expected.parameters.items()}
    dcp.load(found, checkpoint_id=str(run.run_dir / "checkpoint" / f"step-{step}"), no_dist=True)
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.parameters.items())


def worst_loss(run, expected):
    """Return the largest difference between the workers' mean losses by inner step and those of the reference."""
    told = {(event["step"], event["worker"]): event["losses"] for event in run.events("worker_round", rank=0)}
    rounds = sorted({event["step"] for event in run.events("commit")})
    losses = [torch.tensor([told[round_, worker] for worker in range(WORKERS)]).mean(0) for round_ in rounds]
    return float((torch.cat(losses) - torch.tensor(expected.losses)).abs().max())
