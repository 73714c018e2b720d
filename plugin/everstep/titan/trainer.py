"""torchtitan's trainer as one rank of one replica group."""

import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torchtitan import trainer as titan
from torchtitan.distributed import utils as dist_utils
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.logging import logger

from everstep.attention.section import AttentionCheck
from everstep.config.checks import check_config
from everstep.config.sections import Data, FaultTolerance, Job
from everstep.quorum.heal import Whose
from everstep.run.beats import DONE, STARTUP
from everstep.run.data_start import began_after
from everstep.run.exits import FENCED_EXIT, HOPELESS_EXIT, UNFIT_EXIT, TrainerEnds
from everstep.semi.section import SemiSync
from everstep.snapshot.section import SnapshotSection
from everstep.snapshot.segment import run_id
from everstep.step import ledger
from everstep.step.driver import End
from everstep.step.interfaces import Commit, OutOfData, Work
from everstep.step.quorum import Quorum
from everstep.step.reduction import BUCKET_BYTES, GradientReducer
from everstep.step.streams import streams_of
from everstep.titan import cpu, exactness, private
from everstep.titan.checkpoint_names import DATALOADER
from everstep.titan.checkpoints import RunCheckpointManager, SnapshotCheckpointManager, of_run
from everstep.titan.data.binding import bind_data
from everstep.titan.group import all_in_group, sum_in_group
from everstep.titan.machine import choose_attention
from everstep.titan.optimizer_step import OptimizerStep
from everstep.titan.participation import Participation
from everstep.titan.place import open_place
from everstep.titan.semi_sync import Rounds
from everstep.titan.state import TrainingState
from everstep.titan.telling import Measures
from everstep.titan.work import SlotTrainer
from everstep.titan.worker_faults import WorkerFaults

WHOLE_BACKWARDS = ("1F1B", "GPipe", "Interleaved1F1B")
"""Pipeline schedules whose backwards are autograd's own."""


