"""A trainer's checkpoints on disk: which one a run goes on from, when one is written, and when it gets its name."""

import dataclasses
import functools
import re
import shutil
import time
import traceback
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from everstep.foreign import replace
from everstep.run.exits import USAGE_EXIT, TrainerEnds
from everstep.step import ledger
from everstep.titan import private
from everstep.titan.data.slots import SlotSource
from everstep.titan.group import all_in_group, sum_in_group
from everstep.titan.names import DATALOADER, TRAIN_STATE, CheckpointManager
from everstep.titan.parts import (
    FIRST,
    WORKERS,
    Parts,
    cause_of,
    checkpoints_in,
    give_up,
    put_in_place,
    read_alone,
    tensors_in,
    workers_in,
)

HISTORY = "history"
DATA_BEGAN = "data_began_after"
DATA = "data"
PARAMETERS = "parameters"
NAMING_S, POLL_S = 2.0, 0.02
OF_RANK = re.compile(rf"{DATALOADER}\.dp_rank_(\d+)")
"""What a checkpoint has of the streams that a data-parallel rank knew."""
OURS = frozenset((HISTORY, DATA_BEGAN, DATA, PARAMETERS))
"""What a trainer's counters have besides torchtitan's."""


def not_saved(why: str) -> CheckpointException:
    """What torch.distributed.checkpoint raises, for a reason that all ranks of the group know."""
    return CheckpointException(why, {0: (RuntimeError(why), traceback.StackSummary())})


