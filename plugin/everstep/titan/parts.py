"""What a checkpoint is made of, and how it gets its name.

One of a semi-synchronous run is written by all groups, so that no host has the own states of all workers: the first
group writes what all have, and each one the states of the workers that it carries. Each part is a checkpoint of its
own. They wait for one another in a folder of their step and history; whoever brings the last gives the checkpoint its
name, with the parts below it.
"""

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

WORKERS = "semi_sync"
"""Of what a checkpoint has, by name: a semi-synchronous run's."""
FIRST = "first"
"""The part that torchtitan's manager writes."""
_OWN = re.compile(rf"{WORKERS}\.worker\.(\d+)\.")


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """By step the checkpoints in a local folder that were written to their end, in torch's format."""
    found = ((re.fullmatch(r"step-(\d+)", path.parent.name), path.parent) for path in folder.glob("step-*/.metadata"))
    return {int(named[1]): path for named, path in found if named is not None}


def parts_in(folder: Path) -> set[Path]:
    """The folders that a checkpoint lies in: its own, and those of its parts."""
    return {path.parent for path in (*folder.glob(".metadata"), *folder.glob("*/.metadata"))}


def tensors_in(folder: Path) -> dict[str, tuple[Path, Any]]:
    """What a checkpoint has, its parts included: by name in which of them it is, and what is said of it there. Nothing
    of a part whose `.metadata` is damaged."""
    found: dict[str, tuple[Path, Any]] = {}
    for part in sorted(parts_in(folder)):
        try:
            entries = FileSystemReader(part).read_metadata().state_dict_metadata
        except OSError:  # it is just being moved
            continue
        except Exception as error:  # noqa: BLE001  whatever reading a damaged one can raise
            logger.warning(f"{part / '.metadata'} is damaged: {type(error).__name__}: {error}")
            continue
        found |= {name: (part, entry) for name, entry in entries.items()}
    return found


def workers_in(folder: Path) -> dict[int, Path]:
    """By worker the part of a checkpoint that has its own state."""
    found = ((_OWN.match(name), part) for name, (part, _) in tensors_in(folder).items())
    return {int(own[1]): part for own, part in found if own is not None}


def read_alone(folder: Path, into: dict[str, Any]) -> None:
    """Load some of what a checkpoint has, each rank for itself. Raises OSError if it is damaged or not there."""
    with warnings.catch_warnings():  # that this is one process
        warnings.simplefilter("ignore", UserWarning)
        try:
            dcp.load(into, checkpoint_id=str(folder), no_dist=True)
        except CheckpointException as error:
            raise OSError(f"{folder} cannot be read: {cause_of(error)}") from None


def cause_of(error: BaseException) -> str:
    """What failed, in words; the text of an exception of torch.distributed.checkpoint begins with the ranks."""
    first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(first).__name__}: {first}"


@dataclass(frozen=True, slots=True)
class Parts:
    """How this group's part of a checkpoint comes together with the others'.

    Attributes:
        workers: whose states a whole one has.
        history: of the state that is written now.
        whole: called with its step by who brings the last part.
    """

    workers: int
    history: Callable[[], int]
    whole: Callable[[int], None]

    def folder(self, target: Path) -> Path:
        """Where parts wait."""
        return target.with_name(f"writing-{target.name.removeprefix('step-')}-{self.history():x}")

    def bring(self, draft: Path, folder: Path, name: str, target: Path) -> None:
        """Put a part that is written to the others. Raises OSError."""
        if (folder / name).exists() or any(target.glob(f"{folder.name}*")):  # others have done this group's part
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
            return  # another group saw as well that all are there
        for part in folder.iterdir():
            part.rename(whole / part.name)
        put_in_place(whole, target)
        self.whole(step := int(target.name.removeprefix("step-")))
        give_up(target.parent, step)


def give_up(folder: Path, step: int) -> None:
    """Remove what waits for the other parts of checkpoints up to a step, and takes room: they will not be whole."""
    for waiting in folder.glob("writing-[0-9]*"):
        if int(waiting.name.split("-")[1]) <= step:
            shutil.rmtree(waiting, ignore_errors=True)


def put_in_place(draft: Path, target: Path) -> None:
    """A whole checkpoint gets its name at once. One of the same step, from before the run went back, makes way."""
    if target.exists():
        (target / ".metadata").unlink(missing_ok=True)  # from here on torchtitan does not believe it
        shutil.rmtree(target)
    draft.rename(target)
