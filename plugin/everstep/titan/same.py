"""Where two runs diverge: the first step whose losses or checksums differ, and the first tensor of checkpoints."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from everstep.config.source import read_source
from everstep.run.directory import config_file
from everstep.run.events import read_events
from everstep.titan.parts import checkpoints_in, parts_in, read_alone, tensors_in


@dataclass(frozen=True, slots=True)
class Comparison:
    """Attributes:
    steps: how many steps (rounds, if semi-synchronous) both runs committed.
    checksums: after how many steps, counting the start as one, both have a checksum of the parameters.
    diverged: the first step at which they differ, and how; empty if none does.
    checkpoint: the newest optimizer step of which both have a checkpoint; 0: none.
    tensors: how many tensors of it were compared.
    differing: the first of them that differs, and how; empty if none does.
    """

    steps: int
    checksums: int
    diverged: str
    checkpoint: int
    tensors: int
    differing: str

    @property
    def same(self) -> bool:
        """Whether all that could be compared has the same bits, and a step was among it."""
        return self.steps > 0 and not self.diverged and not self.differing


def compare(one: Path, other: Path) -> Comparison:
    """Compare what two runs committed, to the bit. Of a step that both made, all events of all groups have to say the
    same, also if one of them made it more than once."""
    (losses, sums), (other_losses, other_sums) = _losses_and_sums(one), _losses_and_sums(other)
    steps, checksums = losses.keys() & other_losses.keys(), sums.keys() & other_sums.keys()
    diverged = ""
    for step in sorted(steps | checksums):
        if step in steps and len(told := losses[step] | other_losses[step]) > 1:
            diverged = f"step {step}: losses and gradient norms {sorted(told, key=str)}"
        elif step in checksums and len(told := sums[step] | other_sums[step]) > 1:
            diverged = f"the parameters after step {step}: checksums {sorted(told, key=str)}"
        if diverged:
            break
    newest = max(checkpoints(one).keys() & checkpoints(other).keys(), default=0)
    tensors, differing = 0, ""
    if newest:
        tensors, differing = _compare_tensors(checkpoints(one)[newest], checkpoints(other)[newest])
    return Comparison(len(steps), len(checksums), diverged, newest, tensors, differing)


def _losses_and_sums(run_dir: Path) -> tuple[dict[int, set[tuple[Any, Any]]], dict[int, set[Any]]]:
    """By step the losses and gradient norms that all groups told, and the checksums of the parameters after it."""
    losses: dict[int, set[tuple[Any, Any]]] = defaultdict(set)
    sums: dict[int, set[Any]] = defaultdict(set)
    for event in read_events(run_dir, {"commit", "audit"}):
        if event["kind"] == "commit":
            losses[event["step"]].add((event["loss"], event.get("grad_norm")))
        if event.get("checksum") is not None:
            sums[event["step"]].add(event["checksum"])
    return losses, sums


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """By step the folders of a run's checkpoints that were written to their end. Raises ValueError."""
    config = config_file(run_dir)
    try:
        folder = read_source(config).table["checkpoint"]["folder"] if config.exists() else "checkpoint"
        return checkpoints_in(run_dir / folder)
    except (LookupError, TypeError):
        raise ValueError(f"{config} does not say where the run's checkpoints are") from None


def _compare_tensors(one: Path, other: Path) -> tuple[int, str]:
    """How many tensors were compared, and the first that differs."""
    ours, theirs = tensors_in(one), tensors_in(other)
    for folder, found in ((one, ours), (other, theirs)):
        if damaged := sorted(parts_in(folder) - {part for part, _ in found.values()}):
            return 0, f"{damaged[0] / '.metadata'} is damaged"
    if alone := sorted(ours.keys() ^ theirs.keys()):
        return 0, f"{alone[0]} is in one of the checkpoints only"
    compared = 0
    for key in sorted(name for name, (_, entry) in ours.items() if isinstance(entry, TensorStorageMetadata)):
        mine, their = _load(key, *ours[key]), _load(key, *theirs[key])
        compared += 1
        if mine.shape != their.shape or mine.dtype != their.dtype:
            return compared, f"{key} is {mine.dtype} {list(mine.shape)} and {their.dtype} {list(their.shape)}"
        differs = (_bytes(mine) != _bytes(their)).any(dim=-1)
        if differs.any():
            return compared, f"{key}: {int(differs.sum())} of {mine.numel()} elements differ"
    return compared, ""


def _load(key: str, folder: Path, entry: Any) -> torch.Tensor:
    tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_alone(folder, {key: tensor})
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as rows of bytes."""
    return tensor.contiguous().view(-1, 1).view(torch.uint8)