class EverstepTrainer(SlotTrainer):
    """A torchtitan trainer whose optimizer steps survive the death of any replica group.

    With `fault_tolerance.enable = false` this is torchtitan's trainer. Otherwise `train` runs the step protocol
    (`everstep.step`), of which this is the Work, or in semi-synchronous training `Rounds`, which drives it: step,
    learning rate, data and metrics advance on commits only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        job: Job = field(default_factory=Job)
        """The config that a file starts from."""

        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        """Replica groups, quorums and how a run survives its failures."""

        data: Data = field(default_factory=Data)
        """Where the slots' tokens come from."""

        snapshot: SnapshotSection = field(default_factory=SnapshotSection)
        """The state of committed steps in host memory, kept by processes that outlive the trainer."""

        attention_check: AttentionCheck = field(default_factory=AttentionCheck)
        """Check the attention's arithmetic while training goes on."""

        semi_sync: SemiSync = field(default_factory=SemiSync)
        """Workers that train on their own for some steps between two synchronisations."""

        def build(self, **parts: Any) -> "EverstepTrainer":
            return private.built_by(self)(config=replace(self), **parts)

        def __post_init__(self) -> None:
            # not super(): `slots=True` makes a second class, which the first one's super() does not know
            titan.Trainer.Config.__post_init__(self)
            check_config(self)

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute] torchtitan's declares its own Config

    def __init__(self, config: Config) -> None:
        begin = time.monotonic()
        bind_data(config)
        on_cpu = not cpu.has_accelerator()
        if on_cpu:
            cpu.keep_freed_memory()
        ft, semi = config.fault_tolerance, config.semi_sync
        if ft.enable and ft.exact:
            exactness.prepare(config)
        choose_attention(config)
        place = None
        if ft.enable:
            # Curves are drawn from the run's events, by one process for all groups: report/scalars.py.
            config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
            config.checkpoint = of_run(config.checkpoint, from_snapshots=config.snapshot.enable)
            config.comm.save_traces_folder += f"/group-{ft.group_id}"
            os.environ.setdefault("RUST_LOG", "warn")  # torchft tells of every quorum otherwise
            place = open_place(config)
        super().__init__(config, place)
        if on_cpu:
            cpu.sum_only_collectives(self.model_parts)
        if place is None:
            return
        if ft.exact:
            exactness.after_build()
            exactness.agree(self.run_dir, exactness.fingerprint(config, self.device))
        self.optimizer = OptimizerStep(self, self.seed, self.dp_rank, self.checks)
        self.measures = Measures(
            self.metrics_processor, self.parallel_dims, config.parallelism.pipeline_parallel_schedule
        )
        streams = streams_of(self.device)
        degrees = (f"{key} {value}" for key, value in asdict(config.parallelism).items() if key.endswith("degree"))
        whose = Whose(run_id(place.token), dist.get_rank(), f"{dist.get_world_size()} ranks, {', '.join(degrees)}")
        self.participation = Participation(config, place, whose, streams)
        self.column = self.participation.column
        if semi.enabled:
            rounds = Rounds(self, self, self.optimizer, streams, f"{run_id(place.token)} {asdict(whose)}", place.token)
            self.work: Work = rounds
            self.state: TrainingState = rounds.state
            self._reducer = rounds.reducer
        else:
            self.work = self
            self.state = TrainingState(self.model_parts, self.optimizers, self.lr_schedulers, self.disk.counters)
            self._reducer = GradientReducer(
                self.trainable,
                BUCKET_BYTES,
                streams,
                hooks=self._backward_runs_hooks(),
                exact_slots=self.slots if ft.exact else 0,
            )
        if self.snapshots is not None:
            self.snapshots.shards = self.state.shards()
            if isinstance(self.checkpointer, SnapshotCheckpointManager):
                self.checkpointer.export_with(self.snapshots, all_in_group)
        if isinstance(self.checkpointer, RunCheckpointManager) and self.checkpointer.enable:
            self.checkpointer.write_aside_as(ft.group_id, self.participation.life)
        if ft.allow_faults:
            WorkerFaults(self, self.run_dir, ft.group_id, dist.get_rank())
        self._commits = 0
        self._profiler: Any = None
        """torchtitan's, while it trains."""
        self.events.emit(
            "worker_ready",
            incarnation=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            pid=os.getpid(),
            startup_s=round(time.monotonic() - begin, 3),
        )

    def _backward_runs_hooks(self) -> bool:
        """Whether a gradient's hook runs each time something is added to it. A replayed graph runs none, and one
        that is recorded must not start sums; a schedule that computes weights' gradients apart from the others' adds
        them without."""
        if not self.parallel_dims.pp_enabled:
            return private.computes_eagerly(self)
        parallelism = self.config.parallelism
        return (
            parallelism.pipeline_parallel_schedule in WHOLE_BACKWARDS and not parallelism.pipeline_parallel_schedule_csv
        )

    def train(self) -> None:
        if not self.config.fault_tolerance.enable:
            super().train()
            return
        group = self.config.fault_tolerance.group_id
        self._compile()
        self.participation.warm()
        with self.config.profiler.build(
            global_step=self.step, base_folder=self.config.dump_folder, leaf_folder=f"group-{group}"
        ) as self._profiler:
            end = self.participation.run(self.work, self._reducer, self.shares)
        if end is End.FENCED:
            self.events.emit("fenced", self.committed, claim=os.environ.get("EVERSTEP_FENCE", ""))
            os._exit(FENCED_EXIT)
        leaves = end is End.LEFT
        if isinstance(self.work, Rounds):
            self.work.close()
        self.events.emit("left" if leaves else "training_done", self.committed)
        self.files.beat(DONE, self.committed)
        self.participation.leave()
        if self.snapshots is not None:
            # A last checkpoint on disk holds the same state; a group that leaves alone has given its own up.
            over = not self.goes_on() or self.config.checkpoint.enable
            self.snapshots.close(over=over, leaves=leaves)
        logger.info(f"Left the run after step {self.step}, as asked" if leaves else "Training completed")

    def _compile(self) -> None:
        """Before the other groups wait for this one: compute a slot that counts for nothing, where the first one
        compiles something or loads kernels. It leaves gradients, data and random numbers as they were."""
        if self.device.type == "cpu" and not self.config.compile.enable:
            return
        self.files.beat(STARTUP, 0)
        begin = time.monotonic()
        processor = self.metrics_processor
        counted = processor.ntokens_since_last_log
        with torch.random.fork_rng(), contextlib.suppress(OutOfData):
            self.compute_slot(1, 0, whole=True)
            processor.data_loading_times.pop()
        processor.ntokens_since_last_log = counted
        self.discard()
        self.events.emit("compiled", took_s=round(time.monotonic() - begin, 3))

    # The state of a run that has none

    def restore(self, quorum: Quorum) -> tuple[int, int]:
        """No group has a state: take the newest that the keepers or the disk have, or start."""
        if not self._restore_from_memory():
            found = self.disk.load()
            self._require_as_committed(f"the checkpoint of step {self.step}", HOPELESS_EXIT)
            self.history = self.history or ledger.extend(0, self.step, "restored")
            if DATALOADER in self.config.checkpoint.exclude_from_loading:
                self.source.began_after = began_after(self.run_dir, self.source.fingerprint(), self.step)
            self.source.committed(self.step)
            if self.checks is not None:
                self.checks.weights_changed()
            self.announce("disk" if found and self.step else "fresh")
        if self.snapshots is not None and self.step:
            self.snapshots.restored(self.step, self.history, quorum, self.serve())
        return self.committed, self.history

    def _restore_from_memory(self) -> bool:
        """Take the newest snapshot that the keepers hold whole, if no checkpoint on disk is as new."""
        if self.snapshots is None or self.config.checkpoint.load_step != -1:
            return False
        state = self.snapshots.recover(self.serve(), self.disk.newest())
        if state is None:
            return False
        self.take(state, "memory")
        self._require_as_committed(f"the snapshot of step {self.step} in this host's memory", UNFIT_EXIT)
        return True

    def _require_as_committed(self, what: str, status: int) -> None:
        """Raises TrainerEnds if a restored state says which parameters it was committed with, and has others."""
        told, _, layout = self.parameters_told.partition(" ")
        now, _, mine = self.parameters().partition(" ") if told and self.is_exact else ("", "", "")
        if now and layout == mine and now != told:
            raise TrainerEnds(
                status,
                f"{what} has other parameters than those that were committed (checksum {now}, and {told} then): it was "
                "damaged since. Remove it, and the run goes on from the one before",
            )

    # A commit

    def goes_on(self) -> bool:
        return self.should_continue_training()

    def parameters(self) -> str:
        """A checksum of the group's parameters, and how they are laid out in it; a collective of the group."""
        return f"{sum_in_group(self.state.checksum()):016x} {exactness.layout(self.config)}"

    def checksum(self) -> int | None:
        interval = self.config.fault_tolerance.audit_interval
        due = not self._commits or (interval and self.committed % interval == 0)
        return sum_in_group(self.state.checksum()) if due else None

    def apply(self, commit: Commit) -> None:
        self.take_step(commit, self._update)

    def _update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """The optimizer step of a commit; the norm of its gradient, before it was clipped."""
        if self.snapshots is not None:
            self.snapshots.wait()
        self._reducer.assign(self.nominal_tokens / float(commit.tokens.sum()))
        self.assign_sums(self.sums.unpack(commit.extra))
        grad_norm = self.optimizer.step(commit.step)
        self.advance(commit.step)
        return float(grad_norm), {}

    def advance(self, commit: int) -> None:
        """torchtitan's counters after this commit."""
        self.step = commit * self.steps_per_commit
        self.ntokens_seen += self.tokens_per_step * self.steps_per_commit

    def take_step(self, commit: Commit, update: Callable[[Commit], tuple[float, dict[str, Any]]]) -> None:
        """The step that all groups agree on, and all that comes with it.

        Args:
            update: changes the parameters; the norm of what they were changed by, and further fields of the event.

        Raises:
            TrainerEnds: there is nothing to go on with, or this rank is at fault.
        """
        begin = time.monotonic()
        self.gc_handler.run(self.step)
        sl.set_step(commit.step)
        lr_metrics = self.lr_schedulers.get_metrics()
        loss = self._mean_loss(commit)
        with sl.log_trace_span("optim"):
            grad_norm, told = update(commit)
        self.history = commit.history
        self.data_read(commit.step)
        if self.is_exact:
            self.parameters_told = self.parameters()
            told |= {"bits": self.own_bits(), "checksum": self.parameters_told.partition(" ")[0]}
        goes_on = self.goes_on() and not commit.all_leave
        if self.snapshots is not None:
            words = self.sums.unpack(commit.extra).words.tolist()
            with sl.log_trace_span("snapshot"):
                self.snapshots.committed(commit, {group: round(word) for group, word in enumerate(words)}, self.serve)
        with sl.log_trace_span("metrics"):
            metrics = self.measures.of(self.step, commit, grad_norm, {"n_tokens_seen": self.ntokens_seen, **lr_metrics})
        took_s = commit.took_s + time.monotonic() - begin
        self._tell(commit, took_s, loss=loss, grad_norm=grad_norm, lr=lr_metrics, metrics=metrics, **told)
        saves = commit.saver == self.config.fault_tolerance.group_id
        if saves and goes_on:
            with sl.log_trace_span("checkpoint"):
                self.disk.save(self.step, commit.step)
        if self.config.validator.enable and self.validator.should_validate(self.step):
            self._validate(commit.step, tells=saves)
        if commit.unfit:  # what it computed of this step is in the commit, and nothing it computes is needed now
            self._leave_unfit(commit)
        self._commits += 1
        self._profiler.step()
        if self._commits == 1:
            train_timeout = timedelta(seconds=self.config.comm.train_timeout_seconds)
            dist_utils.set_pg_timeouts(timeout=train_timeout, parallel_dims=self.parallel_dims)

    def _leave_unfit(self, commit: Commit) -> NoReturn:
        slot = commit.unfit[0]
        reason = (
            f"rank {dist.get_rank()} on host {socket.gethostname()} refused slot {slot} of step {commit.step} twice, "
            f"and group {commit.owners[slot]} computed it: the error is this device's, take it out of service"
        )
        self.events.emit("unfit", commit.step, slot=slot, reason=reason)
        raise TrainerEnds(UNFIT_EXIT, reason)

    def _mean_loss(self, commit: Commit) -> float:
        """Of the step. Raises TrainerEnds where every group sees that it makes no sense to go on, and would again."""
        tokens = float(commit.tokens.sum())
        if not tokens:
            raise TrainerEnds(
                HOPELESS_EXIT, f"every slot of step {commit.step} is skipped as poison: there is nothing to go on with"
            )
        loss = float(commit.loss.sum()) / tokens
        if not math.isfinite(loss):
            self.events.emit("diverged", commit.step, loss=loss)
            raise TrainerEnds(HOPELESS_EXIT, f"the loss of step {commit.step} is {loss}: training diverged")
        return loss

    def _tell(self, commit: Commit, took_s: float, *, lr: dict[str, float], **fields: Any) -> None:
        if self.checks is not None and (plan := self.checks.news()):
            self.events.emit("attention_schedule", commit.step, coverage=str(self.checks.coverage), **plan)
        self.events.emit(
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
            coverage_ok=commit.once,
            **fields,
        )

    def _validate(self, commit: int, *, tells: bool) -> None:
        """Every group validates, for the others would wait for one; one group `tells` what came out."""
        self.files.beat("validate", commit)
        with sl.log_trace_span("validate"):
            self.validator.validate(self.model_parts, self.step)
        if tells and (loss := self.measures.validation_loss()) is not None:
            self.events.emit("validation", commit, loss=loss)

    def save_last(self) -> None:
        """The last checkpoint of the run, or of this part of it."""
        self.disk.save_last(self.step, self.committed, goes_on=self.goes_on())
