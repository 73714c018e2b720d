"""Compares two runs to the bit: the losses and checksums of their steps, and the tensors of their checkpoints."""

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
    steps: number of steps (rounds, if semi-synchronous) that both runs committed.
    checksums: number of steps after which both have a checksum of the parameters: the start, and each step if `exact`,
        else those with an audit.
    diverged: the first step at which the runs, or the groups of one, differ, and how; empty if none does.
    checkpoint: the newest optimizer step of which both have a checkpoint; 0 if there is none.
    tensors: number of tensors of it that were compared.
    differing: the first of them that differs, is missing or cannot be read, and how; empty if none.
    """

    steps: int
    checksums: int
    diverged: str
    checkpoint: int
    tensors: int
    differing: str

    @property
    def same(self) -> bool:
        """Whether all that was compared has the same bits, with at least one step."""
        return self.steps > 0 and not self.diverged and not self.differing


def compare(one: Path, other: Path) -> Comparison:
    """Compare what two runs committed, to the bit. For each step that both committed, the events of all groups of both
    runs have to agree, also if a run committed the step more than once. Raises ValueError and OSError."""
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
    """Return, by step, the losses and gradient norms in all groups' events, and the parameters' checksums after it."""
    losses: dict[int, set[tuple[Any, Any]]] = defaultdict(set)
    sums: dict[int, set[Any]] = defaultdict(set)
    for event in read_events(run_dir, {"commit", "audit"}):
        if event["kind"] == "commit":
            losses[event["step"]].add((event["loss"], event.get("grad_norm")))
        if event.get("checksum") is not None:
            sums[event["step"]].add(event["checksum"])
    return losses, sums


def checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return step -> folder of a run's complete checkpoints. Raises ValueError if its config does not name a folder."""
    config = config_file(run_dir)
    try:
        folder = read_source(config).table["checkpoint"]["folder"] if config.exists() else "checkpoint"
        return checkpoints_in(run_dir / folder)
    except (LookupError, TypeError):
        raise ValueError(f"{config} has no [checkpoint] folder: the run's checkpoints cannot be found") from None


def _compare_tensors(one: Path, other: Path) -> tuple[int, str]:
    """Return how many tensors were compared and, in words, the first difference or damage; "" if there is none."""
    ours, theirs = tensors_in(one), tensors_in(other)
    for folder, found in ((one, ours), (other, theirs)):
        if damaged := sorted(parts_in(folder) - {part for part, _ in found.values()}):
            return 0, f"{damaged[0] / '.metadata'} is damaged"
    kinds, others = ({(key, type(entry)) for key, (_, entry) in found.items()} for found in (ours, theirs))
    if alone := sorted(key for key, _ in kinds ^ others):
        what = "a tensor in" if alone[0] in ours.keys() & theirs.keys() else "in"
        return 0, f"{alone[0]} is {what} only one of the checkpoints"
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
    """Return a tensor's elements as rows of bytes."""
    return tensor.contiguous().view(-1, 1).view(torch.uint8)
