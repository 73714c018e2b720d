"""torchtitan's trainer as one rank of one replica group."""

import math
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan import trainer as titan
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.tools.logging import logger

from everstep.attention.guard import Checks
from everstep.attention.section import AttentionCheck
from everstep.config.binding import bind_data
from everstep.config.checks import check_config
from everstep.config.sections import Data, FaultTolerance, Job
from everstep.data.slots import SlotSource
from everstep.quorum.heal import HealServer
from everstep.quorum.membership import Membership, incarnation
from everstep.quorum.process_group import CrossGroup
from everstep.run import fence
from everstep.run.address import published_address
from everstep.run.beats import DONE, STARTUP, Heartbeat, beats_of_groups
from everstep.run.directory import stop_file
from everstep.run.events import EventLog
from everstep.run.exits import FENCED_EXIT, HOPELESS_EXIT
from everstep.run.token import run_token
from everstep.snapshot.section import Snapshot
from everstep.step import finish
from everstep.step.protocol import Blank, Commit, Left, OutOfData, StepProtocol, Timeouts
from everstep.step.reduction import GradientReducer
from everstep.titan import attention, cpu
from everstep.titan.checkpoints import SnapshotCheckpointManager, from_snapshots
from everstep.titan.snapshots import Snapshots
from everstep.titan.state import TrainingState, slot_seed
from everstep.titan.work import TitanWork, all_in_group, sum_in_group
from everstep.titan.worker_faults import Saboteur

OPTIMIZER_SLOT = -1
AWAY = (DONE, STARTUP)
"""Phases of a group that has no state to offer."""


