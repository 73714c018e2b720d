"""A run's checkpoints on disk: which one it resumes from, when one is written, and when it gets its name."""

import contextlib
import dataclasses
import functools
import re
import shutil
import time
import traceback
from collections.abc import Callable, Collection, Iterator
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
from everstep.snapshot.segment import run_id
from everstep.step import ledger
from everstep.titan import private
from everstep.titan.checksums import damaged_file, write_checksums
from everstep.titan.data.slot_source import SlotSource
from everstep.titan.group import all_in_group, sum_in_group
from everstep.titan.load_once import Choice
from everstep.titan.names import DATALOADER, TRAIN_STATE, CheckpointManager
from everstep.titan.parts import (
    DRAFT,
    FIRST,
    HF_INDEX,
    WORKERS,
    Parts,
    cause_of,
    checkpoints_in,
    clear_draft,
    has_model_only,
    put_in_place,
    read_alone,
    remedy,
    remove_incomplete,
    tensors_in,
    workers_in,
)

HISTORY = "history"
DATA_BEGAN = "data_began_after"
DATA = "data"
PARAMETERS = "parameters"
ROUNDS = "rounds"
NAMING_S, POLL_S = 2.0, 0.02
"""Seconds to wait for another group to rename a complete checkpoint, and between two checks whether it has."""
OF_RANK = re.compile(rf"{DATALOADER}\.dp_rank_(\d+)")
"""Matches the key under which a checkpoint has the data streams that a data-parallel rank knew."""
OURS = frozenset((HISTORY, DATA_BEGAN, DATA, PARAMETERS, ROUNDS))
"""The keys of `EverstepTrainer.state_dict` that torchtitan's trainer does not have."""


def not_saved(why: str) -> CheckpointException:
    """Return the exception of torch.distributed.checkpoint for a failure that all ranks of the group know of."""
    return CheckpointException(why, {0: (RuntimeError(why), traceback.StackSummary())})


