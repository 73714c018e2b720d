"""torchtitan's checkpoint manager, whose checkpoints get their names when they are whole."""

import functools
import shutil
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from everstep.foreign import replace
from everstep.titan.group import sum_in_group
from everstep.titan.names import CheckpointManager


def write_aside(manager: Any, group: int, life: str) -> None:
    """Have torchtitan's checkpoint manager write aside: a checkpoint gets its name when it is whole. A group that is
    killed while it writes leaves nothing that could be taken for a checkpoint, and two that write the same step, in
    two histories, do not mix their files. Another manager, or one of a folder that is no local one, stays as it is.

    Args:
        life: names the folder that this group writes to; another one after every start. What earlier starts of the
            group have left half written is removed.
    """
    if type(manager) is not CheckpointManager or not manager.enable or filesystem.is_remote(manager.folder):
        return
    aside = f"writing-trainer-{group}-"
    if dist.get_rank() == 0:
        for draft in Path(manager.folder).glob(f"{aside}*"):
            shutil.rmtree(draft, ignore_errors=True)
    replace(manager, "dcp_save", functools.partial(_save, type(manager).dcp_save, manager, aside + life))


def _save(
    save: Callable[..., Any], manager: Any, aside: str, state_dict: Any, checkpoint_id: str, *args: Any, **kwargs: Any
) -> Any:
    target = Path(checkpoint_id)
    draft = target.with_name(aside)
    is_first = dist.get_rank() == 0
    if is_first:  # the others write after a collective that rank 0 has not come to yet
        shutil.rmtree(draft, ignore_errors=True)
    begun = save(manager, state_dict, str(draft), *args, **kwargs)
    uploaded = begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun
    if isinstance(uploaded, Future):
        if is_first:
            uploaded.add_done_callback(lambda done: _finish(done, draft, target))
        return begun
    dist.barrier()  # what is written in another format is put together by all ranks
    failures: dict[int, Any] = {}
    try:
        if is_first:
            _put_in_place(draft, target)
    except OSError as error:
        failures[0] = (error, traceback.extract_tb(error.__traceback__))
    if sum_in_group(len(failures)):
        failures = failures or {0: (OSError(f"{target} could not get its name"), traceback.StackSummary())}
        raise CheckpointException("a checkpoint could not get its name", failures)
    return begun


def _finish(done: Future, draft: Path, target: Path) -> None:
    if done.cancelled() or done.exception() is not None:
        return  # whoever waits for it is told
    try:
        _put_in_place(draft, target)
    except OSError as error:
        logger.error(f"The checkpoint {target} was written to {draft} and cannot get its name: {error}")


def _put_in_place(draft: Path, target: Path) -> None:
    """A whole checkpoint gets its name at once. One of the same step, from before the run went back, makes way."""
    if target.exists():
        (target / ".metadata").unlink(missing_ok=True)  # from here on torchtitan does not believe it
        shutil.rmtree(target)
    draft.rename(target)
