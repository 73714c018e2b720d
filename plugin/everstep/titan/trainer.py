"""The trainer of one rank: torchtitan's, extended to train as part of a replica group."""

import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan import trainer as titan
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_type

from everstep.attention.guard import Checks
from everstep.attention.section import AttentionCheck
from everstep.config.checks import problems
from everstep.config.errors import ConfigError
from everstep.config.sections import Data, FaultTolerance, Job
from everstep.quorum.streams import streams_of
from everstep.run import fence
from everstep.run.beats import STARTUP
from everstep.run.directory import stop_file
from everstep.run.exits import FENCED_EXIT, USAGE_EXIT, TrainerEnds
from everstep.semi.section import SemiSync
from everstep.snapshot.section import SnapshotSection
from everstep.snapshot.segment import run_id
from everstep.step.attempt import Outcome
from everstep.step.interfaces import OutOfData
from everstep.titan import attention, cpu, exactness
from everstep.titan.data.binding import bind_data
from everstep.titan.disk import DATA, DATA_BEGAN, HISTORY, OURS, PARAMETERS, ROUNDS, DiskCheckpoints, save_via_draft
from everstep.titan.group import require_members
from everstep.titan.load import replicas_as_groups
from everstep.titan.machine import choose_attention
from everstep.titan.names import DATALOADER
from everstep.titan.participation import Participation
from everstep.titan.rounds import Rounds
from everstep.titan.run_context import open_run_context
from everstep.titan.slot_computer import SlotComputer
from everstep.titan.steps import Steps