class EverstepTrainer(titan.Trainer):
    """A torchtitan trainer whose optimizer steps survive the death of any replica group.

    With `fault_tolerance.enable = false` this is torchtitan's trainer. Otherwise `train` runs the step protocol
    (`everstep.step.protocol`): step, learning rate, data and metrics advance on commits only.
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
            assert config.model_spec is not None
            if not config.attention_check.enable:  # it brings an attention of its own
                cpu.use_plain_attention(config.model_spec.model)
        attention.apply(config, config.attention_check)
        if config.fault_tolerance.enable:
            # Curves are drawn from the run's events, by one process for all groups: report/scalars.py.
            config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
            if config.snapshot.enable:
                config.checkpoint = from_snapshots(config.checkpoint)
            os.environ.setdefault("RUST_LOG", "warn")  # torchft tells of every quorum otherwise
            self._open_run(config)
        super().__init__(config)
        if on_cpu:
            cpu.sum_only_collectives(self.model_parts)
        self.checks: Checks | None = None
        if config.attention_check.enable:
            self.checks = attention.attach(
                self.model_parts, config.attention_check, rank=int(os.environ["RANK"]), seed=config.debug.seed or 0
            )
        if config.fault_tolerance.enable:
            self._prepare(config)
            self.events.emit(
                "worker_ready",
                incarnation=incarnation(),
                pid=os.getpid(),
                startup_s=round(time.monotonic() - begin, 3),
            )

    def _open_run(self, config: Config) -> None:
        """This rank's place in the run directory; before torchtitan builds anything, so that a start that takes too
        long is seen."""
        ft, rank = config.fault_tolerance, int(os.environ["RANK"])
        self._ft = ft
        self._run_dir = Path(config.dump_folder)
        self._host = ft.bind_host or socket.gethostname()
        if self._host in ("localhost", "127.0.0.1"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.events = EventLog(self._run_dir, ft.group_id, rank, "worker")
        self._heartbeat = Heartbeat(self._run_dir, ft.group_id, rank)
        self._heartbeat.beat(STARTUP, 0)
        self._asked_to_leave = False
        self._token = run_token(self._run_dir)
        self.snapshots: Snapshots | None = None
        if config.snapshot.enable:
            self.snapshots = Snapshots(
                self._run_dir, ft.group_id, self._host, config.snapshot, self._token, self.events
            )
        signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_terminate(self, signum: int, frame: Any) -> None:
        self._asked_to_leave = True

    def _prepare(self, config: Config) -> None:
        """What takes part in the step protocol, built on torchtitan's parts."""
        ft, dims = self._ft, self.parallel_dims
        self.seed = config.debug.seed or 0
        self.dp_rank, dp_size = 0, 1
        if dims.dp_enabled:
            mesh = dims.get_mesh("batch")
            self.dp_rank, dp_size = mesh.get_local_rank(), mesh.size()
        self._slots = self.gradient_accumulation_steps
        if not isinstance(self.dataloader, SlotSource):
            raise TypeError(
                f"{type(self.dataloader).__name__} cannot be read by slot: leave [data] source to Everstep's config"
            )
        self.source: SlotSource = self.dataloader
        assert config.model_spec is not None
        self.source.require_vocab(decoder_vocab_size(config.model_spec))
        self.source.open_slots(self._slots, self.dp_rank, dp_size)
        self.tokens_per_step = config.training.local_batch_size * config.training.seq_len * dp_size * self._slots
        self._state = TrainingState(self.model_parts, self.optimizers, self.lr_schedulers, self)
        if self.snapshots is not None:
            self.snapshots.shards = self._state.shards()
            if isinstance(self.checkpointer, SnapshotCheckpointManager):
                self.checkpointer.export_with(self.snapshots.start_export, all_in_group)
        self._reducer = GradientReducer(
            (p for part in self.model_parts for p in part.parameters() if p.requires_grad),
            int(ft.bucket_mb * 2**20),
        )
        self._work = TitanWork(self, self._slots, self._state)
        if ft.allow_faults:
            Saboteur(self, ft.group_id, dist.get_rank())
        self._heal_server = HealServer(self._host, self._token, timedelta(seconds=ft.heal_timeout_s))

    def _join_run(self) -> StepProtocol:
        """Announce this rank's group. From here on the other groups wait for it in every quorum."""
        ft = self._ft
        given = ft.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE", "")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._membership = Membership(
            group=ft.group_id,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store=dist.TCPStore(host, port, is_master=False, wait_for_workers=False),
            incarnation=incarnation(),
            store_address=f"{host}:{port}",
            find_lighthouse=lambda: published_address(self._run_dir) or given,
            host=self._host,
            connect_timeout=timedelta(seconds=ft.quorum_timeout_s),
        )
        return StepProtocol(
            group=ft.group_id,
            slots=self._slots,
            on_loss=ft.on_loss,
            work=self._work,
            reducer=self._reducer,
            membership=self._membership,
            cross=CrossGroup(
                ft.process_group,
                host=self._host,
                connect_timeout=timedelta(seconds=ft.connect_timeout_s),
                reduce_timeout=timedelta(seconds=ft.reduce_timeout_s),
            ),
            heal_server=self._heal_server,
            token=self._token,
            timeouts=Timeouts(
                quorum=timedelta(seconds=ft.quorum_timeout_s),
                reduce=timedelta(seconds=ft.reduce_timeout_s),
                heal=timedelta(seconds=ft.heal_timeout_s),
                # Whoever waits longer would be taken for stalled.
                compute=timedelta(seconds=0.8 * ft.stall_timeout_s),
                give_up=timedelta(seconds=ft.give_up_after_s),
            ),
            events=self.events,
            beat=self._beat,
            all_in_group=all_in_group,
            # A stop is a level: the file is there for a rank that missed the signal.
            asked_to_leave=lambda: self._asked_to_leave or (dist.get_rank() == 0 and stop_file(self._run_dir).exists()),
            device=self.device if ft.process_group == "nccl" else torch.device("cpu"),
        )

    def _beat(self, phase: str, step: int) -> None:
        """A sign of life; and before a quorum the last look whether this start of the group is the one that counts."""
        claim = os.environ.get(fence.ENVIRONMENT) if phase == "quorum" else None
        if claim and not fence.holds(self._run_dir, self._ft.group_id, fence.Claim.parse(claim)):
            self.events.emit("fenced", step, claim=claim)
            os._exit(FENCED_EXIT)
        self._heartbeat.beat(phase, step)

    def train(self) -> None:
        if not self.config.fault_tolerance.enable:
            super().train()
            return
        self._protocol = self._join_run()
        self._commits = 0
        leaves, over = False, False
        with self.config.profiler.build(global_step=self.step, base_folder=self.config.dump_folder) as profiler:
            while self.should_continue_training() and not leaves and not over:
                self.gc_handler.run(self.step)
                try:
                    commit = self._protocol.next()
                except Blank:
                    over = all_in_group(finish.is_over(self._run_dir, self.config.training.steps))
                    leaves = self._protocol.leaving
                    if not over and not leaves:
                        self._restore_or_wait()
                    continue
                except Left:
                    leaves = True
                    continue
                except OutOfData:
                    logger.warning(f"Ran out of data after step {self.step}")
                    break
                self._apply(commit)
                profiler.step()
                over = commit.all_leave
                leaves = self._protocol.leaving and not over
        if not leaves and self._commits:
            self._finish()
        self.events.emit("left" if leaves else "training_done", self.step)
        self._heartbeat.beat(DONE, self.step)
        self._membership.leave()
        self._heal_server.shutdown()
        if self.snapshots is not None:
            # A last checkpoint on disk holds the same state; a group that leaves alone has given its own up.
            self.snapshots.close(over=leaves or not self.should_continue_training() or self.config.checkpoint.enable)
        logger.info(f"Left the run after step {self.step}, as asked" if leaves else "Training completed")

    def _restore_or_wait(self) -> None:
        """No group of the quorum has a state; but one that is in no quorum may: it hangs or is busy, and its watchdog
        decides. Going back to the disk now would undo its steps."""
        others = sorted(
            group
            for group, beat, age_s in beats_of_groups(self._run_dir)
            if group != self._ft.group_id
            and beat.step > 0
            and beat.phase not in AWAY
            and age_s < self._ft.stall_timeout_s
        )
        if all_in_group(not others):
            self._restore()
        else:
            self.events.emit("waiting_for_state", groups=others)
            time.sleep(1.0)

    def _restore(self) -> None:
        """No group has a state: take the newest checkpoint on disk, or start."""
        self._heartbeat.beat("restore", self.step)
        if self._restore_from_memory():
            return
        found = self.checkpointer.load(step=self.config.checkpoint.load_step)
        self.source.committed(self.step)
        if self.checks is not None:
            self.checks.weights_changed()
        self._protocol.restored(self.step)
        self.announce("disk" if found and self.step else "fresh")
        self._protocol.checksum = self._audit_checksum()

    def _restore_from_memory(self) -> bool:
        """Take the newest snapshot that the keepers hold whole, if no checkpoint on disk is as new."""
        if self.snapshots is None or self.config.checkpoint.load_step != -1:
            return False
        state = self.snapshots.recover(self._work.serve(), self._disk_step())
        if state is None:
            return False
        self._work.take(state, "memory")
        self._protocol.restored(self.step)
        self._protocol.checksum = self._audit_checksum()
        return True

    def _disk_step(self) -> int | None:
        """The newest checkpoint that torchtitan would load."""
        if not self.config.checkpoint.enable or not isinstance(self.checkpointer, CheckpointManager):
            return None
        step = self.checkpointer._find_load_step()
        return step if step >= 0 else None

    def announce(self, source: str) -> None:
        """Say where this group's state came from."""
        self.events.emit(
            "training_started",
            self.step + 1,
            source=source,
            slots=self._slots,
            global_batch_size=self.config.training.global_batch_size,
            ranks=dist.get_world_size(),
        )

    def _audit_checksum(self) -> int:
        return sum_in_group(self._state.checksum())

    def _apply(self, commit: Commit) -> None:
        """The optimizer step of a step that all groups agree on, and all that comes with it."""
        begin = time.monotonic()
        config = self.config
        lr_metrics = self.lr_schedulers.get_metrics()
        tokens, loss = float(commit.tokens.sum()), float(commit.loss.sum())
        mean_loss = loss / tokens
        if not math.isfinite(mean_loss):
            self.events.emit("diverged", commit.step, loss=str(mean_loss))
            logger.error(f"The loss of step {commit.step} is {mean_loss}: training diverged and stops here")
            # Every group sees the same, and would again after a restart.
            raise SystemExit(HOPELESS_EXIT)
        self._reducer.assign(self._work.nominal_tokens / tokens)
        self._work.assign_expert_loads(commit.extra)
        torch.manual_seed(slot_seed(self.seed, commit.step, OPTIMIZER_SLOT, self.dp_rank))
        grad_norm = dist_utils.clip_grad_norm_(
            [p for part in self.model_parts for p in part.parameters()],
            config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.step = commit.step
        self.ntokens_seen += self.tokens_per_step
        self.source.committed(self.step)
        self._protocol.committed()
        if self.snapshots is not None:
            self.snapshots.committed(commit, self._work.serve, self._checkpoint_from_memory(commit))
        if self.checks is not None:
            self.checks.committed(self.step)
        if self._ft.audit_interval and self.step % self._ft.audit_interval == 0:
            self._protocol.checksum = self._audit_checksum()
        self.events.emit(
            "commit",
            self.step,
            attempt=commit.attempts,
            owners=commit.owners,
            groups=commit.groups,
            loss=mean_loss,
            tokens=tokens,
            grad_norm=float(grad_norm),
            lr=next(iter(lr_metrics.values())),
            took_s=round(commit.took_s + time.monotonic() - begin, 4),
            compute_s=round(commit.compute_s, 4),
            reduce_s=round(commit.reduce_s, 4),
            quorum_id=commit.quorum_id,
            coverage_ok=commit.once,
        )
        if self.metrics_processor.should_log(self.step):
            counted = commit.tokens > 0
            worst = float((commit.loss[counted] / commit.tokens[counted]).max())
            extra = {"n_tokens_seen": self.ntokens_seen, **lr_metrics}
            self.metrics_processor.data_loading_times.append(0.0)
            self.metrics_processor.log(self.step, mean_loss, worst, float(grad_norm), extra_metrics=extra)
        if commit.saver == self._ft.group_id and self.should_continue_training() and not commit.all_leave:
            self._save()
        if config.validator.enable and self.validator.should_validate(self.step):
            self._heartbeat.beat("validate", self.step)
            self.validator.validate(self.model_parts, self.step)
        self._commits += 1
        if self._commits == 1:
            dist_utils.set_pg_timeouts(
                timeout=timedelta(seconds=config.comm.train_timeout_seconds), parallel_dims=self.parallel_dims
            )

    def _checkpoint_from_memory(self, commit: Commit) -> bool:
        """Whether a checkpoint is due that is written from the snapshots; the same in all groups."""
        goes_on = self.should_continue_training() and not commit.all_leave
        return goes_on and isinstance(self.checkpointer, SnapshotCheckpointManager) and self.checkpointer.due(self.step)

    def _save(self, *, last: bool = False) -> None:
        self._heartbeat.beat("checkpoint", self.step)
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
            self.events.emit("checkpoint_saved", self.step, took_s=round(time.monotonic() - begin, 3))

    def _finish(self) -> None:
        """The last checkpoint of the run, or of this part of it, written by one group while the others stand by."""
        complete = not self.should_continue_training()

        def save() -> None:
            if not complete and self.config.checkpoint.enable:
                # Training goes on from here one day: the optimizer has to be in it.
                # pyrefly: ignore[missing-attribute] the base class has it in its Config only
                self.checkpointer.last_save_model_only = False
                # pyrefly: ignore[missing-attribute]
                self.checkpointer.last_save_in_hf = False
            self._save(last=True)

        finish.finish(
            self._run_dir,
            step=self.step,
            membership=self._membership,
            save=save,
            beat=self._heartbeat.beat,
            all_in_group=all_in_group,
            timeout=timedelta(seconds=self._ft.quorum_timeout_s),
            give_up=timedelta(seconds=self._ft.give_up_after_s),
        )
