"""Curves of a run for TensorBoard and W&B: one continuous run, a point for each committed step, whoever made it.

Written by whoever follows the run's events, not by the trainers, so a group that dies takes no curve with it. The
follower may die as well: each sink knows up to when it has been written, and the next follower goes on there.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from everstep.report.once import Commits

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

    until: float
    """Wall time in seconds of the newest commit that was in it when it was opened."""

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None: ...

    def rewind(self, step: int, t: float) -> None:
        """The run went back: what was written from `step` on is void."""

    def flush(self) -> None:
        """What was written outlives this process from here on."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in one folder; each start of the follower adds one, which goes on where the last one ended."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        messages: Any = event_pb2
        self._event, self._session = messages.Event, messages.SessionLog
        summaries: Any = summary_pb2
        self._summary = summaries.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self.until = _newest_point(folder)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=t, step=step, summary=self._summary(value=values)))

    def rewind(self, step: int, t: float) -> None:
        start = self._session(status=self._session.START)
        self._writer.add_event(self._event(wall_time=t, step=step, session_log=start))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _newest_point(folder: Path) -> float:
    """Wall time of the last point that got into the folder's files, a torn one not counted; -inf without any."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    messages: Any = event_pb2
    for path in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        newest = -math.inf
        for record in RawEventFileLoader(str(path)).Load():
            event = messages.Event.FromString(record)
            if event.HasField("summary"):
                newest = event.wall_time
        if newest > -math.inf:
            return newest
    return -math.inf


class WandB:
    """One W&B run per run directory, resumed by its id. Team, project, name and mode come from W&B's environment, as in
    torchtitan.

    W&B's steps only grow: when the run goes back, steps that are committed again are left out until it is past them.
    """

    def __init__(self, run_dir: Path, run_id: str) -> None:
        import wandb

        self._note = run_dir / "state" / "wandb.json"
        said = json.loads(self._note.read_text()) if self._note.exists() else {"t": -math.inf, "step": 0}
        self.until, self._step = float(said["t"]), int(said["step"])
        self._newest = self.until
        self._run = wandb.init(
            entity=os.environ.get("WANDB_TEAM"),
            project=os.environ.get("WANDB_PROJECT", "everstep"),
            name=os.environ.get("WANDB_RUN_NAME", run_dir.name),
            id=run_id,
            dir=str(run_dir),
            resume="allow",
            reinit="finish_previous",
        )

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        if step > self._step:
            self._run.log(scalars, step=step)
            self._step, self._newest = step, t

    def rewind(self, step: int, t: float) -> None: ...

    def flush(self) -> None:
        # W&B's own process has the points by now, and outlives this one until they are written.
        self._note.parent.mkdir(parents=True, exist_ok=True)
        draft = self._note.with_suffix(".tmp")
        draft.write_text(json.dumps({"t": self._newest, "step": self._step}))
        draft.replace(self._note)

    def close(self) -> None:
        self._run.finish()


class Scalars:
    """Writes each committed step once to each sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._commits = Commits()
        self._newest = 0
        self._past = True

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events, in order; the first time, of all that are there."""
        written = False
        for event in events:
            if event["kind"] != "commit" or event.get("rank") or not self._commits.new(event):
                continue
            step, t = event["step"], event["t"]
            scalars = {tag: float(event[field]) for field, tag in SCALARS.items() if event.get(field) is not None}
            for sink in self._sinks:
                if self._past and t <= sink.until:
                    continue
                if step <= self._newest:
                    sink.rewind(step, t)
                sink.write(step, t, scalars)
                written = True
            self._newest = step
        self._past = False
        if written:
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
