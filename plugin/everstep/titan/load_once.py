"""`[checkpoint] load_step` and `exclude_from_loading` choose what a run goes on from. It does so once.

If all groups die later, they must go on from the newest state, and not make the steps since the chosen one again. So
the first commit after such a load is recorded in the run directory, in state/loaded.json. A later start with the same
settings ignores them. After a start with others, or if a user removes the file, they apply again.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.tools import filesystem

from everstep.run.events import EventLog
from everstep.run.files import read_json, write_json
from everstep.titan.group import all_in_group
from everstep.titan.names import DATALOADER
from everstep.titan.parts import checkpoints_in


class LoadOnce:
    """What the settings still ask of one rank.

    Args:
        config: `[checkpoint]`.
        folder: of the run's checkpoints.
    """

    def __init__(self, config: Any, folder: str, run_dir: Path, events: EventLog) -> None:
        self._config, self._folder, self._events = config, folder, events
        self._record = run_dir / "state" / "loaded.json"
        self._asked = {"load_step": config.load_step, "exclude_from_loading": sorted(config.exclude_from_loading)}
        chooses = config.load_step != -1 or {*config.exclude_from_loading} - {DATALOADER}
        self._asks = config.enable and bool(chooses)
        self._begun: int | None = None
        """Step of the checkpoint from which the run has gone on as asked, -1 for an initial one; None if it has not."""
        self._restored = False
        """Whether a state was restored and no step committed since."""
        self.loaded = -1
        """Step of the run's checkpoint that was loaded; -1 for none or an initial one."""

    def look(self) -> None:
        """Read the record, before a state is restored. A collective of the group."""
        record = read_json(self._record)
        begun = record.pop("from", None)
        self._begun = begun if all_in_group(self._asks and record == self._asked) else None
        self._restored = True
        if self._begun is not None and dist.get_rank() == 0:
            text = f"they apply once, and the run goes on from its newest state; to apply them again, rm {self._record}"
            self._events.emit("warning", text=f"[checkpoint] load_step and exclude_from_loading: {text}")

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint has to be loaded, even if there is a newer state in memory."""
        return self._asks and self._begun is None

    @property
    def load_step(self) -> int:
        return -1 if self._begun is not None else self._config.load_step

    def excluded(self, step: int) -> list[str]:
        """Return what is not loaded from the checkpoint of this step (-1: an initial one). That the data begins anew
        only once is ensured otherwise (`EverstepTrainer.data`)."""
        applies = self._begun is None or step <= self._begun
        return [key for key in self._config.exclude_from_loading if applies or key == DATALOADER]

    def committed(self, history: int) -> None:
        """Note that the run goes on from the restored state, now with this history. Every group that restored it does
        this, as each may die here."""
        restored, self._restored = self._restored, False
        if not restored or self._begun is not None or dist.get_rank() or filesystem.is_remote(self._folder):
            return
        told = self._asked | {"from": self.loaded}
        try:
            if not self._asks:
                self._record.unlink(missing_ok=True)
            elif read_json(self._record) != told:
                self._set_aside(history)
                write_json(self._record, told)
        except OSError as error:
            text = f"{self._record} cannot be written: if all groups die, [checkpoint] applies again: {error}"
            self._events.emit("warning", text=text)

    def _set_aside(self, history: int) -> None:
        """Rename checkpoints that are newer than the chosen one, and so not of this history's past."""
        newer = {step: path for step, path in checkpoints_in(Path(self._folder)).items() if step > self.loaded}
        for step, path in newer.items() if self._config.load_step != -1 else ():
            aside = path.with_name(f"abandoned-{step}-{history:x}")
            with contextlib.suppress(FileNotFoundError):  # another group was faster
                path.rename(aside)
                self._events.emit(
                    "warning", text=f"{path} is newer than [checkpoint] load_step: it is now {aside.name}"
                )
