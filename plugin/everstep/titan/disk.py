"""A trainer's checkpoints on disk: which one a run goes on from, and when one is written."""

import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.tools.logging import logger

from everstep.titan import private
from everstep.titan.names import TRAIN_STATE, BaseCheckpointManager, CheckpointManager

HISTORY = "history"
DATA_BEGAN = "data_began_after"
DATA = "data"
PARAMETERS = "parameters"
OURS = frozenset((HISTORY, DATA_BEGAN, DATA, PARAMETERS))
"""What a trainer's counters have besides torchtitan's."""


class DiskCheckpoints:
    """One rank's part in the run's checkpoints.

    Args:
        trainer: an `EverstepTrainer`, which has built torchtitan's manager, and whose counters are in a checkpoint.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._config = trainer, trainer.config.checkpoint
        self._manager: BaseCheckpointManager = trainer.checkpointer
        self._events, self._files = trainer.place.events, trainer.place.files
        # pyrefly: ignore[missing-attribute] every manager of torchtitan has states, if it is enabled
        self.states: dict[str, Any] = self._manager.states if self._config.enable else {}
        """What a checkpoint is made of, by name: `Stateful`s."""

    def newest(self) -> int | None:
        """The newest checkpoint that torchtitan would load."""
        if not self._config.enable or not isinstance(self._manager, CheckpointManager):
            return None
        step = private.newest_checkpoint(self._manager)
        return step if step >= 0 else None

    def keys(self) -> Collection[str] | None:
        """What the checkpoint that is going to be loaded has. None: there is none, or one in another format."""
        if not self._config.enable or not isinstance(self._manager, CheckpointManager):
            return None
        step = self.newest() if self._config.load_step == -1 else self._config.load_step
        initial = None if self._config.initial_load_model_only else self._config.initial_load_path
        folder = Path(self._manager.folder) / f"step-{step}" if step is not None else initial
        if not folder or not (Path(folder) / ".metadata").exists():
            return None
        return FileSystemReader(folder).read_metadata().state_dict_metadata

    def load(self) -> bool:
        """Load the checkpoint that `[checkpoint]` names, or the newest; whether there was one. torchtitan's own lack
        some of our keys, and a key that is not there cannot be loaded."""
        keys = self.keys()
        if keys is not None:
            self._trainer.own_keys = {key for key in OURS if f"{TRAIN_STATE}.{key}" in keys}
        found = self._manager.load(step=self._config.load_step)
        self._trainer.own_keys = OURS
        return bool(found)

    def save(self, step: int, commit: int, *, last: bool = False) -> None:
        """Write a checkpoint of this step if one is due. A folder without room stops nothing but the last one.
        `commit`: for events."""
        self._files.beat("checkpoint", commit)
        begin = time.monotonic()
        try:
            saved = self._manager.save(step, last_step=last)
        except CheckpointException as error:  # the same on all ranks of the group
            if last:
                raise
            why, _ = next(iter(error.failures.values()))
            reason = f"{type(why).__name__}: {why}{_room(str(self._config.folder))}"
            logger.warning(f"No checkpoint in {self._config.folder} of step {step}: {reason}. Training goes on.")
            self._events.emit("checkpoint_failed", commit, reason=reason, folder=str(self._config.folder))
            # pyrefly: ignore[missing-attribute]
            self._manager.save_future = None
            return
        if saved:
            self._events.emit("checkpoint_saved", commit, took_s=round(time.monotonic() - begin, 3))

    def save_last(self, step: int, commit: int, *, goes_on: bool) -> None:
        """The last checkpoint of the run, or if it `goes_on` one day, of this part of it."""
        if goes_on and self._config.enable:
            # The optimizer has to be in it.
            # pyrefly: ignore[missing-attribute] the base class has it in its Config only
            self._manager.last_save_model_only = False
            # pyrefly: ignore[missing-attribute]
            self._manager.last_save_in_hf = False
        self.save(step, commit, last=True)


def _room(folder: str) -> str:
    """How much room a folder has, in words: torch's errors of a full disk do not name it. "" where nobody can say."""
    try:
        return f" ({shutil.disk_usage(folder).free / 2**30:.2f} GiB free there)"
    except OSError:  # object storage
        return ""
