"""A torchtitan trainer as the step protocol's `Work`: what comes with a commit, and how its state is handed over.

What a commit is made of is said by the two kinds of it: `steps.Steps`, whose shares are slots of an optimizer step, and
`rounds.Rounds`, whose shares are workers' rounds.
"""

import math
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

from everstep.quorum.heal import HealState
from everstep.quorum.request import Quorum
from everstep.run.beats import DONE
from everstep.run.exits import HOPELESS_EXIT, UNFIT_EXIT, TrainerEnds
from everstep.step import ledger
from everstep.step.interfaces import Commit
from everstep.step.reduction import GradientReducer
from everstep.titan import exactness, private
from everstep.titan.group import sum_in_group
from everstep.titan.names import DATALOADER
from everstep.titan.snapshots import AGREED_SNAPSHOTS
from everstep.titan.state import TrainingState

DATA_BLOB = "data"
VALIDATION_LOSS = "validation_metrics/loss"
"""torchtitan's name of it."""


class Measures(BaseLogger):
    """What torchtitan measures of this rank, by torchtitan's names. Its line goes to the rank's log, its metrics come
    here: the trainer takes them into its events, of which the curves are drawn.

    Args:
        trainer: torchtitan's, whose `MetricsProcessor` logs here from now on.
    """

    def __init__(self, trainer: titan.Trainer) -> None:
        self._processor = trainer.metrics_processor
        self._processor.logger = self
        self._logged: dict[str, float] = {}
        schedule = trainer.config.parallelism.pipeline_parallel_schedule
        self._knows_loss = dist.get_rank() == private.metrics_rank(trainer.parallel_dims, schedule)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._logged = metrics

    def of(self, step: int, commit: Commit, grad_norm: float, extra: dict[str, Any]) -> dict[str, float]:
        """The metrics of a commit, at the optimizer steps at which torchtitan would log them; empty at others."""
        if not self._processor.should_log(step):
            return {}
        counted = commit.tokens > 0
        mean_loss = float(commit.loss.sum() / commit.tokens.sum())
        worst = float((commit.loss[counted] / commit.tokens[counted]).max())
        self._processor.data_loading_times.append(0.0)
        self._processor.log(step, mean_loss, worst, grad_norm, extra_metrics=extra)
        return {name: float(value) for name, value in self._logged.items()}

    def validation_loss(self) -> float | None:
        """Of the last validation; None on a rank that does not know it."""
        return self._logged[VALIDATION_LOSS] if self._knows_loss else None


