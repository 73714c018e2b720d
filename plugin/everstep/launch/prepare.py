"""What only torchtitan can tell about a run before it starts: is the config valid, and is it this run
directory's.

Runs in a fork of the warm process, so that the processes of the run start from untouched modules.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.config.errors import ConfigError
from everstep.run.exits import USAGE_EXIT
from everstep.run.files import read_json, write_json, write_whole


def main(
    config: str,
    run_dir: str,
    flags: Sequence[str],
    ranks: int,
    allow_dropped: bool = False,
    here: bool = True,
) -> int:
    """Check `config` with torchtitan `flags` for groups of `ranks`, and settle it in `run_dir`/config.toml.

    `here`: whether this machine is one that trains; a login node need not have a GPU.

    Leaves {"steps", "identity", "devices", "warnings"} or {"error": sentence} for `take_answer`.
    """
    os.environ["WORLD_SIZE"] = str(ranks)  # what the workers will see
    try:
        found, status = _settle(Path(config), Path(run_dir), flags, ranks, allow_dropped, here), 0
    except ConfigError as error:
        found, status = {"error": str(error)}, USAGE_EXIT
    leave_answer(Path(run_dir), found)
    return status


def leave_answer(run_dir: Path, found: dict[str, Any]) -> None:
    write_json(_answer_file(run_dir), found)


def take_answer(run_dir: Path) -> dict[str, Any]:
    """What `main` left, once; empty if it left nothing."""
    answer = read_json(_answer_file(run_dir))
    _answer_file(run_dir).unlink(missing_ok=True)
    return answer


def _answer_file(run_dir: Path) -> Path:
    return run_dir / "state" / "prepared.json"


def judge(
    source: Path, flags: Sequence[str], ranks: int, *, allow_dropped: bool = False, here: bool = True
) -> tuple[Any, list[str]]:
    """The config of `source` with torchtitan's `flags`, for groups of `ranks`, and what the user should know of it.

    Raises:
        ConfigError: a run of it cannot work.
    """
    from everstep.config.checks import slots_per_step
    from everstep.quorum.communicator import why_not
    from everstep.titan.cpu import has_accelerator
    from everstep.titan.data.binding import check_files
    from everstep.titan.load import load_config
    from everstep.titan.machine import needs_gpu
    from everstep.titan.trainer import EverstepTrainer

    warnings: list[str] = []
    config = load_config(source, EverstepTrainer.Config, flags, allow_dropped=allow_dropped, warnings=warnings)
    ft = config.fault_tolerance
    if not ft.enable and ft.groups > 1:
        raise ConfigError(
            f"{source}: {ft.groups} groups need fault tolerance, or each trains alone: "
            "set [fault_tolerance] enable = true, or give --groups 1"
        )
    if ft.enable:
        slots = slots_per_step(config, ranks)
        if slots < ft.groups:
            raise ConfigError(
                f"{source}: [training] global_batch_size = {config.training.global_batch_size} has {slots} slots "
                f"with {ranks} ranks in a group, for {ft.groups} groups: every group needs one at least"
            )
    check_files(config)
    if here and not has_accelerator():
        for problem in needs_gpu(config):
            raise ConfigError(f"{source}: {problem.message}")
    if here and ft.enable and (reason := why_not(ft.process_group)):
        raise ConfigError(
            f'{source}: [fault_tolerance] process_group = "{ft.process_group}" {reason}: set it to "gloo"'
        )
    return config, warnings


def _settle(source: Path, run_dir: Path, flags: Sequence[str], ranks: int, allow_dropped: bool, here: bool) -> dict:
    from everstep.config.resolved import config_identity, differing_keys, resolved_toml
    from everstep.titan.load import load_config
    from everstep.titan.trainer import EverstepTrainer

    config, warnings = judge(source, flags, ranks, allow_dropped=allow_dropped, here=here)
    settled = run_dir / "config.toml"
    if settled.exists():
        if not config.checkpoint.enable:
            warnings.append(
                f"{run_dir} holds an earlier part of this run, and no checkpoint of it ([checkpoint] enable is false): "
                + ("unless its snapshots are still in memory, " if config.snapshot.enable else "")
                + "it begins at step 1 again"
            )
        differing = differing_keys(load_config(settled, EverstepTrainer.Config, check=False), config)
        if differing:
            raise ConfigError(
                f"{run_dir} holds a run of another config: {'; '.join(differing)}. "
                "Give another --run-dir, or undo the changes."
            )
    write_whole(settled, resolved_toml(config).encode())
    return {
        "steps": config.semi_sync.commits(config.training.steps),
        "identity": config_identity(config),
        "devices": _devices(),
        "warnings": warnings,
    }


def _devices() -> list[str]:
    """The CUDA devices that this run may use, as CUDA_VISIBLE_DEVICES names them; none without CUDA."""
    from torch import cuda

    if not cuda.is_available():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible else [str(index) for index in range(cuda.device_count())]
