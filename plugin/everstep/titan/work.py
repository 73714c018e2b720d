"""The step protocol's `Work` on a torchtitan trainer: applies commits, and saves, restores and hands over the state.

`TrainerWork` is the base of two classes that differ in what a commit consists of: in `steps.Steps` the slots of an
optimizer step, in `rounds.Rounds` the rounds of semi-synchronous workers.
"""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torchtitan import trainer as titan
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import utils as dist_utils
from torchtitan.observability import structured_logger as sl

from everstep.attention.schedule import CheckRate
from everstep.quorum.heal import HealState
from everstep.quorum.request import Quorum
from everstep.run import typed
from everstep.run.beats import DONE
from everstep.run.directory import number_of_groups
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, TrainerEnds
from everstep.snapshot.agreement import Agreed
from everstep.step import ledger
from everstep.step.interfaces import Commit
from everstep.step.reduction import GradientReducer
from everstep.titan import exactness, private
from everstep.titan.group import sum_in_group
from everstep.titan.names import DATALOADER
from everstep.titan.snapshots import AGREED_SNAPSHOTS
from everstep.titan.state import TrainingState

DATA_BLOB, CHECK_RATE = "data", "check_rate"
VALIDATION_LOSS = "validation_metrics/loss"
"""torchtitan's name for the validation loss."""


class MetricsLogger(BaseLogger):
    """Receives this rank's metrics from torchtitan, which still prints its line to the rank's log. The metrics become
    part of the commit's event, and the curves are drawn from events.

    Args:
        trainer: torchtitan's trainer. Its `MetricsProcessor` logs to this object from now on.
        steps: of a commit.
    """

    def __init__(self, trainer: titan.Trainer, steps: int) -> None:
        self._processor = trainer.metrics_processor
        self._processor.logger = self
        self._logged: dict[str, float] = {}
        self._steps = steps
        schedule = trainer.config.parallelism.pipeline_parallel_schedule
        self._knows_loss = dist.get_rank() == private.metrics_rank(trainer.parallel_dims, schedule)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._logged = metrics

    def of(self, step: int, commit: Commit, loss: float, grad_norm: float, extra: dict[str, Any]) -> dict[str, float]:
        """Return the metrics of a commit by torchtitan's names; empty if torchtitan would log none of its steps."""
        if not any(self._processor.should_log(one) for one in range(step - self._steps + 1, step + 1)):
            return {}
        counted = commit.tokens > 0
        worst = float((commit.loss[counted] / commit.tokens[counted]).max())
        self._processor.data_loading_times.append(0.0)  # torchtitan takes the mean, and a spare has no times
        self._processor.log(step, loss, worst, grad_norm, extra_metrics=extra)
        return {name: float(value) for name, value in self._logged.items()}

    def validation_loss(self) -> float | None:
        """Return the loss of a validation just made; None on a rank without it."""
        return self._logged[VALIDATION_LOSS] if self._knows_loss else None


