"""Curves of a run for TensorBoard and W&B: one continuous run, a point for each committed step, whoever made it.

Written by whoever follows the run's events, not by the trainers, so a group that dies takes no curve with it.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

SCALARS = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens": "tokens",
    "took_s": "time_metrics/end_to_end(s)",
}
"""Fields of `commit` events, with torchtitan's names for them."""


class Sink(Protocol):
    """Where points go."""

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None: ...

    def rewind(self, step: int, t: float) -> None:
        """The run went back: what was written from `step` on is void."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files below RUN_DIR/tb; each start of the follower adds one."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        messages: Any = event_pb2
        self._event, self._session = messages.Event, messages.SessionLog
        summaries: Any = summary_pb2
        self._summary = summaries.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder), flush_secs=10)

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=t, step=step, summary=self._summary(value=values)))

    def rewind(self, step: int, t: float) -> None:
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=t, step=step, session_log=start))

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run per run directory, resumed by its id. Project, entity and mode come from W&B's environment."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        import wandb

        self._run = wandb.init(
            project="everstep", id=run_id, name=run_dir.name, dir=str(run_dir), resume="allow", reinit="finish_previous"
        )

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def rewind(self, step: int, t: float) -> None:
        """W&B's steps only grow: steps that are committed again are left out until the run is past them."""

    def close(self) -> None:
        self._run.finish()


class Scalars:
    """Writes each committed step once. What has been written is remembered in the run directory."""

    def __init__(self, run_dir: Path, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._note = Path(run_dir) / "state" / "scalars.json"
        self._written = int(json.loads(self._note.read_text())["step"]) if self._note.exists() else 0

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events, in order."""
        before = self._written
        for event in events:
            if event["kind"] == "training_started" and event.get("source") in ("disk", "memory", "fresh"):
                self._rewind(event["step"], event["t"])
            elif event["kind"] == "commit" and event["step"] > self._written:
                scalars = {tag: float(event[field]) for field, tag in SCALARS.items() if event.get(field) is not None}
                for sink in self._sinks:
                    sink.write(event["step"], event["t"], scalars)
                self._written = event["step"]
        if self._written != before:
            draft = self._note.with_suffix(".tmp")
            draft.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps({"step": self._written, "t": time.time()}))
            draft.replace(self._note)

    def _rewind(self, step: int, t: float) -> None:
        if step <= self._written:
            for sink in self._sinks:
                sink.rewind(step, t)
            self._written = step - 1

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
