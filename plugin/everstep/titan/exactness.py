"""What `[fault_tolerance] exact` requires besides exact sums: a slot must have the same bits on every group.

So kernels are deterministic, checks repair nothing in place, and all groups compute in the same way. The last is
verified: the first start of a run writes its fingerprint to RUN_DIR/state/exact.json, and a start with another
fingerprint ends before it computes anything. A fingerprint includes the result of a small computation, to the bit.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from everstep.run.directory import exact_file
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, TrainerEnds
from everstep.titan.run_files import differences

SETTINGS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables on which the order of additions inside a group depends."""


def prepare(config: Any) -> None:
    """Change a trainer's config, in place, so that computing a slot again gives the same bits. An operator that is not
    deterministic then raises an error (see `naming_operators`)."""
    config.debug.deterministic, config.debug.deterministic_warn_only = True, False
    config.attention_check.mode = "detect"


@contextlib.contextmanager
def naming_operators() -> Iterator[None]:
    """Turn the error for an operator without a deterministic implementation into TrainerEnds: a retry cannot help."""
    try:
        yield
    except RuntimeError as error:
        found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
        if found is None:
            raise
        raise TrainerEnds(
            HOPELESS_EXIT,
            f"{found[1]} has no deterministic implementation in PyTorch {torch.__version__}, and [fault_tolerance] "
            "exact = true needs one: replace this operator in the model, or train with exact = false",
        ) from error


def fingerprint(config: Any, device: torch.device) -> dict[str, str]:
    """Return name -> value of what this rank's bits depend on, besides model, data and seed."""
    module = torch.get_device_module(device)
    found = {
        "torch": torch.__version__,
        "device": module.get_device_name(),
        "instructions": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else "",
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "ranks": str(dist.get_world_size()),
        "parallelism": _parallelism(config),
        "precision": f"{config.training.dtype} {config.training.mixed_precision_param}",
        "compile": str(config.compile.enable and config.compile.components),
        "environment": " ".join(f"{key}={os.environ[key]}" for key in SETTINGS if key in os.environ),
        "computation": _probe(device),
    }
    return {name: value for name, value in found.items() if value}


def _parallelism(config: Any) -> str:
    degrees = {key: value for key, value in asdict(config.parallelism).items() if key.endswith(("degree", "schedule"))}
    return " ".join(f"{key}={value}" for key, value in degrees.items())


def layout(config: Any) -> str:
    """Return what a checksum of parameters depends on besides their values. To compare two, it must be equal."""
    return f"{dist.get_world_size()} {config.training.dtype} {_parallelism(config)}"


def require_same(run_dir: Path, mine: dict[str, str]) -> None:
    """Raise TrainerEnds if the run's first start had another fingerprint."""
    if told := differences(exact_file(run_dir), mine):
        raise TrainerEnds(
            UNFIT_EXIT,
            f"[fault_tolerance] exact: this group would compute other bits than the run's first start, which wrote "
            f"{exact_file(run_dir)}: {told}. Give it the same hardware and software, or train with exact = false",
        )


def _probe(device: torch.device) -> str:
    """Return a digest of the bits that products, a softmax, a norm and their gradients have on this device."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        torch.manual_seed(0)
        x, w = (torch.randn(64, 192).to(device).requires_grad_() for _ in range(2))
        scores = F.softmax(F.layer_norm(x, (192,)) @ w.T, dim=-1)
        (F.silu(scores) @ w).square().mean().backward()
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (scores, x.grad, w.grad):
        assert tensor is not None
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