class EverstepTrainer(titan.Trainer):
    """A torchtitan trainer whose optimizer steps survive the death of any replica group.

    With `fault_tolerance.enable = false` it trains as torchtitan's own trainer does. Otherwise `train` runs the step
    protocol (`everstep.step`), which calls `work`. Step, learning rate, data and metrics advance on commits only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Trainer.Config):
        job: Job = field(default_factory=Job)
        """The torchtitan config that the TOML file builds on."""

        fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
        """Replica groups, quorums, and how a run survives failures."""

        data: Data = field(default_factory=Data)
        """Where the training tokens come from."""

        snapshot: SnapshotSection = field(default_factory=SnapshotSection)
        """Copies of the training state in host memory, kept by processes that outlive the trainer."""

        attention_check: AttentionCheck = field(default_factory=AttentionCheck)
        """Checks of the attention's arithmetic during training."""

        semi_sync: SemiSync = field(default_factory=SemiSync)
        """Local SGD and DiLoCo: workers train independently for some steps between two synchronisations."""

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute] torchtitan's declares its own Config

    def __init__(self, config: Config) -> None:
        begin = time.monotonic()
        ft = config.fault_tolerance
        if told := replicas_as_groups(config):  # torchrun: torchtitan has applied the command line only now
            logger.warning(told)
        try:  # checked here too: it may have been checked on another machine, or not at all
            for problem in problems(config):
                raise ConfigError(problem.message)
            bind_data(config)
            if ft.enable and ft.exact:
                exactness.prepare(config)
            choose_attention(config)
        except ValueError as error:
            raise TrainerEnds(USAGE_EXIT, str(error)) from error
        on_cpu = not cpu.has_accelerator()
        if on_cpu and device_type != "cpu":
            raise TrainerEnds(USAGE_EXIT, "PyTorch sees no accelerator; -m everstep.train trains on the CPU")
        if on_cpu:
            cpu.keep_freed_memory()
        if ft.enable:
            self.context = open_run_context(config)
        super().__init__(config)
        if on_cpu:
            cpu.sum_only_collectives(self.model_parts)
        self.profiler: Any = None
        """torchtitan's profiler, once `train` has built it."""
        if not ft.enable:
            return
        run = self.context
        self.checks: Checks | None = None
        if config.attention_check.enable:
            self.checks = attention.attach(
                self.model_parts, config.attention_check, rank=int(os.environ["RANK"]), seed=config.debug.seed or 0
            )
        if ft.exact:
            exactness.require_same(run.run_dir, exactness.fingerprint(config, self.device))
        self.history = 0
        self.data_told = ""
        """`data` as recorded in the state that was loaded last, from a checkpoint, a snapshot or another group."""
        self.own_keys = OURS
        """The keys of `OURS` that `state_dict` returns; while a checkpoint is loaded, only those that it contains."""
        self.parameters_told = ""
        """With exact sums, `work.parameters()` after the last commit, or as recorded in the state that was loaded
        since; empty if unknown."""
        self.streams = streams_of(self.device)
        self.slots = SlotComputer(self)
        self.participation = Participation(self)
        self.disk = DiskCheckpoints(self)
        self.work = Rounds(self) if config.semi_sync.enabled else Steps(self)
        if run.snapshots is not None:
            run.snapshots.shards = self.work.state.shards()
        parts = self.work.parts if isinstance(self.work, Rounds) else None
        writer = f"{ft.group_id}-{run_id(run.token)}"
        save_via_draft(self.checkpointer, writer, self.participation.life, parts)
        run.events.emit(
            "worker_ready",
            incarnation=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            pid=os.getpid(),
            startup_s=round(time.monotonic() - begin, 3),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return torchtitan's counters and, with `fault_tolerance.enable`, our own: the state's history, the step after
        which the data began, `data`, a checksum of the parameters (exact sums), and what workers' states need."""
        counters = super().state_dict()
        if not self.config.fault_tolerance.enable:
            return counters
        ours = {HISTORY: self.history, DATA_BEGAN: self.slots.source.began_after, DATA: self.data}
        if self.config.fault_tolerance.exact:
            ours[PARAMETERS] = self.parameters_told
        if self.config.semi_sync.enabled:
            ours[ROUNDS] = self.config.semi_sync.needs
        return counters | {key: value for key, value in ours.items() if key in self.own_keys}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.config.fault_tolerance.enable:
            self.history = int(state_dict.get(HISTORY, 0))
            self.slots.source.began_after = int(state_dict.get(DATA_BEGAN, 0))
            self.data_told = str(state_dict.get(DATA, ""))
            self.parameters_told = str(state_dict.get(PARAMETERS, ""))

    @property
    def data(self) -> str:
        """The run's id, its data's fingerprint, and whether loading leaves out an earlier position in the data."""
        leaves = " left" if DATALOADER in self.config.checkpoint.exclude_from_loading else ""
        return f"{run_id(self.context.token)} {self.slots.source.fingerprint()}{leaves}"

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        if self.config.fault_tolerance.enable:
            require_members(self.context.token)
        return dims

    @record
    @exactness.naming_operators()
    def train(self) -> None:
        """Make steps until the run is over or this group leaves; without fault tolerance, as torchtitan does."""
        if not self.config.fault_tolerance.enable:
            super().train()
            return
        run, work, group = self.context, self.work, self.config.fault_tolerance.group_id
        self._compile()
        self.participation.warm()
        with self.config.profiler.build(
            global_step=self.step, base_folder=self.config.dump_folder, leaf_folder=f"group-{group}"
        ) as self.profiler:
            end = self.participation.run(work)
        if end is Outcome.FENCED:
            run.events.emit("fenced", work.committed, claim=os.environ.get(fence.ENVIRONMENT, ""))
            os._exit(FENCED_EXIT)
        leaves = end is Outcome.LEFT
        work.close(leaves=leaves)
        self.participation.leave()
        if run.snapshots is not None:
            # The last checkpoint has the same state, if one is written. `close` ignores `over` if this group leaves.
            over = run.files.is_over() or self.disk.saves_all()
            run.snapshots.close(over=over, leaves=leaves)
        why = f"a signal or {stop_file(run.run_dir)} (remove it before torchrun starts the group again) asked for it"
        logger.info(f"Left the run after step {self.step}, as {why}" if leaves else "Training completed")

    def _compile(self) -> None:
        """Compute and discard a slot if the first slot compiles code or loads kernels, and a batch of a validation if
        that is compiled too, so that the other groups do not wait for that, and it does not count as a stall.
        Gradients, data and random numbers stay as they were."""
        if self.device.type == "cpu" and not self.config.compile.enable:
            return
        self.context.files.beat(STARTUP, 0)
        begin = time.monotonic()
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices):
            with contextlib.suppress(OutOfData):
                self.slots.compute(1, 0, check_all=True)
                self.metrics_processor.data_loading_times.pop()
            if self.config.compile.enable and self.config.validator.enable:
                self._validate_a_batch()
        self.work.discard()
        if self.checks is not None:
            self.checks.injector.renew()
        self.context.events.emit("compiled", took_s=round(time.monotonic() - begin, 3))

    def _validate_a_batch(self) -> None:
        """Validate on the first batch alone, if the validator is told a number of batches. It logs that as step 0."""
        whole: Any = self.validator.config
        if not hasattr(whole, "steps"):
            return
        self.validator.config = replace(whole, steps=1)
        with contextlib.suppress(AssertionError, ZeroDivisionError):  # it has no batch, or none with a label
            self.validator.validate(self.model_parts, 0)
        self.validator.config = whole
        for part in self.model_parts:  # a validation that fails leaves them in evaluation mode
            part.train()