class DiskCheckpoints:
    """One rank's part in the run's checkpoints.

    Args:
        trainer: an `EverstepTrainer`, which has built torchtitan's manager, and whose counters are in a checkpoint.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._config = trainer, trainer.config.checkpoint
        self._manager: Any = trainer.checkpointer
        self._events, self._files = trainer.place.events, trainer.place.files
        self.states: dict[str, Any] = self._manager.states if self._config.enable else {}
        """What a checkpoint is made of, by name: `Stateful`s."""

    def newest(self) -> int | None:
        """The newest checkpoint that training can go on from; else the newest. A run may leave the model alone at its
        end."""
        if not self._config.enable or not isinstance(self._manager, CheckpointManager):
            return None
        newest = private.newest_checkpoint(self._manager)
        found = sorted(checkpoints_in(Path(self._manager.folder)).items(), reverse=True)
        whole = (step for step, folder in found if self._has_all(step, tensors_in(folder)))
        return next(whole, newest if newest >= 0 else None)

    def _has_all(self, step: int, keys: Collection[str]) -> bool:
        """Whether a checkpoint has what torchtitan loads of it: of step 0 the model, of others counters too."""
        return step == 0 or TRAIN_STATE in self._config.exclude_from_loading or f"{TRAIN_STATE}.step" in keys

    def _to_load(self) -> tuple[int, Path | None]:
        """The checkpoint that is going to be loaded: its step, -1 if it is none of this run's, and its folder. None:
        there is none, or one in another format."""
        step = self._config.load_step
        if not self._config.enable or not isinstance(self._manager, CheckpointManager):
            return step, None
        if step == -1 and (newest := self.newest()) is not None:
            step = newest
        initial = None if self._config.initial_load_model_only else self._config.initial_load_path
        folder = Path(self._manager.folder) / f"step-{step}" if step != -1 else initial
        return step, Path(folder) if folder and (Path(folder) / ".metadata").exists() else None

    def load(self) -> bool:
        """Load the checkpoint that `[checkpoint]` names, or the newest; whether there was one. torchtitan's own lack
        some of our keys, and a key that is not there cannot be loaded. Raises TrainerEnds for the model alone, OSError
        for one that is damaged."""
        step, folder = self._to_load()
        source: SlotSource = self._trainer.dataloader
        if folder is not None:
            keys = tensors_in(folder)
            self._trainer.own_keys = {key for key in OURS if f"{TRAIN_STATE}.{key}" in keys}
            source.saved_ranks = [int(found[1]) for found in map(OF_RANK.fullmatch, keys) if found is not None]
            self._require(step, folder, keys)
            self._tell_damaged(step)
        try:
            found = self._manager.load(step=step)
        except CheckpointException as error:
            remedy = "Move it away, or give [checkpoint] load_step with another one"
            raise OSError(f"{folder or self._manager.folder} cannot be read: {cause_of(error)}. {remedy}") from None
        self._trainer.own_keys, source.saved_ranks = OURS, ()
        return bool(found)

    def _tell_damaged(self, step: int) -> None:
        """Say which newer checkpoints are passed over."""
        newer = {at: path for at, path in checkpoints_in(Path(self._manager.folder)).items() if at > step}
        damaged = [str(path) for path in newer.values() if not tensors_in(path)]
        if damaged and self._config.load_step == -1 and dist.get_rank() == 0:
            text = f"goes on from step {step}: the .metadata of {', '.join(damaged)} is damaged"
            self._events.emit("warning", text=text)

    def _require(self, step: int, folder: Path, keys: Collection[str]) -> None:
        """Raises TrainerEnds if a checkpoint lacks what torchtitan would load of it."""
        why, position = "", {f"{DATALOADER}.{key}" for key in self._trainer.dataloader.state_dict()}
        if not keys:
            why = "has a damaged .metadata: move it away, or give [checkpoint] load_step with another one"
        elif not self._has_all(step, keys):
            why = (
                "has the model alone ([checkpoint] last_save_model_only), and training cannot go on from it: give "
                "[checkpoint] load_step with an older one, or begin another run with initial_load_path"
            )
        elif step and DATALOADER not in self._config.exclude_from_loading and not position.issubset(keys):
            why = (
                "does not say where the data of this [data] source stands: with [checkpoint] exclude_from_loading = "
                '["dataloader"] it is read from its beginning'
            )
        if why:
            raise TrainerEnds(USAGE_EXIT, f"{folder} {why}")

    # Own states of a semi-synchronous run's workers

    def workers_to_load(self) -> int:
        """How many workers the checkpoint has that is going to be loaded."""
        folder = None if WORKERS in self._config.exclude_from_loading else self._to_load()[1]
        return len(workers_in(folder)) if folder else 0

    def is_due(self, step: int) -> bool:
        """Whether one is written after this step, which is not the last."""
        return self._config.enable and private.saves_after(self._manager, step)

    def workers(self, step: int, history: int) -> dict[int, Path]:
        """By worker where its state is after this step of this history, as far as checkpoints have it, also of one
        that is not whole yet."""
        if not self._config.enable or WORKERS in self._config.exclude_from_loading:
            return {}
        place, initial = Path(self._manager.folder), self._config.initial_load_path
        found = workers_in(place / f"writing-{step}-{history:x}")
        for folder in (place / f"step-{step}", *([Path(initial)] if initial else [])):
            if self._is_of(folder, step, history):
                return found | workers_in(folder)
        return found

    def _is_of(self, folder: Path, step: int, history: int) -> bool:
        told = {f"{TRAIN_STATE}.{HISTORY}": 0}
        if not (folder / ".metadata").exists() or not self.read(folder, told):
            return False
        return (told[f"{TRAIN_STATE}.{HISTORY}"] or ledger.extend(0, step, "restored")) == history

    def require_whole(self, step: int, history: int) -> None:
        """Raises CheckpointException unless there is a checkpoint after this step of this history, or another group is
        just giving it its name. A collective of the group."""
        folder, end = Path(self._manager.folder) / f"step-{step}", time.monotonic() + NAMING_S
        while not (found := self._is_of(folder, step, history)) and time.monotonic() < end:
            time.sleep(POLL_S)
        if not all_in_group(found):
            raise not_saved(f"{folder} lacks workers")

    def read(self, folder: Path, into: dict[str, Any]) -> bool:
        """Load this rank's part of something in a checkpoint; whether it could be had."""
        try:
            read_alone(folder, into)
        except OSError as error:
            logger.warning(str(error))
            return False
        return True

    def save(self, step: int, commit: int, *, last: bool = False, part: dict[str, torch.Tensor] | None = None) -> None:
        """Write a checkpoint of this step if one is due, or a `part` of it. A folder without room stops nothing but the
        last one. `commit`: for events."""
        self._files.beat("checkpoint", commit)
        is_part = WORKERS in self.states and (not last or self.saves_all())  # of the whole `Parts.whole` tells
        tell = functools.partial(self._tell, step, commit, time.monotonic(), is_part)
        try:
            saved = self._manager.save(step, last_step=last) if part is None else self._save_part(step, part, last)
        except CheckpointException as error:  # the same on all ranks of the group
            if last:
                raise
            tell(error)
            return
        begun = self._manager.save_future if saved else None  # one that saves nothing has no such name
        if begun is not None:  # whoever waits for it goes on in any case
            self._manager.save_future = _then(begun, lambda done: tell(done.exception()))
        elif saved:
            tell(None)

    def _tell(self, step: int, commit: int, begin: float, is_part: bool, error: BaseException | None) -> None:
        """What became of a checkpoint."""
        if error is None:
            if not is_part:
                self._events.emit("checkpoint_saved", commit, took_s=round(time.monotonic() - begin, 3))
            return
        folder = str(self._manager.folder)
        reason = f"{cause_of(error)}{_room(folder)}"
        logger.warning(f"No checkpoint in {folder} of step {step}: {reason}. Training goes on.")
        self._events.emit("checkpoint_failed", commit, reason=reason, folder=folder)
        give_up(Path(folder), step)

    def _save_part(self, step: int, part: dict[str, torch.Tensor], last: bool) -> bool:
        manager = self._manager
        manager.maybe_wait_for_saving()
        # What is on the host already needs no page-locked memory.
        at_once = last or manager.async_mode == "disabled"
        mode = type(manager.async_mode)("disabled" if at_once else "async")
        begun = manager.dcp_save({WORKERS: part}, str(Path(manager.folder) / f"step-{step}"), mode)
        manager.save_future = None if at_once else begun
        return True

    def saves_all(self) -> bool:
        """Whether the last checkpoint has more than the model."""
        if not self._config.enable or self._config.load_only:
            return False
        return self._trainer.should_continue_training() or not getattr(self._manager, "last_save_model_only", True)

    def save_last(self, step: int, commit: int, *, goes_on: bool) -> None:
        """The last checkpoint of the run, or if it `goes_on` one day, of this part of it."""
        if goes_on and self._config.enable:
            # The optimizer has to be in it.
            self._manager.last_save_model_only = False
            self._manager.last_save_in_hf = False
        self.save(step, commit, last=True)


def _room(folder: str) -> str:
    """How much room a folder has, in words: torch's errors of a full disk do not name it. "" where nobody can say."""
    try:
        return f" ({shutil.disk_usage(folder).free / 2**30:.2f} GiB free there)"
    except OSError:  # object storage
        return ""


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

        def named(done: Future) -> None:
            done.result()
            name_it()

        begun = save(manager, state_dict, str(draft), *args, **kwargs)
        if isinstance(begun, AsyncSaveResponse):
            return dataclasses.replace(begun, upload_completion=_then(begun.upload_completion, named))
        if isinstance(begun, Future):
            return _then(begun, named)
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


def _then(begun: Future, act: Callable[[Future], None]) -> Future:
    """Ends as what is done with another one when that has ended."""
    ended: Future = Future()

    def end(done: Future) -> None:
        try:
            ended.set_result(act(done))
        except BaseException as error:  # noqa: BLE001  as CheckpointException is; whoever waits is told of it
            ended.set_exception(error)

    begun.add_done_callback(end)
    return ended
