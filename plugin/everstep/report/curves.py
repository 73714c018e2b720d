"""Curves of a run for TensorBoard and W&B: one continuous run, a point for each committed step, whoever made it.

Written by whoever follows the run's events, not by the trainers, so a group that dies takes no curve with it. Up to
which commit they are written stands in RUN_DIR/state/curves.json, and the next follower goes on there. One that was
killed between the two may leave its last points twice.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from everstep.report.checking import Checking
from everstep.report.lineage import FirstMention
from everstep.run.files import read_json, write_json

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

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None: ...

    def rewind(self, step: int, t: float) -> None:
        """The run went back: what was written from `step` on is void."""

    def flush(self) -> None:
        """What was written should outlive this process from here on."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in one folder; each start of the follower adds one."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2
        self._summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009  made at run time
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, t: float, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._writer.add_event(self._events.Event(wall_time=t, step=step, summary=self._summary(value=values)))

    def rewind(self, step: int, t: float) -> None:
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(wall_time=t, step=step, session_log=start))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """One W&B run per run directory, resumed by its id. Team, project, name and mode come from W&B's environment, as in
    torchtitan. W&B's steps only grow: when the run goes back, steps that are committed again are left out until it is
    past them.
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

    def rewind(self, step: int, t: float) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self._run.finish()


def open_sinks(run_dir: Path, what: Mapping[str, Any]) -> list[Sink]:
    """Those of `live.Telling` that are wanted and can be opened; a sentence for one that cannot."""
    wanted: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(run_dir / what["tensorboard_folder"]),
        "wandb": lambda: WandB(run_dir),
    }
    found = []
    for name in [name for name in wanted if what[name]]:
        try:
            found.append(wanted[name]())
        except Exception as error:  # noqa: BLE001  a package, a network
            print(f"everstep: nothing goes to {name}: {type(error).__name__}: {error}", flush=True)
    return found


class Curves:
    """Writes each committed step once to each sink."""

    def __init__(self, run_dir: Path, sinks: Sequence[Sink]) -> None:
        self._file = run_dir / "state" / "curves.json"
        self._sinks = sinks
        self._commits = FirstMention()
        self._checking = Checking()
        self._newest = 0
        told = read_json(self._file).get("told_until", -math.inf)
        self._told_until = told if isinstance(told, (int, float)) else -math.inf
        """Wall time of the newest commit or validation that is in the sinks."""
        self._past = self._told_until
        """What is as old as this was written by the follower before."""

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events, in order; the first time, of all that are there."""
        before = self._told_until
        for event in events if self._sinks else ():
            self._checking.take(event)
            if event["kind"] == "validation":
                self._write(event, {VALIDATION_LOSS: float(event["loss"])})
            elif event["kind"] == "commit" and not event.get("rank") and self._commits.new(event["history"]):
                scalars = {tag: float(value) for tag, value in event.get("metrics", {}).items()}
                scalars |= {tag: float(event[field]) for field, tag in SCALARS.items() if event.get(field) is not None}
                self._write(event, scalars | self._of_checks(), rewinds=event["step"] <= self._newest)
                self._newest = event["step"]
        self._past = -math.inf
        if self._told_until > before:
            for sink in self._sinks:
                sink.flush()
            write_json(self._file, {"told_until": self._told_until})

    def _write(self, event: dict[str, Any], scalars: dict[str, float], rewinds: bool = False) -> None:
        step, t = event["step"], event["t"]
        if t <= self._past:
            return
        for sink in self._sinks:
            if rewinds:
                sink.rewind(step, t)
            sink.write(step, t, scalars)
        self._told_until = max(self._told_until, t)

    def _of_checks(self) -> dict[str, float]:
        """What the attention checks found so far, and what they cost and leave now."""
        checking = self._checking
        if checking.coverage is None:
            return {}
        known = {"overhead": checking.overhead, "rate": checking.rate}
        told = {"findings": float(checking.findings.total()), "ranks_unfit": float(len(checking.unfit))}
        told |= {name: value for name, value in known.items() if value is not None}
        return {f"attention/{name}": value for name, value in told.items()}

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