class DiskCheckpoints:
    """Loads and saves one rank's part of the run's checkpoints.

    Args:
        trainer: an `EverstepTrainer` that has built torchtitan's checkpoint manager, which also saves its counters.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._config = trainer, trainer.config.checkpoint
        self._manager: Any = trainer.checkpointer
        self._events, self._files = trainer.context.events, trainer.context.files
        self.states: dict[str, Any] = self._manager.states if self._config.enable else {}
        """Name -> `Stateful`: what a checkpoint consists of."""
        self.choice = Choice(self._config, trainer.context.run_dir)
        self._damaged: dict[int, str] = {}
        """Step -> what to say of its checkpoint, which has a damaged file and is left out."""

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint that training can resume from, else of the newest one, as the last
        checkpoint of a run may have the model only. None if there is none."""
        if not self._config.enable or not isinstance(self._manager, CheckpointManager):
            return None
        if filesystem.is_remote(self._manager.folder):
            newest = private.newest_checkpoint(self._manager)
            return newest if newest >= 0 else None
        place = Path(self._manager.folder)
        found = sorted((checkpoints_in(place) | checkpoints_in(place, HF_INDEX)).items(), reverse=True)
        found = [(step, folder) for step, folder in found if step not in self._damaged]
        whole = (step for step, folder in found if not self.choice.why_not(step, folder, tensors_in(folder)))
        return next(whole, found[0][0] if found else None)

    def _to_load(self) -> tuple[int, Path | None]:
        """Return the step and folder of the checkpoint to load. The step is -1 if the run has none of its own. The
        folder is None if there is no checkpoint, it is not local, or only a model is loaded."""
        step = self.choice.load_step
        if not self._config.enable or not isinstance(self._manager, CheckpointManager):
            return step, None
        if step == -1 and (newest := self.newest()) is not None:
            step = newest
        initial = None if self._config.initial_load_model_only else self._config.initial_load_path
        folder = Path(self._manager.folder) / f"step-{step}" if step != -1 else initial
        files = (".metadata", HF_INDEX) if step != -1 else (".metadata",)
        return step, Path(folder) if folder and any((Path(folder) / file).exists() for file in files) else None

    def leave_out_damaged(self) -> bool:
        """Find the newest checkpoints with a damaged file. They are left out from now on, as their steps can be made
        again. Return whether there are any. Raises OSError if the damaged one was asked for. A collective of the
        group."""
        self._damaged.clear()
        step, folder = self._to_load()
        while file := damaged_file(folder):
            why = f"{folder} is damaged: {file} is not what was written. To go on, {remedy(step)}"
            if step in (-1, self.choice.begun) or self.choice.load_step != -1:
                raise OSError(why)
            self._damaged[step] = why
            step, folder = self._to_load()
        return bool(self._damaged)

    def load(self) -> bool:
        """Load the checkpoint that `[checkpoint]` names, or the newest. Return whether there was one. Of our keys it
        loads those that the checkpoint has, as torchtitan's own checkpoints lack some. Raises TrainerEnds if training
        cannot resume from it (it may have the model only), ValueError for other data, and OSError if it is damaged, or
        all others are."""
        step, folder = self._to_load()
        if self._damaged and self.newest() is None:
            raise OSError(self._damaged[max(self._damaged)])
        source: SlotSource = self._trainer.dataloader
        if folder is not None:
            keys = tensors_in(folder)
            self._trainer.own_keys = {key for key in OURS if f"{TRAIN_STATE}.{key}" in keys}
            source.saved_ranks = [int(found[1]) for found in map(OF_RANK.fullmatch, keys) if found is not None]
            self._require(step, folder, keys)
            if WORKERS not in self.states and (workers := workers_in(folder)) and dist.get_rank() == 0:
                text = f"the states of {len(workers)} workers in {folder} are left out: [semi_sync] is not enabled"
                self._events.emit("warning", text=text)
            self._tell_newer(step)
        self._manager.exclude_from_loading = self.choice.excluded(step)
        try:
            found = self._manager.load(step=step)
        except CheckpointException as error:
            where = folder or (self._config.initial_load_path if step == -1 else f"{self._manager.folder}/step-{step}")
            raise OSError(f"{where} cannot be read: {cause_of(error)}. To go on, {remedy(step)}") from None
        self._trainer.own_keys, source.saved_ranks = OURS, ()
        if found:
            self._tell_other_run(step)
        return bool(found)

    def _tell_other_run(self, step: int) -> None:
        """Warn if another run wrote the loaded checkpoint, as a folder outside of the run directory may have those of
        several. Before a step that was chosen, the run itself had another id."""
        told, run_dir = self._trainer.data_told.partition(" ")[0], self._trainer.context.run_dir.resolve()
        path = Path(self._manager.folder) / f"step-{step}"
        chosen = step == -1 or (self.choice.begun is not None and step <= self.choice.begun)
        if not told or told == run_id(self._trainer.context.token) or chosen or path.resolve().is_relative_to(run_dir):
            return
        if dist.get_rank() == 0:
            text = (
                f"this run trains on from another run's checkpoint, {path}; to begin anew, give it a folder of its own"
            )
            self._events.emit("warning", text=f"[checkpoint] {text}")

    def _tell_newer(self, step: int) -> None:
        """Warn of newer checkpoints that are skipped because they are damaged or have the model only."""
        place = Path(self._manager.folder)
        found = checkpoints_in(place) | checkpoints_in(place, HF_INDEX)
        newer = {path: has_model_only(path) for at, path in sorted(found.items()) if at > step}
        if not newer or self.choice.load_step != -1 or dist.get_rank() != 0:
            return
        bad = [found[at] for at in sorted(self._damaged)]
        models = [str(path) for path, is_model in newer.items() if is_model and path not in bad]
        damaged = [str(path) for path in newer if path in bad or not (newer[path] or tensors_in(path))]
        if damaged:
            text = f"the run goes on from step {step}, as files of {', '.join(damaged)} are damaged"
            self._events.emit("warning", text=text)
        if models:
            text = (
                f"the run goes on from step {step} and makes later steps again, as {', '.join(models)} has the model "
                "only ([checkpoint] last_save_model_only). It is renamed to abandoned-… when its step is saved again"
            )
            self._events.emit("warning", text=text)

    def _require(self, step: int, folder: Path, keys: Collection[str]) -> None:
        """Raise TrainerEnds if a checkpoint lacks something that torchtitan would load from it."""
        why = self.choice.why_not(step, folder, keys)
        position = {f"{DATALOADER}.{key}" for key in self._trainer.dataloader.state_dict()}
        reads_data = step and DATALOADER not in self._config.exclude_from_loading
        if not why and reads_data and not position.issubset(keys):
            why = (
                "has no position for the data of this [data] source: to read the data from its beginning, set "
                '[checkpoint] exclude_from_loading = ["dataloader"]'
            )
        if why:
            raise TrainerEnds(USAGE_EXIT, f"{folder} {why}")

    # The workers' own states in a semi-synchronous run

    def workers_to_load(self) -> int:
        """Return how many workers have their own states in the checkpoint that will be loaded."""
        folder = self._to_load()[1]
        return len(workers_in(folder)) if folder else 0

    def rounds_to_load(self) -> str:
        """Return `SemiSync.needs` of the run that wrote the checkpoint that will be loaded; "" if it does not say."""
        key, folder = f"{TRAIN_STATE}.{ROUNDS}", self._to_load()[1]
        told = {key: ""}
        return told[key] if folder and key in tensors_in(folder) and self.read(folder, told) else ""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is written after this step, if it is not the last."""
        return self._config.enable and private.saves_after(self._manager, step)

    def workers(self, step: int, history: int) -> dict[int, Path]:
        """Return worker -> folder of its own state after this step of this history, for the workers of which a
        checkpoint has it, be it complete or still being written."""
        if not self._config.enable:
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
        return (told[f"{TRAIN_STATE}.{HISTORY}"] or ledger.next_history(0, step, "restored")) == history

    def require_whole(self, step: int, history: int) -> None:
        """Raise OSError unless there is a complete checkpoint after this step of this history. Waits for it
        up to NAMING_S, as another group may be just renaming it. A collective of the group."""
        folder, end = Path(self._manager.folder) / f"step-{step}", time.monotonic() + NAMING_S
        while not (found := self._is_of(folder, step, history)) and time.monotonic() < end:
            time.sleep(POLL_S)
        if not all_in_group(found):
            raise OSError(f"the last checkpoint is not complete: {folder} lacks the states of some workers")

    def read(self, folder: Path, into: dict[str, Any]) -> bool:
        """Load this rank's part of some entries of a checkpoint. Return False, with a warning, if that fails."""
        try:
            read_alone(folder, into)
        except OSError as error:
            logger.warning(str(error))
            return False
        return True

    def save(self, step: int, commit: int, *, last: bool = False, part: dict[str, torch.Tensor] | None = None) -> None:
        """Write a checkpoint of this step if one is due, or a `part` of it. If it fails, on a full disk for instance,
        training goes on, but for the `last` one, of the run or of this start of it, OSError is raised. `commit` is the
        number for events."""
        self._files.beat("checkpoint", commit)
        if last and self._trainer.should_continue_training():  # to resume, the run needs more than the model
            self._manager.last_save_model_only = self._manager.last_save_in_hf = False
        is_part = WORKERS in self.states and (not last or self.saves_all())  # `Parts.on_complete` tells of the last
        tell = functools.partial(self._tell, step, commit, time.monotonic(), is_part)
        try:
            saved = self._manager.save(step, last_step=last) if part is None else self._save_part(step, part, last)
        except CheckpointException as error:  # the same on all ranks of the group
            if last:
                reason = f"{cause_of(error)}{_room(self._manager.folder)}"
                raise OSError(f"the last checkpoint was not written to {self._manager.folder}: {reason}") from None
            tell(error)
            return
        begun = self._manager.save_future if saved else None  # a manager that saves nothing lacks the attribute
        if begun is not None:  # replaced by a future that does not fail, so that a wait for it does not raise
            self._manager.save_future = _then(begun, lambda done: tell(done.exception()))
        elif saved:
            tell(None)

    def _tell(self, step: int, commit: int, begin: float, is_part: bool, error: BaseException | None) -> None:
        """Tell in events that a checkpoint was written, or that it or its part failed; not that a part was written."""
        if error is None:
            if not is_part:
                self._events.emit("checkpoint_saved", commit, took_s=round(time.monotonic() - begin, 3))
            return
        folder = str(self._manager.folder)
        reason = f"it cannot be written to {folder}: {cause_of(error)}{_room(folder)}"
        logger.warning(f"The checkpoint of step {step} is missing: {reason}. Training goes on.")
        self._events.emit("checkpoint_failed", commit, reason=reason)
        remove_incomplete(Path(folder), step)

    def _save_part(self, step: int, part: dict[str, torch.Tensor], last: bool) -> bool:
        manager = self._manager
        manager.maybe_wait_for_saving()
        # The part is in host memory already, so it needs no staging in page-locked memory.
        at_once = last or manager.async_mode == "disabled"
        mode = type(manager.async_mode)("disabled" if at_once else "async")
        begun = manager.dcp_save({WORKERS: part}, str(Path(manager.folder) / f"step-{step}"), mode)
        manager.save_future = None if at_once else begun
        return True

    def saves_all(self) -> bool:
        """Return whether the last checkpoint has more than the model."""
        if not self._config.enable or self._config.load_only:
            return False
        return self._trainer.should_continue_training() or not getattr(self._manager, "last_save_model_only", True)


