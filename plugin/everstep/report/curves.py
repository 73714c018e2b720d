"""Curves of a run for TensorBoard and W&B: one continuous run, with one point for each committed step.

The process that follows the run's events writes them, not the trainers, so no curve ends when a group dies. Each start
of the run writes its own steps. If that process is killed and started again, it writes the points of this start once
more: TensorBoard draws them over each other, and W&B leaves them out.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

SCALARS = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens": "tokens",
    "took_s": "time_metrics/end_to_end(s)",
}
"""Fields of `commit` events -> torchtitan's names for them. What else torchtitan measures on the rank that emits the
event is in its field `metrics`, under torchtitan's names."""
FLUSH_S = 2
RETRY_S = 60.0
"""Seconds without points after a writer failed, for instance on a full disk."""
CLOSE_S = 8.0
"""Seconds for which `Curves.close` waits for the last points."""
VALIDATION_LOSS = "validation_metrics/loss"


class TensorBoard:
    """Writes TensorBoard event files into one folder. Each start of the process adds a file."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009  defined at run time
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._events.Event(wall_time=t, step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Writes one W&B run per run directory, resumed by its id. W&B's environment variables set team, project, name and
    mode, as in torchtitan. W&B's steps only grow: after the run went back to an older state, steps that are committed
    again are left out. TensorBoard gets them too; the curves look the same, as the batches were the same."""

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
        if step >= self._step:  # a step can be added to until the next one begins
            self._run.log(scalars, step=step)
            self._step = step

    def close(self) -> None:
        self._run.finish()


class Curves:
    """Writes the curves that torchtitan's `[metrics]` asks for, in a thread, as W&B's server may be away and a disk
    full. Writers are opened with the first point."""

    def __init__(self, run_dir: Path, metrics: Mapping[str, Any]) -> None:
        self._run_dir, self._folder = run_dir, run_dir / metrics.get("save_tb_folder", "tb")
        self._asked = [name for name in ("tensorboard", "wandb") if metrics.get(f"enable_{name}")]
        self._sinks: dict[str, TensorBoard | WandB] = {}
        self._again_mono: dict[str, float] = {}
        """Monotonic seconds before which a writer that failed is not opened again."""
        self._thread = ThreadPoolExecutor(1)

    def put(self, step: int, t: float, scalars: dict[str, float]) -> None:
        """Write the points (tag -> value) of one step and wall time, in seconds, after those before them."""
        self._thread.submit(self._write, step, t, scalars)

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        wait([self._thread.submit(self._close)], CLOSE_S)

    def _write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        for name in [*self._asked]:
            if time.monotonic() < self._again_mono.get(name, 0.0):
                continue
            try:
                if name not in self._sinks:
                    self._sinks[name] = TensorBoard(self._folder) if name == "tensorboard" else WandB(self._run_dir)
                self._sinks[name].write(step, t, scalars)
            except Exception as error:  # noqa: BLE001  packages and networks can raise anything
                print(f"everstep: cannot write to {name}: {type(error).__name__}: {error}", flush=True)
                opened = self._sinks.pop(name, None)
                self._again_mono[name] = time.monotonic() + RETRY_S
                # W&B may take minutes to fail again, for which TensorBoard would wait.
                if isinstance(error, ImportError) or (opened is None and name == "wandb"):
                    self._asked.remove(name)

    def _close(self) -> None:
        for sink in self._sinks.values():
            with contextlib.suppress(Exception):  # such as of a full disk: the others are closed as well
                sink.close()


def scalars_of(event: dict[str, Any]) -> dict[str, float]:
    """Return tag -> value of the points for a `validation` event, or for the first `commit` event of a commit."""
    if event["kind"] == "validation":
        return {VALIDATION_LOSS: float(event["loss"])}
    scalars = {tag: float(value) for tag, value in event.get("metrics", {}).items()}
    return scalars | {tag: float(event[field]) for field, tag in SCALARS.items() if event.get(field) is not None}
