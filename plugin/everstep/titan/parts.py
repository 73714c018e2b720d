"""The parts of a checkpoint on disk, and how a complete one is renamed.

In a semi-synchronous run all groups write a checkpoint together, so that no host needs the own states of all workers.
The first group writes what all groups have, and each group writes the states of the workers that it carries. Each part
is a torch checkpoint in itself. The parts are collected in a folder for their step and history. The group that adds the
last one moves the others below the first group's part, and renames that to the checkpoint's name.
"""

import itertools
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.tools.logging import logger

from everstep.titan.checksums import is_damaged
from everstep.titan.names import TRAIN_STATE

WORKERS = "semi_sync"
"""Name, within a checkpoint, of what only semi-synchronous runs have."""
DRAFT = "writing-trainer-"
"""Begin of the name of a folder that a group writes to; the group's id and the run's follow."""
FIRST = "first"
"""Folder name of the first group's part, which torchtitan's manager writes, until all other parts are there."""
HF_INDEX = "model.safetensors.index.json"
"""File of a checkpoint in Hugging Face's format, which has the model only (`[checkpoint] last_save_in_hf`)."""
_OWN = re.compile(rf"{WORKERS}\.worker\.(\d+)\.")


def checkpoints_in(folder: Path, file: str = ".metadata") -> dict[int, Path]:
    """Return step -> folder for the complete checkpoints in a local folder: those in torch's format, or with `file`."""
    found = ((re.fullmatch(r"step-(\d+)", path.parent.name), path.parent) for path in folder.glob(f"step-*/{file}"))
    return {int(named[1]): path for named, path in found if named is not None}


def parts_in(folder: Path) -> set[Path]:
    """Return the folders of a checkpoint that have a `.metadata`: its own, and those of its parts."""
    return {path.parent for path in (*folder.glob(".metadata"), *folder.glob("*/.metadata"))}


def tensors_in(folder: Path) -> dict[str, tuple[Path, Any]]:
    """Return name -> (folder, metadata) for each entry of a checkpoint and its parts; `folder` is the part that has it.
    Parts whose `.metadata` cannot be read are left out: with a warning if it is damaged, silently if it has moved."""
    found: dict[str, tuple[Path, Any]] = {}
    for part in sorted(parts_in(folder)):
        try:
            if is_damaged(part / ".metadata"):  # to unpickle it could take all memory
                raise ValueError("it is not what was written")
            entries = FileSystemReader(part).read_metadata().state_dict_metadata
        except OSError:  # another group is just moving it
            continue
        except Exception as error:  # noqa: BLE001  whatever reading a damaged one can raise
            logger.warning(f"{part / '.metadata'} is damaged: {type(error).__name__}: {error}")
            continue
        found |= {name: (part, entry) for name, entry in entries.items()}
    return found


def workers_in(folder: Path) -> dict[int, Path]:
    """Return worker -> folder of the part of a checkpoint that has the worker's own state."""
    found = ((_OWN.match(name), part) for name, (part, _) in tensors_in(folder).items())
    return {int(own[1]): part for own, part in found if own is not None}


def has_model_only(folder: Path) -> bool:
    """Return whether a checkpoint is an export of the model, which is all that a run's last one may have."""
    keys = tensors_in(folder)
    return (folder / HF_INDEX).exists() or (bool(keys) and f"{TRAIN_STATE}.step" not in keys)


def read_alone(folder: Path, into: dict[str, Any]) -> None:
    """Load entries of a checkpoint without the other ranks. Raises OSError if they are damaged or missing."""
    with warnings.catch_warnings():  # torch warns that only one process loads
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.load(into, checkpoint_id=str(folder), no_dist=True)
        except CheckpointException as error:
            raise OSError(f"{folder} cannot be read: {cause_of(error)}") from None


def cause_of(error: BaseException) -> str:
    """Return what failed, in words. A CheckpointException's own text would begin with the ranks."""
    first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(first).__name__}: {first}"


@dataclass(frozen=True, slots=True)
class Parts:
    """Collects the groups' parts of a checkpoint.

    Attributes:
        workers: number of workers whose states make a checkpoint complete.
        history: returns the history of the state that is being written.
        on_complete: called with the step, in the group that adds the last part.
    """

    workers: int
    history: Callable[[], int]
    on_complete: Callable[[int], None]

    def folder(self, target: Path) -> Path:
        """Return the folder in which the parts of `target` are collected."""
        return target.with_name(f"writing-{target.name.removeprefix('step-')}-{self.history():x}")

    def add_part(self, draft: Path, folder: Path, name: str, target: Path) -> None:
        """Add the written part `draft` to the others, and complete the checkpoint if it is the last. Raises OSError."""
        if (folder / name).exists() or any(target.glob(f"{folder.name}*")):  # this part is there, or all are
            shutil.rmtree(draft)
            return
        folder.mkdir(exist_ok=True)
        draft.rename(folder / name)
        if not (folder / FIRST).exists() or len(workers_in(folder)) < self.workers:
            return
        whole = draft.with_name(f"{draft.name}-whole")
        try:
            (folder / FIRST).rename(whole)
        except FileNotFoundError:
            return  # another group has also seen that all are there, and was faster
        for part in folder.iterdir():
            part.rename(whole / part.name)
        put_in_place(whole, target)
        self.on_complete(step := int(target.name.removeprefix("step-")))
        remove_incomplete(target.parent, step)


def remove_incomplete(folder: Path, step: int) -> None:
    """Remove incomplete checkpoints up to `step`, which no group will complete, to free their space."""
    for waiting in folder.glob("writing-[0-9]*"):
        if int(waiting.name.split("-")[1]) <= step:
            shutil.rmtree(waiting, ignore_errors=True)


def put_in_place(draft: Path, target: Path) -> None:
    """Rename a complete checkpoint to `target`. One of the same step, from before the run went back, is removed. That
    comes last, as it takes long for a large one, and the group may die meanwhile. An export of the model is kept,
    unless this is one too."""
    exported = has_model_only(target) and not has_model_only(draft)
    step = target.name.removeprefix("step-")
    replaced = aside(target) if exported else draft.with_name(f"{draft.name}-replaced-{step}")
    if target.exists():
        target.rename(replaced)
    try:
        draft.rename(target)
    except OSError:
        if replaced.exists():
            replaced.rename(target)
        raise
    if not exported and replaced.exists():
        # `draft` is free now, and clear_draft does not take what is removed in part for a checkpoint.
        shutil.rmtree(replaced.rename(draft), ignore_errors=True)


def clear_draft(left: Path) -> None:
    """Remove what a start of the group that died has left of a checkpoint. If it died between the two renames of
    `put_in_place`, the old checkpoint gets its name back."""
    found = re.search(r"-replaced-(\d+)$", left.name)
    if found and not (target := left.with_name(f"step-{found[1]}")).exists():
        left.rename(target)
    else:
        shutil.rmtree(left, ignore_errors=True)


def remedy(step: int) -> str:
    """Return what a user can do about the damaged checkpoint of this step, -1 for an initial one. torchtitan takes any
    name that contains step-N for a checkpoint, so the user is given another."""
    if step == -1:
        return "set [checkpoint] initial_load_path to another one"
    return f"rename it to abandoned-{step}, or set [checkpoint] load_step to another one"


def aside(checkpoint: Path) -> Path:
    """Return a free name that does not stand for a checkpoint of the run."""
    step, tries = checkpoint.name.removeprefix("step-"), itertools.count()
    return next(to for n in tries if not (to := checkpoint.with_name(f"abandoned-{step}.{n}")).exists())