class TrainerWork(ABC):
    """What both kinds of `everstep.step.interfaces.Work` have in common.

    Args:
        trainer: an `EverstepTrainer`, whose parts before this one are made.
        state: of this rank.
        shares: of how many parts a commit is made, each of which a group computes.
        reducer: sums what the groups computed.
    """

    notes_interval = 1
    """Commits between two exchanges of where dataloaders stand."""

    def __init__(self, trainer: Any, state: TrainingState, shares: int, reducer: GradientReducer) -> None:
        self._trainer, self.state, self.shares, self.reducer = trainer, state, shares, reducer
        self._slots, self._disk = trainer.slots, trainer.disk
        self._ft = trainer.config.fault_tolerance
        self._events, self._files = trainer.place.events, trainer.place.files
        self._snapshots, self._checks = trainer.place.snapshots, trainer.checks
        self._source = self._slots.source
        self._measures = Measures(trainer)
        self._commits = 0

    @property
    def committed(self) -> int:
        """The number of the last commit in the step protocol, and in events."""
        return self._trainer.step // self._slots.steps_per_commit

    @abstractmethod
    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """Change the parameters; the norm of what they were changed by, and further fields of the commit's event."""

    def words(self, commit: Commit) -> dict[int, int]:
        """What each group said of its snapshots. There are none of a run of workers."""
        return {}

    def bits(self, slot: int) -> int:
        return self._slots.bits(slot)

    def audit(self, step: int, slot: int) -> int:
        return self._slots.audit(step, slot)

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        for slot in slots:
            reason = "no group can compute it to a gradient whose norm is finite: the cause is in the data or the model"
            self._events.emit("not_finite", step, slot=slot, reason=reason)
        self._leave_out(step, slots)

    def _leave_out(self, step: int, slots: Collection[int]) -> None:
        """Do without slots that no group can compute. Raises TrainerEnds if they cannot be left out."""
        self._events.emit("diverged", step, reason="a gradient is not finite")
        why = f"the gradients of slots {list(slots)} of step {step} are not finite on any group: training diverged"
        raise TrainerEnds(HOPELESS_EXIT, why)

    # A commit

    def goes_on(self) -> bool:
        return self._trainer.should_continue_training()

    def parameters(self) -> str:
        """A checksum of the group's parameters, and how they are laid out in it; a collective of the group."""
        return f"{sum_in_group(self.state.checksum()):016x} {exactness.layout(self._trainer.config)}"

    def checksum(self) -> int | None:
        """None: no audit is due. With exact sums one is due at every commit, unless audit_interval is 0."""
        interval, is_exact = self._ft.audit_interval, self._ft.exact
        if self._commits and not (interval and (is_exact or self.committed % interval == 0)):
            return None
        if self._commits and is_exact:
            return int(self._trainer.parameters_told.partition(" ")[0], 16)
        return sum_in_group(self.state.checksum())

    def apply(self, commit: Commit) -> None:
        """The step that all groups agree on, and all that comes with it.

        Raises:
            TrainerEnds: there is nothing to go on with, or this rank is at fault.
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
            self._source.note_live()  # what the next notes tell, as by then the streams will be ahead
        if self._ft.exact:
            trainer.parameters_told = self.parameters()
            told["checksum"] = trainer.parameters_told.partition(" ")[0]
            if bits := self._slots.own_bits():
                self._events.emit("slot_bits", step, bits=bits)
        if self._snapshots is not None:
            with sl.log_trace_span("snapshot"):
                self._snapshots.committed(commit, self.words(commit), self._whole)
        with sl.log_trace_span("metrics"):
            extra = {"n_tokens_seen": trainer.ntokens_seen, **lr_metrics}
            metrics = self._measures.of(trainer.step, commit, grad_norm, extra)
        took_s = commit.took_s + time.monotonic() - begin
        self._tell(commit, took_s, loss=loss, grad_norm=grad_norm, lr=lr_metrics, metrics=metrics, **told)
        saves = commit.able[0] == self._ft.group_id
        with sl.log_trace_span("checkpoint"):
            self._save(commit, first=saves)
        if trainer.config.validator.enable and trainer.validator.should_validate(trainer.step):
            self._validate(step, tells=saves)
        if commit.unfit:  # what it computed of this step is in the commit, and nothing it computes is needed now
            self._leave_unfit(commit)
        self._commits += 1
        if trainer.profiler is not None:
            trainer.profiler.step()
        if self._commits == 1:
            train_timeout = timedelta(seconds=trainer.config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=train_timeout, parallel_dims=trainer.parallel_dims)

    def _save(self, commit: Commit, *, first: bool) -> None:
        """Write a checkpoint if one is due and this is the `first` group."""
        if first and self.goes_on() and not commit.all_leave:
            self._disk.save(self._trainer.step, commit.step)

    def _mean_loss(self, commit: Commit) -> float:
        """Of the step. Raises TrainerEnds where every group sees that it makes no sense to go on, and would again."""
        tokens = float(commit.tokens.sum())
        if not tokens:
            raise TrainerEnds(
                HOPELESS_EXIT,
                f"no slot of step {commit.step} has a label to train on: all are masked, or skipped as poison",
            )
        loss = float(commit.loss.sum()) / tokens
        if not math.isfinite(loss):
            self._events.emit("diverged", commit.step, loss=loss)
            raise TrainerEnds(HOPELESS_EXIT, f"the loss of step {commit.step} is {loss}: training diverged")
        return loss

    def _tell(self, commit: Commit, took_s: float, *, lr: dict[str, float], **fields: Any) -> None:
        if self._checks is not None and (plan := self._checks.news()):
            self._events.emit("attention_schedule", commit.step, coverage=self._checks.coverage, **plan)
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
        """Every group validates, for the others would wait for one; one group `tells` what came out."""
        trainer = self._trainer
        self._files.beat("validate", commit)
        with sl.log_trace_span("validate"):
            trainer.validator.validate(trainer.model_parts, trainer.step)
        if tells and (loss := self._measures.validation_loss()) is not None:
            self._events.emit("validation", commit, loss=loss)

    def _leave_unfit(self, commit: Commit) -> NoReturn:
        slot = commit.unfit[0]
        reason = (
            f"rank {dist.get_rank()} on host {socket.gethostname()} refused slot {slot} of step {commit.step} twice, "
            f"and group {commit.owners[slot]} computed it: the error is this device's, take it out of service"
        )
        self._events.emit("unfit", commit.step, slot=slot, reason=reason)
        raise TrainerEnds(UNFIT_EXIT, reason)

    def save_last(self) -> None:
        """The last checkpoint of the run, or of this part of it."""
        self._disk.save_last(self._trainer.step, self.committed, goes_on=self.goes_on())

    def close(self, *, leaves: bool) -> None:
        """This group makes no more steps, as it was asked to leave (`leaves`) or the run is over."""
        self._events.emit("left" if leaves else "training_done", self.committed)
        self._files.beat(DONE, self.committed)

    # Where the dataloader's streams stand

    def notes(self, step: int) -> bytes | None:
        """Where this group's streams stand, so that any group can adopt them."""
        return None if step % self.notes_interval else self._source.known_states() or None

    def noted(self, notes: list[bytes]) -> None:
        for place, note in enumerate(notes, 1):
            try:
                self._source.learn(note)
            except ValueError as error:
                text = f"what group {place} of {len(notes)} says of its streams is skipped: {error}"
                self._events.emit("warning", text=text)

    # The state

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """No group has a state: take the newest that the keepers or the disk have, or start."""
        trainer = self._trainer
        self._taken(self._from_memory() or self._from_disk())
        self._files.restored(self.committed)
        if self._snapshots is not None and trainer.step:
            self._snapshots.restored(trainer.step, trainer.history, quorum, self._whole())
        return self.committed, trainer.history

    def _from_memory(self) -> str:
        """Take the newest snapshot that the keepers hold whole, if no checkpoint on disk is as new; else ""."""
        if self._snapshots is None or self._trainer.config.checkpoint.load_step != -1:
            return ""
        state = self._snapshots.recover(self._whole(), self._disk.newest())
        if state is None:
            return ""
        self._load(state)
        self._require_as_committed(f"the snapshot of step {self._trainer.step} in this host's memory", UNFIT_EXIT)
        return "memory"

    def _from_disk(self) -> str:
        """Take the checkpoint that there is, or none."""
        trainer = self._trainer
        found = self._disk.load()
        self._require_as_committed(f"the checkpoint of step {trainer.step}", HOPELESS_EXIT)
        trainer.history = trainer.history or ledger.extend(0, trainer.step, "restored")
        leaves_data = DATALOADER in trainer.config.checkpoint.exclude_from_loading
        if leaves_data and trainer.data_told != trainer.data:  # else an earlier start of this run did so
            self._source.began_after = trainer.step
        return "disk" if found and trainer.step else "fresh"

    def _require_as_committed(self, what: str, status: int) -> None:
        """Raises TrainerEnds if a restored state says which parameters it was committed with, and has others."""
        trainer = self._trainer
        told, _, layout = trainer.parameters_told.partition(" ")
        now, _, mine = self.parameters().partition(" ") if told and self._ft.exact else ("", "", "")
        if now and layout == mine and now != told:
            raise TrainerEnds(
                status,
                f"{what} has other parameters than those that were committed (checksum {now}, and {told} then): it was "
                "damaged since. Remove it, and the run goes on from the one before",
            )

    def settle(self) -> None:
        if self._snapshots is not None:
            self._snapshots.settle()

    def _whole(self) -> HealState:
        """This rank's state, by reference."""
        return self.state.serve({DATA_BLOB: self._source.known_states()})

    def serve(self) -> HealState:
        state = self._whole()
        if self._snapshots is not None:
            state.meta[AGREED_SNAPSHOTS] = self._snapshots.agreed
        return state

    def heal(self, state: HealState) -> None:
        self._load(state)
        self._taken("peer")
        known = state.meta.get(AGREED_SNAPSHOTS)
        if self._snapshots is not None and known is not None:
            self._snapshots.agree(known)

    def _load(self, state: HealState) -> None:
        """Take over the state of the same rank in another group."""
        if self._snapshots is not None:
            self._snapshots.wait()  # a snapshot of the state before may still be under way
        self.state.load(state)
        self._source.learn(state.blobs[DATA_BLOB])

    def _taken(self, source: str) -> None:
        """A new state was loaded; tell where it came from."""
        self._source.committed(self._trainer.step)
        self._weights_changed()
        config = self._trainer.config
        self._events.emit(
            "training_started",
            self.committed + 1,
            source=source,
            history=f"{self._trainer.history:x}",
            slots=self.shares,
            nominal_groups=config.fault_tolerance.groups,
            steps=config.semi_sync.commits(config.training.steps),
            global_batch_size=config.training.global_batch_size * self._slots.steps_per_commit,
            ranks=dist.get_world_size(),
        )

    def _weights_changed(self) -> None:
        """The checks' bounds are derived anew."""
        if self._checks is not None:
            self._checks.weights_changed()
