"""Computes a global batch slot by slot with a torchtitan trainer, and makes the optimizer step."""

import time
from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.observability import structured_logger as sl

from everstep.attention.guard import LARGE_STEP, Checks
from everstep.run.exits import UNFIT_EXIT, TrainerEnds
from everstep.step.interfaces import OutOfData
from everstep.step.private import local
from everstep.titan import private
from everstep.titan.data.slot_source import Batch, SlotSource
from everstep.titan.data.streams import SlotStreams
from everstep.titan.group import all_in_group, sum_in_group
from everstep.titan.names import DATALOADER, DataloaderExhaustedError
from everstep.titan.run_files import differences
from everstep.titan.state import digest, rows_of, slot_seed

OPTIMIZER_SLOT = -1
"""Slot number that seeds the random numbers of an optimizer step (`slot_seed`)."""
AUDIT_BITS = 1 << 52
"""Number of values that a slot's checksum can have: a tally carries it as a float64."""


class SlotComputer:
    """Computes slots. Gradients add up in `param.grad`; tokens and losses are kept by slot until `discard`.

    Args:
        trainer: an `EverstepTrainer` that has built its model, dataloader and checks.
    """

    def __init__(self, trainer: Any) -> None:
        config, semi = trainer.config, trainer.config.semi_sync
        self._trainer, self._events = trainer, trainer.context.events
        self._checks: Checks | None = trainer.checks
        self.seed = config.debug.seed or 0
        self.number = trainer.gradient_accumulation_steps
        """S, the number of slots of an optimizer step."""
        self.source = self._opened_source()
        self.workers = (semi.workers or config.fault_tolerance.groups) if semi.enabled else 1
        """Number of semi-synchronous workers that share a step's slots, each with its own optimizer steps; else 1."""
        self.steps_per_commit = semi.round_steps if semi.enabled else 1
        """Optimizer steps of a commit: 1, or those of a semi-synchronous round."""
        self._slot_tokens = config.training.local_batch_size * config.training.seq_len
        """Tokens of a slot on this rank, with a label or without."""
        self.tokens_per_step = self._slot_tokens * self.source.dp_size * self.number
        self.nominal_tokens = self.tokens_per_step / self.workers
        """Tokens of an optimizer step (of one worker) if every label were valid. Backward divides by it, and the scale
        is corrected before the step: the number of valid tokens is known only when all slots are computed. Without the
        division, bfloat16 gradients would be scaled, and so rounded, differently from torchtitan's."""
        self._scale = torch.tensor(self.nominal_tokens, device=trainer.device)
        self.trainable = [p for part in trainer.model_parts for p in part.parameters() if p.requires_grad]
        self.expert_loads = [
            buffer
            for part in trainer.model_parts
            for name, buffer in part.named_buffers()
            if name.endswith(private.EXPERT_LOADS)
        ]
        """Buffers that count each expert's tokens, summed over slots like gradients, for torchtitan's balancing."""
        self._tokens: dict[int, int] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._reached: set[torch.Tensor] = set()
        """The parameters to which a held slot gave a gradient."""
        self._slot = 0
        """The slot that is being computed, or was last."""
        self._rows: defaultdict[int, dict[torch.Tensor, list[torch.Tensor]]] = defaultdict(dict)
        """With exact sums, slot -> parameter -> `rows_of` its gradient: input of the slot's checksum."""
        self.computes_eagerly = private.computes_eagerly(trainer) and not trainer.parallel_dims.pp_enabled
        """Whether backward runs the parameters' hooks, and allocates a gradient that is None. A replayed graph does
        neither, and while a graph is recorded no sum may start. Some pipeline schedules run no hooks for weights."""
        self._refused: set[int] = set()
        """Slots in which this rank's checks found an error and did not repair it."""

    def _opened_source(self) -> SlotSource:
        """Return the dataloader, opened to be read by slot. Raises TrainerEnds if the run's first start read other
        data, and ValueError if the model's vocabulary is too small for the data."""
        trainer = self._trainer
        source = trainer.dataloader
        assert isinstance(source, SlotSource)  # `bind_data`
        assert trainer.config.model_spec is not None
        vocab_size = decoder_vocab_size(trainer.config.model_spec)
        if source.largest_id >= vocab_size:
            raise ValueError(
                f"the data has token ids up to {source.largest_id}, but the model's vocabulary has {vocab_size} ids: "
                "use the model's own tokenizer (hf_assets_path), or a model with a larger vocabulary"
            )
        source.open_slots(self.number * trainer.num_pipeline_parallel_microbatches)
        # What torchtitan's dataloaders read is not known. A run may turn to other data if it loads no position.
        may_differ = isinstance(source, SlotStreams) or DATALOADER in trainer.config.checkpoint.exclude_from_loading
        told = not may_differ and differences(
            trainer.context.run_dir / "state" / "data.json", {"it": source.fingerprint()}
        )
        if told:
            raise TrainerEnds(
                UNFIT_EXIT, f"this host's data is not that of the run's first start: {told}. Copy the same data here"
            )
        return source

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        """Run forward and backward of a slot; see `Work.compute`."""
        trainer, self._slot = self._trainer, slot
        self._seed(step, slot)
        begin = time.perf_counter()
        with sl.log_trace_span("fetching_batch"):
            batches = self._fetch(step, slot)
        if not batches:
            raise OutOfData
        self._seed(step, slot)  # again: datasets may draw random numbers, more of them if batches had to be skipped
        trainer.metrics_processor.data_loading_times.append(time.perf_counter() - begin)
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        inputs, labels = zip(*(self._on_device(batch) for batch in batches), strict=True)
        seen = trainer.ntokens_seen
        if self._checks is not None:
            of_step = valid * self.nominal_tokens / self._slot_tokens  # labels, if each slot has as many
            self._checks.looks_at_rows = of_step < LARGE_STEP
            self._checks.begin(step, slot, check_all=check_all)
        pipelined = trainer.parallel_dims.pp_enabled
        loss = trainer.forward_backward_step(
            input_dict=list(inputs) if pipelined else inputs[0],
            labels=list(labels) if pipelined else labels[0],
            global_valid_tokens=self._scale,
        )
        trainer.ntokens_seen = seen  # counts committed slots only
        if self._checks is not None:
            self._checks.end()
        self._tokens[slot] = valid
        self._reached.update(param for param in self.trainable if param.grad is not None)
        # In a pipeline only the last stage knows the loss; on the others torchtitan returns -1.
        known = not pipelined or trainer.pp_has_last_stage
        self._losses[slot] = local(loss.detach()).to(torch.float64) * (self.nominal_tokens if known else 0.0)

    def _seed(self, step: int, slot: int) -> None:
        """Seed the random numbers of a slot."""
        torch.manual_seed(slot_seed(self.seed, step, slot, self.source.dp_rank))

    def hold_nothing(self, slot: int) -> None:
        """Hold a slot as if it had been computed, with no tokens, loss or gradient."""
        self._tokens[slot], self._losses[slot] = 0, torch.zeros((), dtype=torch.float64)

    def _fetch(self, step: int, slot: int) -> list[Batch]:
        """Return the slot's batches, one for each microbatch of a pipeline. If the data has ended on one rank of the
        group, return an empty list on all of them."""
        size = self._trainer.num_pipeline_parallel_microbatches
        try:
            batches = [self.source.microbatch(step, slot * size + part) for part in range(size)]
        except DataloaderExhaustedError:
            batches = []
        endless = not isinstance(self.source, SlotStreams)
        return batches if endless or all_in_group(bool(batches)) else []

    def _on_device(self, batch: Batch) -> Batch:
        inputs, labels = batch
        device = self._trainer.device
        moved = {
            key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
            for key, value in inputs.items()
        }
        return moved, labels.to(device, non_blocking=True)

    def tokens_and_losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return valid tokens and the sum of their losses by slot, over the group's ranks: float64 [S], on the CPU."""
        device, dims = self._trainer.device, self._trainer.parallel_dims
        tokens = torch.zeros(self.number, dtype=torch.float64)
        loss = torch.zeros(self.number, dtype=torch.float64, device=device)
        for slot, count in self._tokens.items():
            tokens[slot] = count
            loss[slot] = self._losses[slot]
        if dims.dp_enabled:
            tokens = dist_utils.dist_sum_tensor(tokens.to(device), dims.get_mesh("batch"))
        if dims.dp_cp_enabled:
            loss = dist_utils.dist_sum_tensor(loss, dims.get_mesh("loss"))
        if dims.pp_enabled:
            loss = dist_utils.dist_sum_tensor(loss, dims.get_mesh("pp"))
        return tokens.cpu(), loss.cpu()

    @property
    def held(self) -> frozenset[int]:
        """The slots computed since `discard`."""
        return frozenset(self._tokens)

    def reached(self) -> torch.Tensor:
        """Return 1 for each parameter of `trainable` to which a held slot gave a gradient, else 0; float64."""
        return torch.tensor([param in self._reached for param in self.trainable], dtype=torch.float64)

    def refused(self) -> frozenset[int]:
        """See `Work.refused`. Also emits the checks' findings since the last call. One host synchronisation."""
        if self._checks is not None:
            self._refused |= self._checks.refused()
            for finding in self._checks.findings.drain():
                # Every event has its own step, rank and kind.
                fields = {name: value for name, value in finding.items() if name not in ("step", "rank", "kind")}
                step = -(-finding["step"] // self.steps_per_commit)
                self._events.emit("finding", step, anomaly=finding["kind"], **fields)
        return frozenset(self._refused)

    def discard(self) -> None:
        """Forget all gradients, tokens, losses and refusals. Comes before any slot with other weights."""
        self._tokens.clear()
        self._losses.clear()
        self._rows.clear()
        self._reached.clear()
        self._refused.clear()
        if self._checks is not None:
            self._checks.forget()
        for load in self.expert_loads:
            local(load).zero_()
        # A recorded graph adds to the gradient memory that it was recorded with, which has to stay.
        self._trainer.optimizers.zero_grad(set_to_none=private.computes_eagerly(self._trainer))

    def optimizer_step(self, step: int, seeded_as: int = OPTIMIZER_SLOT) -> torch.Tensor:
        """Clip the gradients, make an optimizer step and return the norm before clipping. `seeded_as` is the slot
        number for `slot_seed`."""
        trainer = self._trainer
        self._seed(step, seeded_as)
        grad_norm = self.clip(trainer.config.training.max_norm)
        trainer.checkpointer.maybe_wait_for_staging()
        trainer.metrics_processor.ntokens_since_last_log += self._slot_tokens * len(self._tokens)
        trainer.optimizers.step()
        trainer.lr_schedulers.step()
        return grad_norm

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients to a norm over the whole group and return their norm before."""
        dims = self._trainer.parallel_dims
        return dist_utils.clip_grad_norm_(
            [p for part in self._trainer.model_parts for p in part.parameters()],
            max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )

    # Checksums of slots, to compare with those of other groups

    @torch.no_grad()
    def note_gradient(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Note, with exact sums, this rank's part of the gradient that the slot in progress gave a parameter."""
        self._reached.add(param)
        if grad.numel():
            # In memory that an earlier slot left at 0, a gradient of -0 becomes 0 + -0 = 0. In new memory it is made 0.
            self._rows[self._slot][param] = rows_of(grad if self.computes_eagerly else grad + 0.0)

    def _digest(self, slot: int) -> int:
        rows = self._rows[slot]
        # An earlier slot may have left memory for a gradient that this one lacks. It has rows of zeros in any case.
        of_gradients = (rows.get(param) or rows_of(torch.zeros_like(local(param))) for param in self.trainable)
        return digest([*rows_of(self._losses[slot]), *chain.from_iterable(of_gradients)])

    def bits(self, slot: int) -> int:
        """See `Work.bits`."""
        return sum_in_group(self._digest(slot)) % AUDIT_BITS + 1

    def own_bits(self) -> dict[int, str]:
        """Return slot -> this rank's checksum in hex for the held slots. Empty without exact sums."""
        return {slot: f"{self._digest(slot):x}" for slot in sorted(self._rows.keys() & self._tokens.keys())}

    def audit(self, step: int, slot: int) -> int:
        """See `Work.audit`."""
        loads, reached = [local(load).clone() for load in self.expert_loads], set(self._reached)
        self.compute(step, slot, check_all=False)
        for param in self.trainable:
            if param.grad is None:
                continue
            self.note_gradient(param, local(param.grad))
            if self.computes_eagerly:
                param.grad = None
            else:
                local(param.grad).zero_()
        bits = self.bits(slot)
        del self._tokens[slot], self._losses[slot], self._rows[slot]
        self._reached = reached
        for load, before in zip(self.expert_loads, loads, strict=True):
            local(load).copy_(before)
        return bits
