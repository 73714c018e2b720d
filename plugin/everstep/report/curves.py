"""Curves of a run for TensorBoard and W&B: one continuous run, a point for each committed step, whoever made it.

Written by whoever follows the run's events, not by the trainers, so a group that dies takes no curve with it. Each
start of the run writes its own steps. A follower that was killed is started again and writes those once more:
the same points, which TensorBoard draws over each other and W&B leaves out.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.report.notify import Outlet

SCALARS = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens": "tokens",
    "took_s": "time_metrics/end_to_end(s)",
}
"""Fields of `commit` events, with torchtitan's names for them. What else torchtitan measures, of the rank that told of
the commit, is in its field `metrics` by those names."""
FLUSH_S = 2
VALIDATION_LOSS = "validation_metrics/loss"


class TensorBoard:
    """Event files in one folder; each start of the follower adds one."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009  made at run time
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._events.Event(wall_time=t, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run per run directory, resumed by its id. Team, project, name and mode come from W&B's environment, as in
    torchtitan. W&B's steps only grow: when the run goes back, steps that are committed again are left out until it is
    past them. TensorBoard has both, the same to the eye, as they had the same batches.
    """

    def __init__(self, run_dir: Path) -> None:
        import wandb

        self._run = wandb.init(
            entity=os.environ.get("WANDB_TEAM"),
            project=os.environ.get("WANDB_PROJECT", "everstep"),
            name=os.environ.get("WANDB_RUN_NAME", run_dir.name),
            id=hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=6).hexdigest(),
            dir=str(run_dir),
            resume="allow",
            reinit="finish_previous",
        )
        self._step = self._run.starting_step - 1

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        if step >= self._step:  # W&B keeps a step open until the next one
            self._run.log(scalars, step=step)
            self._step = step

    def close(self) -> None:
        self._run.finish()


class Curves(Outlet):
    """What torchtitan's `[metrics]` asks for, opened with the first point: step, wall time in seconds, and scalars by
    tag. A server of W&B may be away, and a disk may be full."""

    def __init__(self, run_dir: Path, metrics: Mapping[str, Any]) -> None:
        self._run_dir, self._folder = run_dir, run_dir / metrics.get("save_tb_folder", "tb")
        self._asked = [name for name in ("tensorboard", "wandb") if metrics.get(f"enable_{name}")]
        self._sinks: dict[str, TensorBoard | WandB] = {}
        super().__init__()

    def give(self, thing: tuple[int, float, dict[str, float]]) -> None:
        for name in [*self._asked]:
            try:
                if name not in self._sinks:
                    self._sinks[name] = TensorBoard(self._folder) if name == "tensorboard" else WandB(self._run_dir)
                self._sinks[name].write(*thing)
            except Exception as error:  # noqa: BLE001  a package, a network
                print(f"everstep: nothing goes to {name}: {type(error).__name__}: {error}", flush=True)
                if self._sinks.pop(name, None) is None:  # it cannot be opened
                    self._asked.remove(name)

    def end(self) -> None:
        for sink in self._sinks.values():
            sink.close()


def scalars_of(event: dict[str, Any]) -> dict[str, float]:
    """What is drawn of a validation, or of a commit that is heard of first."""
    if event["kind"] == "validation":
        return {VALIDATION_LOSS: float(event["loss"])}
    scalars = {tag: float(value) for tag, value in event.get("metrics", {}).items()}
    return scalars | {tag: float(event[field]) for field, tag in SCALARS.items() if event.get(field) is not None}
