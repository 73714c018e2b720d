"""`[checkpoint] load_step` and `exclude_from_loading` choose what a run goes on from. It does so once.

If all groups die later, they must go on from the newest state, and not make the steps since the chosen one again. So
`choose`, while nothing of the run lives, makes the chosen checkpoint the run's newest state, and records that in
state/loaded.json. From then on groups load the newest state, and what `exclude_from_loading` names is left out of that
checkpoint alone. A start with other settings chooses anew.

Without a launcher (torchrun) nothing is chosen: as in torchtitan, both apply whenever all groups start.
"""

import contextlib
import re
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

from torchtitan.tools import filesystem

from everstep.config.errors import ConfigError
from everstep.run.directory import finished_file, finished_step, loaded_file
from everstep.run.files import read_json, write_json
from everstep.run.token import new_token, run_token
from everstep.snapshot.recovery import ask_keepers
from everstep.snapshot.segment import run_id
from everstep.titan.names import DATALOADER, TRAIN_STATE
from everstep.titan.parts import DRAFT, HF_INDEX, aside, clear_draft, remedy, tensors_in

ANSWER_S = 10.0
"""Seconds to wait for a keeper's answer."""


class Choice:
    """What `[checkpoint]`, here `config`, says of the next checkpoint to load."""

    def __init__(self, config: Any, run_dir: Path) -> None:
        self._config = config
        self.record = loaded_file(run_dir)
        self.asked = {"load_step": config.load_step, "exclude_from_loading": sorted(config.exclude_from_loading)}
        self.leaves_out = {*config.exclude_from_loading} - {DATALOADER}
        """What is left out once. That the data begins anew only once is ensured otherwise (`EverstepTrainer.data`)."""
        record = read_json(self.record)
        begun = record.pop("from", None)
        self.begun: int | None = begun if record == self.asked else None
        """Step of the checkpoint that was chosen so, -1 for an initial one; None if none was."""

    @property
    def asks(self) -> bool:
        """Whether it asks for something that has not been done."""
        return self._config.enable and self.begun is None and (self._config.load_step != -1 or bool(self.leaves_out))

    @property
    def load_step(self) -> int:
        return self._config.load_step if self.begun is None else -1

    def excluded(self, step: int) -> list[str]:
        """Return what is not loaded from the checkpoint of this step (-1: an initial one)."""
        applies = self.begun is None or step <= self.begun
        return [key for key in self._config.exclude_from_loading if applies or key == DATALOADER]

    def why_not(self, step: int, folder: Path, keys: Collection[str]) -> str:
        """Return why training cannot go on from the checkpoint of this step with these keys, and what to do; "" if it
        can: it has what torchtitan loads, the model, and after step 0 the counters too."""
        if keys and (step == 0 or TRAIN_STATE in self.excluded(step) or f"{TRAIN_STATE}.step" in keys):
            return ""
        if keys or (folder / HF_INDEX).exists():
            return (
                "has the model only ([checkpoint] last_save_model_only), and training cannot go on from it: set "
                "[checkpoint] load_step to an older one, or begin another run with initial_load_path"
            )
        state = "a damaged" if (folder / ".metadata").exists() else "no"
        return f"has {state} .metadata: {remedy(step)}"


def choose(config: Any, run_dir: Path) -> list[str]:
    """Do what `[checkpoint]`, here `config`, asks for, unless that was done; return in sentences what became of other
    checkpoints. Nothing of the run may live.

    Raises:
        ConfigError: there is no such checkpoint, or steps would be lost that were not meant.
    """
    choice = Choice(config, run_dir)
    if not choice.asks:
        if choice.begun is None:
            choice.record.unlink(missing_ok=True)
        return []
    folder = config.folder if filesystem.is_remote(config.folder) else str(run_dir / config.folder)
    # The groups of a run with another token will not know them.
    for left in Path(folder).glob(f"{DRAFT}*-{run_id(run_token(run_dir))}-*"):
        clear_draft(left)
    names = filesystem.listdir(folder) if filesystem.isdir(folder) else []
    steps = {int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name))}
    chosen = config.load_step if config.load_step != -1 else max(steps, default=-1)
    newer = sorted(step for step in steps if step > chosen)
    there = f"[checkpoint] load_step = {chosen}: {folder}"
    if config.load_step != -1 and chosen not in steps:
        only = f"step-{chosen}, only {', '.join(f'step-{step}' for step in sorted(steps))}" if steps else "checkpoints"
        raise ConfigError(f"{there} has no {only}")
    if config.load_step != -1 and not filesystem.is_remote(folder):
        path = Path(folder) / f"step-{chosen}"
        why = choice.why_not(chosen, path, tensors_in(path))
        if why:
            raise ConfigError(f"{there}/{path.name} {why}")
    if newer and filesystem.is_remote(folder):
        raise ConfigError(
            f"{there} has newer checkpoints: move {', '.join(f'step-{step}' for step in newer)} out of it"
        )
    if chosen != -1 and TRAIN_STATE in choice.leaves_out:
        raise ConfigError(
            f"[checkpoint] exclude_from_loading: without {TRAIN_STATE} the run would begin at step 1 beside its own "
            "checkpoints: begin another run, with initial_load_path"
        )
    if config.load_step == -1:
        _refuse_to_lose(run_dir, chosen)
    else:
        new_token(run_dir)  # snapshots in memory are of another run now
        if finished_step(run_dir) > chosen:  # or groups would take the run for over and make no step
            write_json(finished_file(run_dir), {"step": chosen, "for_all": False})
    said = []
    for step in newer:
        path = Path(folder) / f"step-{step}"
        said.append(f"{path} is newer than [checkpoint] load_step: it is now {path.rename(aside(path)).name}")
    write_json(choice.record, choice.asked | {"from": chosen})
    return said


def _refuse_to_lose(run_dir: Path, chosen: int) -> None:
    """Raise ConfigError if a newer state than that of step `chosen` is in the memory of hosts."""
    with contextlib.suppress(OSError):  # there is no token, so no run yet
        found = ask_keepers(run_dir, timeout=timedelta(seconds=ANSWER_S), patience=timedelta(0), adopts=True)
        if found.from_memory and found.step > chosen:
            disk = f"step {chosen}, the newest checkpoint" if chosen != -1 else "the beginning: there is no checkpoint"
            raise ConfigError(
                f"[checkpoint] exclude_from_loading would lose steps: memory has the state of step {found.step}, and "
                f"the run would go on from {disk}. Start it without this key and stop it, which writes a checkpoint"
            )
