"""torchtitan's checkpoint manager, whose checkpoints get their names when they are whole."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.tools import filesystem

from everstep.foreign import replace
from everstep.run.exits import USAGE_EXIT, TrainerEnds
from everstep.titan.disk import not_saved
from everstep.titan.group import sum_in_group
from everstep.titan.names import TRAIN_STATE, CheckpointManager
from everstep.titan.parts import FIRST, WORKERS, Parts, put_in_place


def write_aside(manager: Any, group: int, life: str, parts: Parts | None = None) -> None:
    """Have torchtitan's checkpoint manager write aside: a checkpoint gets its name when it is whole. A group that is
    killed while it writes leaves nothing that could be taken for a checkpoint, and two that write the same step, in
    two histories, do not mix their files. Another manager, or one of a folder that is no local one, stays as it is.

    Args:
        life: names the folder that this group writes to; another one after every start. What earlier starts of the
            group have left half written is removed.
        parts: of a semi-synchronous run.
    """
    if type(manager) is not CheckpointManager or not manager.enable or filesystem.is_remote(manager.folder):
        if parts is not None and manager.enable:
            why = "[semi_sync]: checkpoints need torchtitan's own manager and a checkpoint.folder on a file system"
            raise TrainerEnds(USAGE_EXIT, why)
        return
    aside, is_first, save = f"writing-trainer-{group}-", dist.get_rank() == 0, type(manager).dcp_save
    for left in Path(manager.folder).glob(f"{aside}*") if is_first else ():
        shutil.rmtree(left, ignore_errors=True)

    def save_aside(state_dict: Any, checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        target = Path(checkpoint_id)
        draft, put = target.with_name(aside + life), functools.partial(put_in_place, target=target)
        if parts is not None and WORKERS in state_dict:
            folder, name = parts.folder(target), FIRST
            if TRAIN_STATE not in state_dict:
                draft = target.with_name(f"{draft.name}-{min(int(own.split('.')[1]) for own in state_dict[WORKERS])}")
                name = f"{folder.name}-{draft.name}"
            put = functools.partial(parts.bring, folder=folder, name=name, target=target)
        if is_first:  # the others write after a collective that rank 0 has not come to yet
            shutil.rmtree(draft, ignore_errors=True)
        name_it = functools.partial(put, draft) if is_first else lambda: None
        begun = save(manager, state_dict, str(draft), *args, **kwargs)
        if isinstance(begun, AsyncSaveResponse):
            return dataclasses.replace(begun, upload_completion=_named(begun.upload_completion, name_it))
        if isinstance(begun, Future):
            return _named(begun, name_it)
        dist.barrier()  # what is written in another format is put together by all ranks
        error = ""
        try:
            name_it()
        except OSError as failed:
            error = str(failed)
        if sum_in_group(bool(error)):
            raise not_saved(error or f"{target} could not get its name")
        return begun

    replace(manager, "dcp_save", save_aside)


def _named(written: Future, name_it: Callable[[], None]) -> Future:
    """Ends once what is being written has its name."""
    named = Future()

    def finish(done: Future) -> None:
        try:
            done.result()
            name_it()
        except BaseException as error:  # noqa: BLE001  for whoever waits for it
            named.set_exception(error)
        else:
            named.set_result(None)

    written.add_done_callback(finish)
    return named