class TrainerWork(ABC):
    """What `Steps` and `Rounds` have in common; they add `compute`, `refused`, `results` and `discard`. Methods without
    a docstring: see `everstep.step.interfaces.Work`.

    Args:
        trainer: an `EverstepTrainer` that has set all its attributes but `work`.
        state: this rank's training state.
        shares: number of parts that make a commit: slots, or workers' rounds. Each is computed by one group.
        reducer: sums over the groups what they computed.
    """

    notes_interval = 1
    """Commits between two exchanges of the dataloaders' positions."""

    def __init__(self, trainer: Any, state: TrainingState, shares: int, reducer: GradientReducer) -> None:
        self._trainer, self.state, self.shares, self.reducer = trainer, state, shares, reducer
        self._slots, self._disk = trainer.slots, trainer.disk
        self.bits, self.audit = trainer.slots.bits, trainer.slots.audit
        self._ft = trainer.config.fault_tolerance
        self._events, self._files = trainer.context.events, trainer.context.files
        self._snapshots, self._checks = trainer.context.snapshots, trainer.checks
        self._source = self._slots.source
        self._measures = MetricsLogger(trainer, self._slots.steps_per_commit)
        self._skipped: set[tuple[int, int]] = set()
        """(step, slot) pairs for which no group can compute a finite gradient."""
        self._commits = 0

    @property
    def committed(self) -> int:
        """Number of the last commit, as the step protocol and events count: steps, or rounds."""
        return self._trainer.step // self._slots.steps_per_commit

    @abstractmethod
    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """Change the parameters. Return the norm, before clipping, of the mean gradient or change, and event fields."""

    def statuses(self, commit: Commit) -> dict[int, int]:
        """Return group id -> what it says of its last snapshot (`Status.encode`). Empty here: rounds take none."""
        return {}

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        for slot in slots:
            reason = (
                "its loss or its gradient's norm is finite on no group asked: the cause is in the data or the model"
            )
            self._events.emit("not_finite", step, slot=slot, reason=reason)
        if self._ft.on_poison == "skip":
            self._skipped |= {(step, slot) for slot in slots}
            return
        self._events.emit("diverged", step, reason="a loss or a gradient is not finite")
        why = f"no group asked has a finite loss and gradients of slots {list(slots)} of step {step}: training diverged"
        raise TrainerEnds(HOPELESS_EXIT, why)

    def goes_on(self) -> bool:
        return self._trainer.should_continue_training()

    def parameters(self) -> str:
        """Return a checksum of the group's parameters in hex, a space, and their layout over the group's ranks
        (`exactness.layout`). A collective of the group."""
        return f"{sum_in_group(self.state.checksum()):016x} {exactness.layout(self._trainer.config)}"

    def checksum(self) -> int | None:
        """Return the parameters' checksum if an audit is due, else None. One is always due before this process's first
        commit, and later after every `audit_interval` commits (exact sums: after each), unless that interval is 0."""
        interval, is_exact = self._ft.audit_interval, self._ft.exact
        if self._commits and not (interval and (is_exact or self.committed % interval == 0)):
            return None
        if self._commits and is_exact:
            return int(self._trainer.parameters_told.partition(" ")[0], 16)
        return sum_in_group(self.state.checksum())

    def apply(self, commit: Commit) -> None:
        """Make the optimizer step of a commit that this group took part in or catches up on. Then tell it in events,
        save and validate, if due.

        Raises:
            TrainerEnds: training cannot go on, for instance as it diverged, or this rank computes wrong results.
        """
        begin = time.monotonic()
        trainer, step = self._trainer, commit.step
        trainer.gc_handler.run(trainer.step)
        sl.set_step(step)
        lr_metrics = trainer.lr_schedulers.get_metrics()
        loss = self._mean_loss(commit)
        trainer.step = step * self._slots.steps_per_commit
        trainer.ntokens_seen += self._slots.tokens_per_step * self._slots.steps_per_commit
        with sl.log_trace_span("optim"):
            grad_norm, told = self.update(commit)
        trainer.history = commit.history
        self._source.committed(trainer.step)
        if (step + 1) % self.notes_interval == 0:
            self._source.note_live()  # for the next notes: when they are sent, the streams have read another step
        if self._ft.exact:
            trainer.parameters_told = self.parameters()
            told["checksum"] = trainer.parameters_told.partition(" ")[0]
            if bits := self._slots.own_bits():
                self._events.emit("slot_bits", step, bits=bits)
        if self._snapshots is not None:
            with sl.log_trace_span("snapshot"):
                self._snapshots.committed(commit, self.statuses(commit), self._whole)
        with sl.log_trace_span("metrics"):
            extra = {"n_tokens_seen": trainer.ntokens_seen, **lr_metrics}
            metrics = self._measures.of(trainer.step, commit, loss, grad_norm, extra)
        took_s = commit.took_s + time.monotonic() - begin
        self._tell(commit, took_s, loss=loss, grad_norm=grad_norm, lr=lr_metrics, metrics=metrics, **told)
        saves = commit.able[0] == self._ft.group_id
        with sl.log_trace_span("checkpoint"):
            self._save(commit, first=saves)
        validates = trainer.config.validator.enable and trainer.validator.should_validate(trainer.step)
        if validates and self._ft.group_id in commit.able:  # not while this group catches up: the others would wait
            self._validate(step, tells=saves)
        if commit.unfit:  # only now: the commit contains this rank's slots, and no work on the next one has begun
            self._leave_unfit(commit)
        self._commits += 1
        trainer.profiler.step()
        if self._commits == 1:
            train_timeout = timedelta(seconds=trainer.config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=train_timeout, parallel_dims=trainer.parallel_dims)

    def _save(self, commit: Commit, *, first: bool) -> None:
        """Write a checkpoint if one is due and this is the `first` group, but none if `save_last` follows. In `Rounds`
        other groups add the states of their workers."""
        if first and self.goes_on() and not commit.all_leave:
            self._disk.save(self._trainer.step, commit.step)

    def _mean_loss(self, commit: Commit) -> float:
        """Return the step's mean loss. Raises TrainerEnds if no token has a label: a restart would not help."""
        tokens = float(commit.tokens.sum())
        if not tokens:
            raise TrainerEnds(
                HOPELESS_EXIT,
                f"no slot of step {commit.step} has a label to train on: all are masked, or skipped as poison",
            )
        return float(commit.loss.sum()) / tokens

    def _tell(self, commit: Commit, took_s: float, *, lr: dict[str, float], **fields: Any) -> None:
        if self._checks is not None and (rate := self._checks.changed_rate()):
            self._events.emit("attention_schedule", commit.step, coverage=self._checks.coverage, **rate)
        self._events.emit(
            "commit",
            commit.step,
            attempt=commit.attempts,
            owners=commit.owners,
            groups=commit.groups,
            tokens=float(commit.tokens.sum()),
            lr=next(iter(lr.values())),
            took_s=round(took_s, 4),
            compute_s=round(commit.compute_s, 4),
            reduce_s=round(commit.reduce_s, 4),
            quorum_id=commit.quorum_id,
            history=f"{commit.history:x}",
            parent=f"{commit.parent:x}",
            coverage_ok=-1 not in commit.owners,
            **fields,
        )

    def _validate(self, commit: int, *, tells: bool) -> None:
        """Validate on every group, as the others would wait for a single one. Emit the loss if this group `tells`."""
        trainer = self._trainer
        self._files.beat("validate", commit)
        try:
            with sl.log_trace_span("validate"):
                trainer.validator.validate(trainer.model_parts, trainer.step)
        except AssertionError as error:  # torchtitan's, without a word, that there was a batch
            raise RuntimeError(f"[validator] failed: {str(error) or 'its data has no batch for each rank'}") from error
        if tells and (loss := self._measures.validation_loss()) is not None:
            self._events.emit("validation", commit, loss=loss)

    def _leave_unfit(self, commit: Commit) -> NoReturn:
        """End this rank, which computes wrongly. On the other ranks of the group `commit.unfit` is empty."""
        slot = commit.unfit[0]
        reason = (
            f"rank {dist.get_rank()} on host {socket.gethostname()} refused slot {slot} of step {commit.step} twice, "
            f"but group {commit.owners[slot]} could compute it: this device is at fault, take it out of service"
        )
        self._events.emit("unfit", commit.step, slot=slot, reason=reason)
        raise TrainerEnds(UNFIT_EXIT, reason)

    def save_last(self) -> None:
        """Called on one group: write the last checkpoint of the run, or of this start."""
        self._disk.save(self._trainer.step, self.committed, last=True)

    def close(self, *, leaves: bool) -> None:
        """Tell that this group makes no more steps: it was asked to leave (`leaves`), or the run is over. After
        the beat DONE, the end of this process is no death."""
        self._events.emit("left" if leaves else "training_done", self.committed)
        self._files.beat(DONE, self.committed)

    def own_notes(self, step: int) -> bytes | None:
        """Return the positions of this group's data streams, with which any group can go on; None if not due, or if the
        data has no streams: the same on all groups."""
        return None if step % self.notes_interval else self._source.known_states(own=True) or None

    def receive_notes(self, notes: list[bytes]) -> None:
        for place, note in enumerate(notes, 1):
            try:
                self._source.learn(note)
            except ValueError as error:
                text = f"stream positions of member {place} of {len(notes)} of the quorum are skipped: {error}"
                self._events.emit("warning", text=text)

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """Load the newest state from memory or disk, or start afresh. A loaded state is copied to a snapshot at once.
        Return the last commit's number and history."""
        trainer = self._trainer
        if self._disk.choice.asks and dist.get_rank() == 0:
            text = "load_step and exclude_from_loading apply whenever all groups start: remove them after this start"
            self._events.emit("warning", text=f"[checkpoint] {text}, or use `everstep run`")
        source = self._from_memory() or self._from_disk()
        trainer.history = trainer.history or ledger.next_history(0, trainer.step, "restored")
        leaves_data = DATALOADER in trainer.config.checkpoint.exclude_from_loading
        if leaves_data and trainer.data_told != trainer.data:
            # If equal, the data began anew before this state, which says when.
            self._source.begin_after(trainer.step)
        self._taken(source)
        self._files.restored(self.committed)
        if self._snapshots is not None and trainer.step:
            self._snapshots.restored(trainer.step, trainer.history, quorum, self._whole())
        return self.committed, trainer.history

    def _from_memory(self) -> str:
        """Load the newest complete snapshot from the keepers and return "memory". Return "" if there is none, if a disk
        checkpoint is not older, or if `[checkpoint]` asks for one."""
        if self._snapshots is None or self._disk.choice.load_step != -1:
            return ""
        state = self._snapshots.recover(self._whole(), self._disk.newest())
        if state is None:
            return ""
        self._load(state)
        remedy = "Start the run again with [snapshot] enable = false to go on from a checkpoint on disk"
        self._require_as_committed(f"the snapshot of step {self._trainer.step}", UNFIT_EXIT, remedy)
        return "memory"

    def _from_disk(self) -> str:
        """Load a checkpoint if there is one. Return "disk", or "fresh" if the run starts at step 0; "memory" if the
        newest checkpoint is damaged and a snapshot is newer than the one before."""
        trainer = self._trainer
        if self._disk.leave_out_damaged() and (source := self._from_memory()):
            return source
        found = self._disk.load()
        remedy = "Remove it to go on from an older one"
        self._require_as_committed(f"the checkpoint of step {trainer.step}", HOPELESS_EXIT, remedy)
        return "disk" if found and trainer.step else "fresh"

    def _require_as_committed(self, what: str, status: int, remedy: str) -> None:
        """Raise TrainerEnds if the restored parameters do not have the checksum that was recorded at their commit.
        Compares nothing if sums are not exact, no checksum is recorded, or the layout differs."""
        trainer = self._trainer
        told, _, layout = trainer.parameters_told.partition(" ")
        now, _, mine = self.parameters().partition(" ") if told and self._ft.exact else ("", "", "")
        if now and layout == mine and now != told:
            why = f"{what} is damaged: its parameters have the checksum {now}, those committed had {told}. {remedy}"
            raise TrainerEnds(status, why)

    def await_snapshot(self) -> None:
        if self._snapshots is not None:
            self._snapshots.await_snapshot()

    def _whole(self) -> HealState:
        """Return this rank's state, its tensors by reference."""
        return self.state.serve({DATA_BLOB: self._source.known_states()})

    def serve(self) -> HealState:
        state = self._whole()
        if self._snapshots is not None:
            state.meta[AGREED_SNAPSHOTS] = self._snapshots.copier.agreed.to_json()
        if self._checks is not None:
            state.meta[CHECK_RATE] = self._checks.schedule.check_rate
        return state

    def heal(self, state: HealState) -> None:
        self._load(state)
        self._taken("peer")
        known = state.meta.get(AGREED_SNAPSHOTS)
        if self._snapshots is not None and known is not None:
            self._snapshots.copier.agreed = Agreed.from_json(known)
        rate = state.meta.get(CHECK_RATE)
        if self._checks is not None and rate is not None and self._checks.schedule.check_rate is None:
            # Until it has measured its own, it would check all layers, and the others would wait for it.
            self._checks.schedule.check_rate = typed.parse(CheckRate, rate, "a check rate")

    def _load(self, state: HealState) -> None:
        """Load a state of the same rank, from another group or from memory."""
        if self._snapshots is not None:
            self._snapshots.copier.wait()  # a snapshot of the old state may still be in progress
        self.state.load(state)
        self._source.learn(state.blobs[DATA_BLOB])

    def _taken(self, source: str) -> None:
        """Tell the data source and the events that a state was loaded from `source`."""
        trainer = self._trainer
        self._source.committed(trainer.step)
        for profiler in (trainer.profiler.torch_profiler, trainer.profiler.memory_profiler):
            if profiler is not None:  # they began with step 0, and name their files by the step
                profiler.step_num = trainer.step
        config = trainer.config
        self._events.emit(
            "training_started",
            self.committed + 1,
            source=source,
            history=f"{trainer.history:x}",
            slots=self.shares,
            nominal_groups=number_of_groups(trainer.context.run_dir) or config.fault_tolerance.groups,
            steps=config.semi_sync.commits(config.training.steps),
            global_batch_size=config.training.global_batch_size * self._slots.steps_per_commit,
            ranks=dist.get_world_size(),
        )
