"""How a torchtitan trainer computes a slot, sums, and hands over its state: its side of the step protocol."""

import os
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torchtitan import trainer as titan
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.observability import structured_logger as sl

from everstep.attention.guard import Checks
from everstep.data.slots import Batch, SlotSource
from everstep.quorum.heal import HealState
from everstep.quorum.process_group import RankColumn
from everstep.run.exits import HOPELESS_EXIT, TrainerEnds
from everstep.step.interfaces import OutOfData, SlotSums
from everstep.step.reduction import local
from everstep.titan import attention, private
from everstep.titan.data.names import DataloaderExhaustedError
from everstep.titan.data.streams import SlotStreams
from everstep.titan.dataloader_blob import DATALOADER_BLOB, pack_dataloader
from everstep.titan.disk import DiskCheckpoints
from everstep.titan.group import all_in_group, sum_in_group
from everstep.titan.place import RunPlace
from everstep.titan.snapshots import AGREED_SNAPSHOTS
from everstep.titan.state import TrainingState, digest, row_sums, slot_seed
from everstep.titan.tally import Layout, StepSums

DATA_BLOB = "data"
AUDIT_BITS = 1 << 52
"""What a float64 of a tally holds."""
NOTES_INTERVAL = 10
"""Commits between two exchanges of dataloader positions; what an adopter has to skip at most, and one more."""


