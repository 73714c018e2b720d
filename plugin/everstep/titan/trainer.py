"""torchtitan's trainer as one rank of one replica group."""

import math
import os
import socket
import time
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan import trainer as titan
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER
from torchtitan.components.metrics import BaseLogger
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.logging import logger

from everstep.attention.section import AttentionCheck
from everstep.config.checks import check_config
from everstep.config.sections import Data, FaultTolerance, Job
from everstep.data.slots import SlotSource
from everstep.quorum.communicator import why_not
from everstep.quorum.door import Door
from everstep.quorum.heal import Whose
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import RankColumn
from everstep.quorum.ranks import GroupRanks
from everstep.run.address import published_address
from everstep.run.beats import DONE, STARTUP
from everstep.run.data_start import began_after
from everstep.run.events import EventLog
from everstep.run.exits import FENCED_EXIT, HOPELESS_EXIT, UNFIT_EXIT, USAGE_EXIT
from everstep.run.token import run_token
from everstep.semi.section import SemiSync
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import run_id
from everstep.step import ledger
from everstep.step.driver import Driver, End
from everstep.step.interfaces import Commit, Timeouts
from everstep.step.protocol import StepProtocol
from everstep.step.reduction import GradientReducer
from everstep.step.streams import streams_of
from everstep.titan import attention, cpu, private
from everstep.titan.checkpoints import RunCheckpointManager, SnapshotCheckpointManager, of_run
from everstep.titan.data.binding import bind_data
from everstep.titan.fragments import FragmentReducer
from everstep.titan.group import all_in_group, sum_in_group
from everstep.titan.machine import choose_attention
from everstep.titan.run_files import RankFiles
from everstep.titan.snapshots import Snapshots
from everstep.titan.state import TrainingState, slot_seed
from everstep.titan.witness import Witnesses
from everstep.titan.work import SlotTrainer
from everstep.titan.worker_faults import WorkerFaults

OPTIMIZER_SLOT = -1
WARM_COMMITS = 3
"""In these a slot may have been compiled, and its time says nothing."""
HISTORY = "history"
DATA_BEGAN = "data_began_after"
WHOLE_BACKWARDS = ("1F1B", "GPipe", "Interleaved1F1B")
"""Pipeline schedules whose backwards are autograd's own."""
VALIDATION_LOSS = "validation_metrics/loss"
"""torchtitan's name of it."""


class KeptMetrics(BaseLogger):
    """Where torchtitan's metrics go: the trainer takes them from here into its events, of which the curves are drawn.

    Attributes:
        metrics: what was logged last, by torchtitan's names.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics = metrics


class HostClock:
    """This host's monotonic clock; implements `everstep.step.interfaces.Clock`."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def advice_on_waits(commit: Commit, settings: FaultTolerance) -> str:
    """What to change where a quorum waits for this group for a shorter time than one of its slots takes; "" where it
    does not."""
    own = commit.owners.count(settings.group_id)
    slot_s = commit.compute_s / own if own else 0.0
    if slot_s <= settings.join_timeout_s:
        return ""
    return (
        f"A slot took {slot_s:.0f} s, and fault_tolerance.join_timeout_s is {settings.join_timeout_s:g}: after a "
        "failure a group that still computes is left out, and its work is done again. Set it to more than the longest."
    )


