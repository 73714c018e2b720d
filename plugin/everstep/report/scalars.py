"""Curves of a run for TensorBoard and W&B: one continuous run, a point for each committed step, whoever made it.

Written by whoever follows the run's events, not by the trainers, so a group that dies takes no curve with it. The
follower may die as well: each sink knows up to when it has been written, and the next follower goes on there.
"""

import math
import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from everstep.report.checking import Checking
from everstep.report.once import Commits
from everstep.report.wandb_files import newest_step

STORED_WITHIN_S = 30.0
SCALARS = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens": "tokens",
    "took_s": "time_metrics/end_to_end(s)",
    "inner_steps": "semi_sync/inner_steps",
    "payload_bytes": "semi_sync/bytes_across_groups",
    "kept_bytes": "semi_sync/bytes_kept",
}
"""Fields of `commit` events, with torchtitan's names for them. What else torchtitan measures, of the rank that told of
the commit, is in its field `metrics` by those names."""
VALIDATION_LOSS = "validation_metrics/loss"


class Sink(Protocol):
    """Where points go."""

    until: float
    """Wall time in seconds of the newest commit that was in it when it was opened; -inf if it leaves out by itself
    what it has."""

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None: ...

    def rewind(self, step: int, t: float) -> None:
        """The run went back: what was written from `step` on is void."""

    def flush(self) -> None:
        """What was written should outlive this process from here on."""

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

    W&B says itself how far it has come: its process dies with the one that feeds it, and what it had not stored is
    written again. Its steps only grow: when the run goes back, steps that are committed again are left out until it is
    past them.
    """

    until = -math.inf

    def __init__(self, run_dir: Path, run_id: str) -> None:
        import wandb

        self._stored = partial(newest_step, run_dir, run_id)
        stored = self._stored()
        self._run = wandb.init(
            entity=os.environ.get("WANDB_TEAM"),
            project=os.environ.get("WANDB_PROJECT", "everstep"),
            name=os.environ.get("WANDB_RUN_NAME", run_dir.name),
            id=run_id,
            dir=str(run_dir),
            resume="allow",
            reinit="finish_previous",
        )
        self._step = stored if self._run.offline else self._run.starting_step - 1
        self._open = -1  # the step that takes further figures: W&B keeps it open until the next one

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        if step > self._step or step == self._open:
            self._run.log(scalars, step=step)
            self._step = self._open = step

    def rewind(self, step: int, t: float) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self._run.finish()
        # Without a network `finish` returns a moment before W&B's process has written the file.
        until = time.monotonic() + STORED_WITHIN_S
        while self._run.offline and self._stored() < self._step and time.monotonic() < until:
            time.sleep(0.05)


class Scalars:
    """Writes each committed step once to each sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        self._commits = Commits()
        self._checking = Checking()
        self._newest = 0
        self._past = True

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events, in order; the first time, of all that are there."""
        written = False
        for event in events:
            self._checking.take(event)
            if event["kind"] == "validation":
                written |= self._write_validation(event)
                continue
            if event["kind"] != "commit" or event.get("rank") or not self._commits.new(event):
                continue
            step, t = event["step"], event["t"]
            scalars = {tag: float(value) for tag, value in event.get("metrics", {}).items()}
            scalars |= {tag: float(event[field]) for field, tag in SCALARS.items() if event.get(field) is not None}
            scalars |= self._of_checks()
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

    def _of_checks(self) -> dict[str, float]:
        """What the attention checks found so far, and what they cost and leave now."""
        checking = self._checking
        if checking.coverage is None:
            return {}
        known = {"overhead": checking.overhead, "residual_risk": checking.residual_risk}
        told = {"findings": float(checking.findings), "ranks_unfit": float(len(checking.unfit))}
        told |= {name: value for name, value in known.items() if value is not None}
        return {f"attention/{name}": value for name, value in told.items()}

    def _write_validation(self, event: dict[str, Any]) -> bool:
        """A validation's loss, beside its commit's figures; whether some sink wanted it."""
        wanting = [sink for sink in self._sinks if not (self._past and event["t"] <= sink.until)]
        for sink in wanting:
            sink.write(event["step"], event["t"], {VALIDATION_LOSS: float(event["loss"])})
        return bool(wanting)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
