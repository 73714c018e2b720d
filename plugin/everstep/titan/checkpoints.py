"""torchtitan's checkpoint manager, whose checkpoints get their names when they are whole."""

import shutil
import traceback
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from everstep.foreign import overrides
from everstep.titan.group import sum_in_group
from everstep.titan.names import BaseCheckpointManager, CheckpointManager


class RunCheckpointManager(CheckpointManager):
    """torchtitan's checkpoint manager, which writes aside: a checkpoint gets its name when it is whole. A group that is
    killed while it writes leaves nothing that could be taken for a checkpoint, and two that write the same step, in
    two histories, do not mix their files.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """torchtitan's own keys."""

    aside = "trainer"
    """Names the folder that this group writes to; another one after every start."""

    def write_aside_as(self, group: int, life: str) -> None:
        """Remove what earlier starts of this group have left half written, and write to a folder of one's own."""
        self.aside = f"trainer-{group}-{life}"
        if dist.get_rank() == 0:
            for draft in Path(self.folder).glob(f"writing-trainer-{group}-*"):
                shutil.rmtree(draft, ignore_errors=True)

    @overrides(CheckpointManager)
    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        """Write as torchtitan does, aside."""
        target = Path(checkpoint_id)
        draft = target.with_name(f"writing-{self.aside}")
        if dist.get_rank() == 0:  # the others write after a collective that rank 0 has not come to yet
            shutil.rmtree(draft, ignore_errors=True)
        begun = super().dcp_save(state_dict, str(draft), *args, **kwargs)
        uploaded = begun.upload_completion if isinstance(begun, AsyncSaveResponse) else begun
        if isinstance(uploaded, Future):
            if dist.get_rank() == 0:
                uploaded.add_done_callback(lambda done: _finish(done, draft, target))
        else:
            dist.barrier()  # what is written in another format is put together by all ranks
            failures: dict[int, Any] = {}
            try:
                if dist.get_rank() == 0:
                    put_in_place(draft, target)
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
        put_in_place(draft, target)
    except OSError as error:
        logger.error(f"The checkpoint {target} was written to {draft} and cannot get its name: {error}")


def put_in_place(draft: Path, target: Path) -> None:
    """A whole checkpoint gets its name at once. One of the same step, from before the run went back, makes way."""
    if target.exists():
        (target / ".metadata").unlink(missing_ok=True)  # from here on torchtitan does not believe it
        shutil.rmtree(target)
    draft.rename(target)


def of_run(config: BaseCheckpointManager.Config) -> BaseCheckpointManager.Config:
    """The same settings for a manager that writes aside; those of another manager, or of a folder that is no local one,
    as they are."""
    if type(config) is not CheckpointManager.Config or filesystem.is_remote(config.folder):
        return config
    return RunCheckpointManager.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