class SlotTrainer(titan.Trainer):
    """A torchtitan trainer that computes its batch slot by slot: all of `everstep.step.interfaces.Work` that comes
    before a commit. `everstep.titan.trainer` adds the rest, and makes `column` and `state`.
    """

    column: RankColumn
    state: TrainingState
    steps_per_commit = 1
    """Optimizer steps."""
    notes_interval = NOTES_INTERVAL
    """Commits between two `notes`."""

    def __init__(self, config: Any, place: RunPlace | None) -> None:
        """`place`: of this rank in the run; None without fault tolerance: nothing more than torchtitan's trainer."""
        super().__init__(config)
        self.checks: Checks | None = self._attached() if config.attention_check.enable else None
        if place is None:
            return
        ft, semi = config.fault_tolerance, config.semi_sync
        self.place, self.run_dir, self.events, self.files = place, place.run_dir, place.events, place.files
        self.snapshots = place.snapshots
        self.seed = config.debug.seed or 0
        self.dp_rank, self.dp_size = 0, 1
        if self.parallel_dims.dp_enabled:
            mesh = self.parallel_dims.get_mesh("batch")
            self.dp_rank, self.dp_size = mesh.get_local_rank(), mesh.size()
        self.slots = self.gradient_accumulation_steps
        """S."""
        self.source = self._opened_source()
        workers = (semi.workers or ft.groups) if semi.enabled else 1
        self.shares = workers if semi.enabled else self.slots
        """Of how many parts a commit is made."""
        if semi.enabled:
            self.steps_per_commit, self.notes_interval = semi.round_steps, 1
        self.tokens_per_step = config.training.local_batch_size * config.training.seq_len * self.dp_size * self.slots
        self.nominal_tokens = self.tokens_per_step / workers
        """Tokens of a step if all were valid. Backward divides by this number, the commit corrects it: what the valid
        ones are is known only when all slots are there, and gradients in bfloat16 round differently at another
        scale, torchtitan's in particular."""
        self._scale = torch.tensor(self.nominal_tokens, device=self.device)
        self.history = 0
        self._slot_tokens: dict[int, int] = {}
        self._slot_losses: dict[int, torch.Tensor] = {}
        self._slot_rows: dict[int, torch.Tensor] = {}
        """With exact sums, what checksums of the slots' gradients are made of."""
        self.is_exact = ft.exact
        self.parameters_told = ""
        """With exact sums, `parameters()` after the last step; of a state that was taken over, what came with it."""
        self._skips_poison = ft.on_poison == "skip"
        """Whether slots that ended groups are left out."""
        self._skipped: set[tuple[int, int]] = set()
        """Steps and slots in which no group can compute a finite gradient."""
        self._refused: set[int] = set()
        """Slots in which this rank's checks found what was not repaired."""
        self.expert_loads = [
            buffer
            for part in self.model_parts
            for name, buffer in part.named_buffers()
            if name.endswith(private.EXPERT_LOADS)
        ]
        """Tokens each expert got, summed over slots like a gradient; torchtitan's balancing reads them."""
        self.trainable = [p for part in self.model_parts for p in part.parameters() if p.requires_grad]
        # There are no more groups than slots, however many the run is scaled to.
        groups = 0 if self.snapshots is None else self.slots
        loads = sum(local(load).numel() for load in self.expert_loads)
        self.sums = Layout(StepSums, loads, len(self.trainable), groups)
        """How a step's further sums travel."""
        self.disk = DiskCheckpoints(self.checkpointer, config.checkpoint, self, self.events, self.files)

    def _attached(self) -> Checks:
        """The checks of the model's attention."""
        training = self.config.training
        ranks = self.parallel_dims.get_mesh("batch").size() if self.parallel_dims.dp_enabled else 1
        rows = training.local_batch_size * ranks * self.gradient_accumulation_steps
        return attention.attach(
            self.model_parts,
            self.config.attention_check,  # pyrefly: ignore[missing-attribute] ours
            rank=int(os.environ["RANK"]),
            seed=self.config.debug.seed or 0,
            step_tokens=rows * training.seq_len,
        )

    def _opened_source(self) -> SlotSource:
        """The dataloader, read by slot."""
        source = self.dataloader
        if not isinstance(source, SlotSource):
            raise TypeError(f"{type(source).__name__} cannot be read by slot: leave [data] source to Everstep's config")
        assert self.config.model_spec is not None
        source.require_vocab(decoder_vocab_size(self.config.model_spec))
        source.open_slots(self.slots * self.num_pipeline_parallel_microbatches, self.dp_rank, self.dp_size)
        return source

    @property
    def committed(self) -> int:
        """The number of the last commit in the step protocol, and in events."""
        return self.step // self.steps_per_commit

    @property
    def samples(self) -> int:
        """Rows that enter the model in a commit."""
        return self.config.training.global_batch_size * self.steps_per_commit

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        if self._skips_poison and not all_in_group(not self._is_poison(step, slot)):
            # Held like any other, with nothing in it.
            self._slot_tokens[slot], self._slot_losses[slot] = 0, torch.zeros((), dtype=torch.float64)
            self.events.emit("slot_skipped", step, slot=slot)
            return
        self.files.computes(step, slot)
        self.compute_slot(step, slot, whole=whole)
        if self.is_exact:  # param.grad has nothing else
            self._slot_rows[slot] = self._row_sums()

    def _is_poison(self, step: int, slot: int) -> bool:
        return (step, slot) in self._skipped or self.files.is_poison(step, slot)

    def compute_slot(self, step: int, slot: int, *, whole: bool) -> None:
        """Forward and backward of a slot; see `Work.compute`."""
        torch.manual_seed(slot_seed(self.seed, step, slot, self.dp_rank))
        begin = time.perf_counter()
        with sl.log_trace_span("fetching_batch"):
            batches = self._fetch(step, slot)
        if not batches:
            raise OutOfData
        self.metrics_processor.data_loading_times.append(time.perf_counter() - begin)
        tokens = sum(labels.numel() for _, labels in batches)
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        inputs, labels = zip(*(self._on_device(batch) for batch in batches), strict=True)
        seen = self.ntokens_seen
        if self.checks is not None:
            self.checks.begin(step, slot, whole=whole)
        pipelined = self.parallel_dims.pp_enabled
        loss = self.forward_backward_step(
            input_dict=list(inputs) if pipelined else inputs[0],
            labels=list(labels) if pipelined else labels[0],
            global_valid_tokens=self._scale,
        )
        self.metrics_processor.ntokens_since_last_log += tokens
        self.ntokens_seen = seen  # counts committed slots only
        if self.checks is not None:
            self.checks.end()
        self._slot_tokens[slot] = valid
        # Of a pipeline's stages only the last one knows the loss; the others give -1.
        known = not pipelined or self.pp_has_last_stage
        self._slot_losses[slot] = loss.detach().to(torch.float64) * (self.nominal_tokens if known else 0.0)

    @torch.no_grad()
    def _row_sums(self) -> torch.Tensor:
        """Of the gradients that a slot has just made."""
        # Added to zeros that an earlier slot left, -0 becomes 0: here it does always.
        return row_sums(None if param.grad is None else local(param.grad) + 0.0 for param in self.trainable)

    def bits(self, slot: int) -> int:
        return _in_tally(self._slot_rows[slot])

    def own_bits(self) -> dict[int, str]:
        """Of the gradients of each slot that is held, on this rank."""
        return {slot: f"{digest(rows):x}" for slot, rows in sorted(self._slot_rows.items())}

    def audit(self, step: int, slot: int) -> int:
        loads = [local(load).clone() for load in self.expert_loads]
        counted = self.metrics_processor.ntokens_since_last_log
        self.compute_slot(step, slot, whole=False)
        self.metrics_processor.ntokens_since_last_log = counted
        bits = _in_tally(self._row_sums())
        del self._slot_tokens[slot], self._slot_losses[slot]
        for param in self.trainable:
            if param.grad is not None:  # not None: that says which parameters the held slots reached
                local(param.grad).zero_()
        for load, before in zip(self.expert_loads, loads, strict=True):
            local(load).copy_(before)
        return bits

    def _on_device(self, batch: Batch) -> Batch:
        inputs, labels = batch
        moved = {
            key: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }
        return moved, labels.to(self.device, non_blocking=True)

    def refused(self) -> frozenset[int]:
        if self.checks is not None:
            self._note_findings(self.checks)
        return frozenset(self._refused)

    def _note_findings(self, checks: Checks) -> None:
        """Take over what the checks saw since this was last asked, and report it. One host synchronisation."""
        self._refused |= checks.refused()
        for finding in checks.drain():
            # Step and rank are every event's own, and so is the word kind.
            fields = {name: value for name, value in finding.items() if name not in ("step", "rank", "kind")}
            step = -(-finding["step"] // self.steps_per_commit)
            self.events.emit("finding", step, anomaly=finding["kind"], **fields)

    def not_finite(self, step: int, slots: Collection[int]) -> None:
        for slot in slots:
            reason = "no group can compute it to a gradient whose norm is finite: the cause is in the data or the model"
            self.events.emit("not_finite", step, slot=slot, reason=reason)
        if self._skips_poison:
            self._skipped |= {(step, slot) for slot in slots}
            return
        self.events.emit("diverged", step, reason="a gradient is not finite")
        why = f"the gradients of slots {list(slots)} of step {step} are not finite on any group: training diverged"
        raise TrainerEnds(HOPELESS_EXIT, why)

    def _fetch(self, step: int, slot: int) -> list[Batch]:
        """The slot's batches, one for each microbatch of a pipeline; none on all ranks of the group if one of them has
        too few."""
        size = self.num_pipeline_parallel_microbatches
        try:
            batches = [self.source.microbatch(step, slot * size + part) for part in range(size)]
        except DataloaderExhaustedError:
            batches = []
        endless = not isinstance(self.source, SlotStreams)
        return batches if endless or all_in_group(bool(batches)) else []

    def results(self) -> SlotSums:
        device, dims = self.device, self.parallel_dims
        tokens = torch.zeros(self.slots, dtype=torch.float64)
        loss = torch.zeros(self.slots, dtype=torch.float64, device=device)
        for slot, count in self._slot_tokens.items():
            tokens[slot] = count
        for slot, value in self._slot_losses.items():
            loss[slot] = value
        if dims.dp_enabled:
            tokens = dist_utils.dist_sum_tensor(tokens.to(device), dims.get_mesh("batch"))
        if dims.dp_cp_enabled:
            loss = dist_utils.dist_sum_tensor(loss, dims.get_mesh("loss"))
        if dims.pp_enabled:
            loss = dist_utils.dist_sum_tensor(loss, dims.get_mesh("pp"))
        computed = bool(self._slot_tokens)
        further = StepSums(
            loads=torch.cat([torch.zeros(0), *(local(load).flatten().cpu() for load in self.expert_loads)]),
            reached=torch.tensor([float(computed and p.grad is not None) for p in self.trainable]),
            words=self._words(),
        )
        return SlotSums(tokens.cpu(), loss.cpu(), self.sums.pack(further), frozenset(self._slot_tokens))

    def _words(self) -> torch.Tensor:
        """What this group says of its snapshots, in a vector with a place for each group; a collective of the group."""
        if self.snapshots is None:
            return torch.zeros(0)
        words = torch.zeros(self.slots, dtype=torch.float64)
        words[self.snapshots.group] = self.snapshots.word()
        return words

    def discard(self) -> None:
        self._slot_tokens.clear()
        self._slot_losses.clear()
        self._slot_rows.clear()
        self._refused.clear()
        if self.checks is not None:
            self.checks.forget()
        for load in self.expert_loads:
            local(load).zero_()
        # A recorded graph adds to the memory that it was recorded with.
        self.optimizers.zero_grad(set_to_none=self.config.training.disable_cuda_graphs)

    def assign_sums(self, sums: StepSums) -> None:
        """Put the loads of the whole global batch where torchtitan's balancing reads them, and take the gradients away
        of parameters that no slot of any group reached: torchtitan's optimizers leave those as they are, without weight
        decay."""
        sizes = [local(load).numel() for load in self.expert_loads]
        for load, part in zip(self.expert_loads, sums.loads.split(sizes), strict=True):
            local(load).copy_(part.view_as(local(load)))
        for param, groups in zip(self.trainable, sums.reached.tolist(), strict=True):
            if groups == 0:
                param.grad = None

    def data_read(self, step: int) -> None:
        """`step` is committed: where the streams stand now is what the next notes tell, as then they will be ahead."""
        self.source.committed(self.step)
        if (step + 1) % self.notes_interval == 0 and isinstance(self.source, SlotStreams):
            self.source.note_live()

    def notes(self, step: int) -> bytes | None:
        """Where this group's dataloader streams stand, so that any group can adopt them."""
        if step % self.notes_interval or not isinstance(self.source, SlotStreams):
            return None
        return self.source.known_states()

    def noted(self, notes: list[bytes]) -> None:
        for note in filter(None, notes):
            self.source.learn(note)

    def settle(self) -> None:
        if self.snapshots is not None:
            self.snapshots.settle()

    def serve(self) -> HealState:
        state = self.state.snapshot({DATA_BLOB: self.source.known_states()})
        if self.snapshots is not None:
            state.blobs[DATALOADER_BLOB] = pack_dataloader(self.source.state_dict())
            state.meta[AGREED_SNAPSHOTS] = self.snapshots.agreed
        return state

    def heal(self, state: HealState) -> None:
        self.take(state, "peer")
        known = state.meta.get(AGREED_SNAPSHOTS)
        if self.snapshots is not None and known is not None:
            self.snapshots.agree(known)

    def take(self, state: HealState, source: str) -> None:
        """Take over a state of this rank column; `source` says in the events where it came from."""
        if self.snapshots is not None:
            self.snapshots.wait()  # a snapshot of the state before may still be under way
        self.state.load(state)
        self.source.learn(state.blobs[DATA_BLOB])
        self.source.committed(self.step)
        self.announce(source)
        if self.checks is not None:
            self.checks.weights_changed()

    def announce(self, source: str) -> None:
        """Say where this group's state came from."""
        self.events.emit(
            "training_started",
            self.committed + 1,
            source=source,
            history=f"{self.history:x}",
            slots=self.shares,
            global_batch_size=self.samples,
            ranks=dist.get_world_size(),
        )


def _in_tally(rows: torch.Tensor) -> int:
    """The bits of a slot for a tally, of all ranks of the group; a collective of the group."""
    return sum_in_group(digest(rows)) % AUDIT_BITS + 1
