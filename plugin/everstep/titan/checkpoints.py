"""Disk checkpoints out of the snapshots: torchtitan's checkpoint manager and format, none of the trainer's time.

`[checkpoint]` means what it means to torchtitan; only who writes is
different: a process beside the trainer, which takes the state from the keepers' memory, verified, and writes it in the
format and under the names of torchtitan's own manager, so that either loads what the other wrote.
"""

import shutil
import subprocess
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype
from torchtitan.trainer import Trainer

from everstep.foreign import overrides
from everstep.titan import private
from everstep.titan.checkpoint_names import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    TRAIN_STATE,
    BaseCheckpointManager,
    CheckpointManager,
    ModelWrapper,
)
from everstep.titan.group import sum_in_group
from everstep.titan.machine import built_on_meta


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


class Exporter(Protocol):
    """Writes checkpoints of a run's snapshots, in a process of its own (`everstep.titan.snapshots`)."""

    @property
    def coded(self) -> bool:
        """Whether there is a snapshot to write; the same on all ranks."""
        ...

    def start_export(self, step: int, folder: str) -> subprocess.Popen:
        """Start the process that writes the newest state at or after a step below a folder, as `step-N`."""
        ...


class SnapshotCheckpointManager(RunCheckpointManager):
    """torchtitan's checkpoint manager, which leaves checkpoints to a process of its own.

    The trainer writes what that cannot: the last one, which may be in another format and which nothing waits for any
    more; one that is due while no snapshot is coded; and the one after a checkpoint that could not be taken from
    memory. Rank 0 has the writer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RunCheckpointManager.Config):
        """torchtitan's own keys. `async_mode` is not used: nothing is staged."""

    def __init__(self, config: Config, **parts: Any) -> None:
        self._exporter: Exporter | None = None
        self._writer: subprocess.Popen | None = None
        self._failed = False
        """Whether the last checkpoint could not be taken from memory."""
        super().__init__(config, **parts)

    def export_with(self, exporter: Exporter, all_in_group: Callable[[bool], bool]) -> None:
        """Have checkpoints written by `exporter`.

        `all_in_group`: whether a flag holds on all ranks of the group; a collective.
        """
        self._exporter, self._all_in_group = exporter, all_in_group

    @overrides(CheckpointManager)
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Begin a checkpoint if one is due. Returns whether it is on disk already."""
        if last_step:
            self._end_writer()  # an older state than the one that is written now: not worth that everybody waits for it
        self._collect()
        if last_step or self._exporter is None:
            return super()._save(curr_step, last_step)
        if not private.is_due(self, curr_step):
            return False
        able, self._failed = not self._failed and self._exporter.coded, False
        if not self._all_in_group(able):
            return super()._save(curr_step, last_step)
        if self._writer is not None:
            logger.warning(f"The checkpoint of step {curr_step} is left out: the one before is still being written")
        elif dist.get_rank() == 0:
            self._writer = self._exporter.start_export(curr_step, self.folder)
        return False

    def _collect(self) -> None:
        """See how the writer ended, if it has."""
        if self._writer is None or self._writer.poll() is None:
            return
        self._failed, self._writer = self._writer.returncode != 0, None
        if self._failed:
            logger.warning("A checkpoint could not be taken from memory (logs/export.log); the trainer writes the next")
        else:
            private.remove_old_checkpoints(self)

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.kill()
            self._writer.wait()
            self._writer = None

    @overrides(CheckpointManager)
    def _close(self) -> None:
        self._end_writer()
        super()._close()


def of_run(config: BaseCheckpointManager.Config, *, from_snapshots: bool) -> BaseCheckpointManager.Config:
    """The same settings for a manager that writes aside, and from snapshots if there are any; those of another manager,
    or of a folder that is no local one, as they are."""
    if type(config) is not CheckpointManager.Config or filesystem.is_remote(config.folder):
        return config
    manager = SnapshotCheckpointManager if from_snapshots else RunCheckpointManager
    return manager.Config(**{field.name: getattr(config, field.name) for field in fields(config)})


def export_checkpoint(
    config: Trainer.Config,
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
    dataloader: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write a state as torchtitan's manager would have written it: same names, same format (DCP).

    Args:
        config: of the run; model, optimizer and schedule are built from it, on no device.
        tensors: whole tensors, named as `training.state.TrainingState.tensors` names them.
        meta: as `training.state.TrainingState.meta` gives it.
        dataloader: the dataloader's own state.
        folder: where to; what is not overwritten there stays.

    Raises:
        ValueError: the tensors are not those of the config's model.
    """
    model = _model_with(config, tensors)
    optimizers = config.optimizer.build(model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=config.training.steps)
    schedulers.load_state_dict(meta["lr_schedulers"])
    params = dict(model.named_parameters())
    for optimizer in optimizers:
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                _, of, key = name.split("/")
                optimizer.state[params[of]][key] = tensor
        for group, rate in zip(optimizer.param_groups, meta["lr"][0], strict=True):
            group["lr"] = rate
    states = {
        **ModelWrapper([model]).state_dict(),
        OPTIMIZER: optimizers.state_dict(),
        LR_SCHEDULER: schedulers.state_dict(),
        DATALOADER: dict(dataloader),
        TRAIN_STATE: dict(meta["counters"]),
    }
    dcp.save(states, checkpoint_id=str(folder), no_dist=True)


def _model_with(config: Trainer.Config, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """The config's model around these parameters and buffers. Its hooks, which name and split what a checkpoint holds,
    are why a model is needed at all."""
    with set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = built_on_meta(config)
    fresh = {id(param): nn.Parameter(tensors[f"param/{name}"]) for name, param in model.named_parameters()
             if f"param/{name}" in tensors}  # fmt: skip
    missing = [name for name, param in model.named_parameters() if id(param) not in fresh]
    if missing:
        raise ValueError(f"the snapshot has no {missing[0]}: it is of another model than the config's")
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, fresh[id(param)])  # a shared parameter stays shared
        for name, _ in list(module.named_buffers(recurse=False)):
            full = f"buffer/{path}.{name}" if path else f"buffer/{name}"
            if full in tensors:
                setattr(module, name, tensors[full])
    return model