def _room(folder: str) -> str:
    """Return a folder's free space in words, as torch's errors do not name a full disk; "" if it is not known."""
    try:
        return f" ({shutil.disk_usage(folder).free / 2**30:.2f} GiB free there without it)"
    except OSError:  # object storage
        return ""


def save_via_draft(manager: Any, writer: str, life: str, parts: Parts | None = None) -> None:
    """Have torchtitan's checkpoint manager write to a temporary folder, and rename that once a checkpoint is complete.
    A group that is killed while it writes then leaves nothing that could be taken for a checkpoint, and two groups that
    write the same step, in two histories, do not mix their files. Other managers and remote folders stay as they are.

    Args:
        writer: part of the temporary folder's name: the group and the run, as runs may share a checkpoint folder.
        life: another part of it, new after every start of the group. Folders that earlier starts of the group have left
            are removed; a checkpoint that was being replaced gets its name back.
        parts: collects the parts of a semi-synchronous run, which refuses other managers (TrainerEnds); else None.
    """
    if type(manager) is not CheckpointManager or not manager.enable or filesystem.is_remote(manager.folder):
        if parts is not None and manager.enable:
            why = "[semi_sync]: checkpoints need torchtitan's own manager and a checkpoint.folder on a file system"
            raise TrainerEnds(USAGE_EXIT, why)
        return
    write_checksums()
    prefix, is_first, save = f"{DRAFT}{writer}-", dist.get_rank() == 0, type(manager).dcp_save
    for left in Path(manager.folder).glob(f"{prefix}*") if is_first else ():
        clear_draft(left)

    def save_draft(state_dict: Any, checkpoint_id: str, *args: Any, **kwargs: Any) -> Any:
        target = Path(checkpoint_id)
        draft, put = target.with_name(prefix + life), functools.partial(put_in_place, target=target)
        if parts is not None and WORKERS in state_dict:
            folder, name = parts.folder(target), FIRST
            if TRAIN_STATE not in state_dict:
                draft = target.with_name(f"{draft.name}-{min(int(own.split('.')[1]) for own in state_dict[WORKERS])}")
                name = f"{folder.name}-{draft.name}"
            put = functools.partial(parts.add_part, folder=folder, name=name, target=target)
        rename = functools.partial(put, draft) if is_first else lambda: None

        def rename_once_done(done: Future) -> None:
            with _removed_if_failed(draft):
                done.result()
                rename()

        with _removed_if_failed(draft):
            begun = save(manager, state_dict, str(draft), *args, **kwargs)
        if isinstance(begun, AsyncSaveResponse):
            return dataclasses.replace(begun, upload_completion=_then(begun.upload_completion, rename_once_done))
        if isinstance(begun, Future):
            return _then(begun, rename_once_done)
        dist.barrier()  # in Hugging Face's format, other ranks may still combine files
        error = ""
        try:
            rename()
        except OSError as failed:
            error = str(failed)
        if sum_in_group(bool(error)):
            raise not_saved(error or f"the written checkpoint could not be renamed to {target}")
        return begun

    replace(manager, "dcp_save", save_draft)


@contextlib.contextmanager
def _removed_if_failed(draft: Path) -> Iterator[None]:
    """Remove what was written if the body fails. It may fill the disk that the run directory needs too."""
    try:
        yield
    except BaseException:  # CheckpointException is one
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _then(begun: Future, act: Callable[[Future], None]) -> Future:
    """Return a future with the result, or error, of `act`, which is called with `begun` once that is done."""
    ended: Future = Future()

    def end(done: Future) -> None:
        try:
            ended.set_result(act(done))
        except BaseException as error:  # noqa: BLE001  CheckpointException is a BaseException; the waiter gets it
            ended.set_exception(error)

    begun.add_done_callback(end)
    return ended