class EverstepTrainer(SlotTrainer):
    """A torchtitan trainer whose optimizer steps survive the death of any replica group.

    With `fault_tolerance.enable = false` this is torchtitan's trainer. Otherwise `train` runs the step protocol
    (`everstep.step`), of which this is the Work: step, learning rate, data and metrics advance on commits only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        job: Job = field(default_factory=Job)
        """The config that a file starts from."""

        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        """Replica groups, quorums and how a run survives its failures."""

        data: Data = field(default_factory=Data)
        """Where the slots' tokens come from."""

        snapshot: Snapshot = field(default_factory=Snapshot)
        """The state of committed steps in host memory, kept by processes that outlive the trainer."""

        attention_check: AttentionCheck = field(default_factory=AttentionCheck)
        """Check the attention's arithmetic while training goes on."""

        semi_sync: SemiSync = field(default_factory=SemiSync)
        """Workers that train on their own for some steps between two synchronisations."""

        def build(self, **parts: Any) -> "EverstepTrainer":
            from everstep.titan.semi_sync import SemiSyncTrainer

            semi_sync = self.semi_sync.enabled and self._owner is EverstepTrainer
            owner = SemiSyncTrainer if semi_sync else self._owner
            assert owner is not None
            return owner(config=replace(self), **parts)

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
        choose_attention(config)
        if config.fault_tolerance.enable:
            # Curves are drawn from the run's events, by one process for all groups: report/scalars.py.
            config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
            config.checkpoint = of_run(config.checkpoint, from_snapshots=config.snapshot.enable)
            config.comm.save_traces_folder += f"/group-{config.fault_tolerance.group_id}"
            os.environ.setdefault("RUST_LOG", "warn")  # torchft tells of every quorum otherwise
            self._open_run(config)
        super().__init__(config)
        if on_cpu:
            cpu.sum_only_collectives(self.model_parts)
        self.checks = self.witnesses = None
        if config.attention_check.enable:
            self.checks = attention.attach(
                self.model_parts,
                config.attention_check,
                rank=int(os.environ["RANK"]),
                seed=config.debug.seed or 0,
                recorded=not private.computes_eagerly(self),
            )
            if self.checks.recorded:
                attention.record_both(self, self.checks)
        if config.fault_tolerance.enable:
            self._prepare(config)
            self.events.emit(
                "worker_ready",
                incarnation=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
                pid=os.getpid(),
                startup_s=round(time.monotonic() - begin, 3),
            )

    def _open_run(self, config: Config) -> None:
        """This rank's place in the run directory; before torchtitan builds anything, so that a start that takes too
        long is seen."""
        ft, rank = config.fault_tolerance, int(os.environ["RANK"])
        if reason := why_not(ft.process_group):
            # Once more: a file may be checked on a login node, or by nobody.
            logger.error(f'[fault_tolerance] process_group = "{ft.process_group}" {reason}: set it to "gloo"')
            raise SystemExit(USAGE_EXIT)
        self._ft = ft
        self._run_dir = Path(config.dump_folder)
        self._host = ft.bind_host or socket.gethostname()
        if self._host in ("localhost", "127.0.0.1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.events = EventLog(self._run_dir, ft.group_id, rank, "worker")
        self.files = RankFiles(
            self._run_dir,
            ft.group_id,
            rank,
            groups=ft.groups,
            steps=config.semi_sync.commits(config.training.steps),
            stall_timeout_s=ft.stall_timeout_s,
        )
        self.files.beat(STARTUP, 0)
        self._token = run_token(self._run_dir)
        self.snapshots = None
        if config.snapshot.enable:
            self.snapshots = Snapshots(
                self._run_dir,
                ft.group_id,
                ft.groups,
                self._host,
                config.snapshot,
                self._token,
                self.events,
                ft.encrypt,
            )

    def _prepare(self, config: Config) -> None:
        """What takes part in the step protocol, built on torchtitan's parts."""
        ft, dims = self._ft, self.parallel_dims
        self.seed = config.debug.seed or 0
        self.dp_rank, dp_size = 0, 1
        if dims.dp_enabled:
            mesh = dims.get_mesh("batch")
            self.dp_rank, dp_size = mesh.get_local_rank(), mesh.size()
        self.slots = self.gradient_accumulation_steps
        if not isinstance(self.dataloader, SlotSource):
            raise TypeError(
                f"{type(self.dataloader).__name__} cannot be read by slot: leave [data] source to Everstep's config"
            )
        self.source = self.dataloader
        assert config.model_spec is not None
        self.source.require_vocab(decoder_vocab_size(config.model_spec))
        self.source.open_slots(self.slots * self.num_pipeline_parallel_microbatches, self.dp_rank, dp_size)
        self.tokens_per_step = config.training.local_batch_size * config.training.seq_len * dp_size * self.slots
        self.state = TrainingState(self.model_parts, self.optimizers, self.lr_schedulers, self)
        if self.snapshots is not None:
            self.snapshots.shards = self.state.shards()
            if isinstance(self.checkpointer, SnapshotCheckpointManager):
                self.checkpointer.export_with(self.snapshots.start_export, all_in_group)
        self._streams = streams_of(self.device)
        self._reducer: GradientReducer | FragmentReducer = GradientReducer(
            (p for part in self.model_parts for p in part.parameters() if p.requires_grad),
            int(ft.bucket_mb * 2**20),
            self._streams,
            hooks=self._backward_runs_hooks(),
            fixed=not private.computes_eagerly(self),
        )
        if self.checks is not None and self.asks_others:
            self.witnesses = Witnesses(self.checks, ft.group_id, self.events)
        self.skips_poison = ft.on_poison == "skip"
        self._kept_metrics = KeptMetrics()
        self.metrics_processor.logger = self._kept_metrics
        self.history = 0
        self._not_on_disk: set[str] = set()
        self._commits, self._warned = 0, False
        self.open_step(float(self.tokens_per_step))
        if ft.allow_faults:
            WorkerFaults(self, self._run_dir, ft.group_id, dist.get_rank())
        patience = timedelta(seconds=ft.heal_timeout_s)
        self._door = Door(self._host, self._token, patience, self._whose(config), ft.encrypt)

    def _backward_runs_hooks(self) -> bool:
        """Whether a gradient's hook runs each time something is added to it. A replayed CUDA graph runs none, and one
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
        driver, membership = self._join_run()
        with self.config.profiler.build(
            global_step=self.step, base_folder=self.config.dump_folder, leaf_folder=f"group-{self._ft.group_id}"
        ) as profiler:
            self._profiler = profiler
            end = driver.run()
        if end is End.FENCED:
            self.events.emit("fenced", self.committed, claim=os.environ.get("EVERSTEP_FENCE", ""))
            os._exit(FENCED_EXIT)
        leaves = end is End.LEFT
        self.events.emit("left" if leaves else "training_done", self.committed)
        self.files.beat(DONE, self.committed)
        if membership is not None:
            membership.leave()
        self._door.shutdown()
        if self.snapshots is not None:
            # A last checkpoint on disk holds the same state; a group that leaves alone has given its own up.
            self.snapshots.close(over=leaves or not self.goes_on() or self.config.checkpoint.enable)
        logger.info(f"Left the run after step {self.step}, as asked" if leaves else "Training completed")

    def _whose(self, config: Config) -> Whose:
        """What this rank's state is of: a joiner takes it from the same rank of a group that is laid out alike."""
        degrees = (f"{key} {value}" for key, value in asdict(config.parallelism).items() if key.endswith("degree"))
        return Whose(run_id(self._token), dist.get_rank(), f"{dist.get_world_size()} ranks, {', '.join(degrees)}")

    def _join_run(self) -> tuple[Driver, Membership | None]:
        """Announce this rank's group. From here on the other groups wait for it in every quorum."""
        ft = self._ft
        waits = timedelta(seconds=ft.quorum_timeout_s + ft.stall_timeout_s)
        ranks = GroupRanks(waits)
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self.column = RankColumn(
            ft.process_group,
            column=ranks.rank,
            host=self._host,
            connect_timeout=timedelta(seconds=ft.connect_timeout_s),
            reduce_timeout=timedelta(seconds=self.longest_sum_s),
            token=self._token,
            streams=self._streams,
        )
        self.column.warm(store, timedelta(seconds=ft.startup_timeout_s))
        life = ranks.broadcast(uuid.uuid4().hex.encode()).decode()
        if isinstance(self.checkpointer, RunCheckpointManager) and self.checkpointer.enable:
            self.checkpointer.write_aside_as(ft.group_id, life)
        membership = None
        if ranks.rank == 0:
            given = ft.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE", "")
            membership = Membership(
                group=ft.group_id,
                life=life,
                token=self._token,
                find_lighthouse=lambda: published_address(self._run_dir) or given,
                connect_timeout=timedelta(seconds=ft.quorum_timeout_s),
                heartbeat_timeout_s=ft.heartbeat_timeout_s,
                gated=lambda: bool(published_address(self._run_dir)),
            )
        protocol = StepProtocol(
            group=ft.group_id,
            life=life,
            slots=self.shares,
            on_loss=self.on_loss,
            work=self,
            reducer=self._reducer,
            ranks=ranks,
            membership=membership,
            sums=self.column,
            door=self._door,
            store=store,
            timeouts=Timeouts(
                quorum=timedelta(seconds=ft.quorum_timeout_s),
                reduce=timedelta(seconds=self.longest_sum_s),
                # Whoever waits longer would be taken for stalled.
                compute=timedelta(seconds=0.8 * ft.stall_timeout_s),
                join=timedelta(seconds=ft.join_timeout_s),
                give_up=timedelta(seconds=ft.give_up_after_s),
            ),
            clock=HostClock(),
            files=self.files,
            events=self.events,
            homes=self.homes,
            adopt_after_s=self.config.semi_sync.adopt_after_s,
        )
        driver = Driver(
            group=ft.group_id,
            protocol=protocol,
            work=self,
            clock=HostClock(),
            files=self.files,
            events=self.events,
            give_up=timedelta(seconds=ft.give_up_after_s),
        )
        return driver, membership

    @property
    def on_loss(self) -> ledger.OnLoss:
        """Of `ledger.plan`."""
        return self._ft.on_loss

    @property
    def homes(self) -> int:
        """Of `ledger.plan`."""
        return 0

    @property
    def longest_sum_s(self) -> float:
        """Longest wait for one sum over the groups."""
        return self._ft.reduce_timeout_s

    # The state of a run that has none

    def restore(self) -> tuple[int, int]:
        """No group has a state: take the newest that the keepers or the disk have, or start."""
        if not self._restore_from_memory():
            keys = self._keys_on_disk()
            if keys is not None:
                self._not_on_disk = {key for key in (HISTORY, DATA_BEGAN) if f"train_state.{key}" not in keys}
            found = self.checkpointer.load(step=self.config.checkpoint.load_step)
            self._not_on_disk = set()
            self.history = self.history or ledger.extend(0, self.step, "restored")
            if DATALOADER in self.config.checkpoint.exclude_from_loading:
                self.source.began_after = began_after(self._run_dir, self.source.fingerprint(), self.step)
            self.source.committed(self.step)
            if self.checks is not None:
                self.checks.weights_changed()
            self.announce("disk" if found and self.step else "fresh")
        return self.committed, self.history

    def _restore_from_memory(self) -> bool:
        """Take the newest snapshot that the keepers hold whole, if no checkpoint on disk is as new."""
        if self.snapshots is None or self.config.checkpoint.load_step != -1:
            return False
        state = self.snapshots.recover(self.serve(), self._disk_step())
        if state is None:
            return False
        self.take(state, "memory")
        return True

    def _disk_step(self) -> int | None:
        """The newest checkpoint that torchtitan would load."""
        if not self.config.checkpoint.enable or not isinstance(self.checkpointer, CheckpointManager):
            return None
        step = private.newest_checkpoint(self.checkpointer)
        return step if step >= 0 else None

    def _keys_on_disk(self) -> Collection[str] | None:
        """What the checkpoint that is going to be loaded has; torchtitan's own lack some of ours, and a key that is not
        there cannot be loaded. None: no checkpoint of this run, or one in another format."""
        step = self.config.checkpoint.load_step
        step = self._disk_step() if step == -1 else step
        if step is None or not isinstance(self.checkpointer, CheckpointManager):
            return None
        folder = Path(self.checkpointer.folder) / f"step-{step}"
        if not (folder / ".metadata").exists():
            return None
        return FileSystemReader(folder).read_metadata().state_dict_metadata

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's counters, the history of the state that they belong to, and the step after which the data
        began."""
        counters = super().state_dict()
        if self.config.fault_tolerance.enable:
            own = {HISTORY: self.history, DATA_BEGAN: self.source.began_after}
            counters |= {key: value for key, value in own.items() if key not in self._not_on_disk}
        return counters

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.history = int(state_dict.get(HISTORY, 0))
        if self.config.fault_tolerance.enable:
            self.source.began_after = int(state_dict.get(DATA_BEGAN, 0))

    # A commit

    def goes_on(self) -> bool:
        return self.should_continue_training()

    def checksum(self) -> int | None:
        interval = self._ft.audit_interval
        due = not self._commits or (interval and self.committed % interval == 0)
        return sum_in_group(self.state.checksum()) if due else None

    def apply(self, commit: Commit) -> None:
        """The optimizer step of a step that all groups agree on, and all that comes with it."""
        self.gc_handler.run(self.step)
        begin = time.monotonic()
        config = self.config
        lr_metrics = self.lr_schedulers.get_metrics()
        tokens, loss = float(commit.tokens.sum()), float(commit.loss.sum())
        if not tokens:
            logger.error(f"Every slot of step {commit.step} is skipped as poison: there is nothing to go on with")
            raise SystemExit(HOPELESS_EXIT)
        mean_loss = loss / tokens
        if not math.isfinite(mean_loss):
            self.events.emit("diverged", commit.step, loss=mean_loss)
            logger.error(f"The loss of step {commit.step} is {mean_loss}: training diverged and stops here")
            # Every group sees the same, and would again after a restart.
            raise SystemExit(HOPELESS_EXIT)
        unfit = self.witnesses is not None and self.witnesses.answered(commit)
        grad_norm = self.update(commit, tokens)
        self.history = commit.history
        self.data_read(commit.step)
        if self.snapshots is not None:
            words, keep = self.words(commit.extra), self._checkpoint_from_memory(commit)
            self.snapshots.committed(commit, words, self.serve, keep)
        if self.checks is not None and (plan := self.checks.news()):
            self.events.emit("attention_schedule", self.committed, coverage=str(self.checks.coverage), **plan)
        self.events.emit(
            "commit",
            commit.step,
            attempt=commit.attempts,
            owners=commit.owners,
            groups=commit.groups,
            loss=mean_loss,
            tokens=tokens,
            grad_norm=grad_norm,
            lr=next(iter(lr_metrics.values())),
            took_s=round(commit.took_s + time.monotonic() - begin, 4),
            compute_s=round(commit.compute_s, 4),
            reduce_s=round(commit.reduce_s, 4),
            quorum_id=commit.quorum_id,
            history=f"{commit.history:x}",
            parent=f"{commit.parent:x}",
            coverage_ok=commit.once,
            metrics=self._measure(commit, mean_loss, grad_norm, lr_metrics),
            **self.told_of(commit),
        )
        if commit.saver == self._ft.group_id and self.should_continue_training() and not commit.all_leave:
            self._save()
        if config.validator.enable and self.validator.should_validate(self.step):
            self._validate(tell=commit.saver == self._ft.group_id)
        if unfit:  # what it computed of this step is in the commit, and nothing it computes is needed now
            raise SystemExit(UNFIT_EXIT)
        self._commits += 1
        if self._commits > WARM_COMMITS and not self._warned and (advice := advice_on_waits(commit, self._ft)):
            self._warned = True
            logger.warning(advice)
        self._profiler.step()
        if self._commits == 1:
            dist_utils.set_pg_timeouts(
                timeout=timedelta(seconds=config.comm.train_timeout_seconds), parallel_dims=self.parallel_dims
            )

    def update(self, commit: Commit, tokens: float) -> float:
        """The optimizer step of a commit with so many valid tokens; the norm of its gradient, before it was clipped."""
        self._reducer.assign(self.nominal_tokens / tokens)
        self.assign_extra(commit.extra)
        grad_norm = self.step_optimizer(commit.step, OPTIMIZER_SLOT)
        self.step = commit.step
        self.ntokens_seen += self.tokens_per_step
        return float(grad_norm)

    def step_optimizer(self, step: int, seeded_as: int) -> torch.Tensor:
        """Clip the gradients and step with them; their norm before. `seeded_as`: a slot's number, for `slot_seed`."""
        torch.manual_seed(slot_seed(self.seed, step, seeded_as, self.dp_rank))
        grad_norm = self.clip_gradients(self.config.training.max_norm)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if self.checks is not None:
            self.checks.committed()
        return grad_norm

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients' norm over the whole group; what it was."""
        return dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )

    def told_of(self, commit: Commit) -> dict[str, Any]:
        """Further fields of a commit's event."""
        return {}

    def _measure(
        self, commit: Commit, mean_loss: float, grad_norm: float, lr_metrics: dict[str, float]
    ) -> dict[str, float]:
        """What torchtitan measures of this rank, by torchtitan's names, at the steps at which it would log it; its line
        goes to the rank's log."""
        if not self.metrics_processor.should_log(self.step):
            return {}
        counted = commit.tokens > 0
        worst = float((commit.loss[counted] / commit.tokens[counted]).max())
        extra = {"n_tokens_seen": self.ntokens_seen, **lr_metrics}
        self.metrics_processor.data_loading_times.append(0.0)
        self.metrics_processor.log(self.step, mean_loss, worst, grad_norm, extra_metrics=extra)
        return {name: float(value) for name, value in self._kept_metrics.metrics.items()}

    def _validate(self, *, tell: bool) -> None:
        """Every group validates, for the others would wait for one; one group `tell`s what came out."""
        self.files.beat("validate", self.committed)
        self.validator.validate(self.model_parts, self.step)
        knows = dist.get_rank() == private.metrics_rank(
            parallel_dims=self.parallel_dims, pp_schedule=self.config.parallelism.pipeline_parallel_schedule
        )
        if tell and knows:
            self.events.emit("validation", self.committed, loss=self._kept_metrics.metrics[VALIDATION_LOSS])

    def _checkpoint_from_memory(self, commit: Commit) -> bool:
        """Whether a checkpoint is due that is written from the snapshots; the same in all groups."""
        goes_on = self.should_continue_training() and not commit.all_leave
        return goes_on and isinstance(self.checkpointer, SnapshotCheckpointManager) and self.checkpointer.due(self.step)

    def _save(self, *, last: bool = False) -> None:
        self.files.beat("checkpoint", self.committed)
        begin = time.monotonic()
        try:
            saved = self.checkpointer.save(self.step, last_step=last)
        except CheckpointException as error:  # the same on all ranks of the group
            if last:
                raise
            why, _ = next(iter(error.failures.values()))
            what = f"{self.config.checkpoint.folder} of step {self.step}: {type(why).__name__}: {why}"
            logger.warning(f"No checkpoint in {what}. Is there room? Training goes on.")
            self.checkpointer.save_future = None
            return
        if saved:
            self.events.emit("checkpoint_saved", self.committed, took_s=round(time.monotonic() - begin, 3))

    def save_last(self) -> None:
        """The last checkpoint of the run, or of this part of it."""
        if self.goes_on() and self.config.checkpoint.enable:
            # Training goes on from here one day: the optimizer has to be in it.
            # pyrefly: ignore[missing-attribute] the base class has it in its Config only
            self.checkpointer.last_save_model_only = False
            # pyrefly: ignore[missing-attribute]
            self.checkpointer.last_save_in_hf = False
        self._save(last=True)
