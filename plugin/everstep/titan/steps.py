"""The `Work` of synchronous training, in which a commit is one optimizer step, made of slots."""

from collections.abc import Collection
from typing import Any

import torch

from everstep.step.interfaces import Commit, SlotSums
from everstep.step.reduction import BUCKET_BYTES, GradientReducer
from everstep.titan.group import all_in_group
from everstep.titan.state import TrainingState
from everstep.titan.tally import StepSums, flat, spread
from everstep.titan.work import TrainerWork


class Steps(TrainerWork):
    """Computes slots and makes optimizer steps; see `everstep.step.interfaces.Work`.

    Args:
        trainer: an `EverstepTrainer` that has set all its attributes but `work`.
    """

    notes_interval = 10
    """Steps between two exchanges of positions: a group that takes over a data stream skips at most so many batches."""

    def __init__(self, trainer: Any) -> None:
        slots = trainer.slots
        reducer = GradientReducer(
            slots.trainable,
            BUCKET_BYTES,
            trainer.streams,
            hooks=slots.computes_eagerly,
            exact_slots=slots.number if trainer.config.fault_tolerance.exact else 0,
            on_gradient=slots.note_gradient,
        )
        super().__init__(trainer, TrainingState(trainer), slots.number, reducer)
        self._skips_poison = self._ft.on_poison == "skip"
        self._skipped: set[tuple[int, int]] = set()
        """(step, slot) pairs for which no group can compute a finite gradient."""
        most_groups = slots.number + self._ft.spares  # every group but the spares has a slot (config.checks)
        statuses = torch.zeros(0 if self._snapshots is None else most_groups, dtype=torch.float64)
        self._nothing = StepSums(flat(slots.expert_loads), slots.reached(), statuses)
        """The extra sums of a group that has computed nothing; their lengths are those of every tally."""

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        if self._skips_poison and not all_in_group(not self._is_poison(step, slot)):
            self._slots.hold_nothing(slot)
            self._events.emit("slot_skipped", step, slot=slot)
            return
        self._files.beat_slot(step, slot)
        self._slots.compute(step, slot, check_all=check_all)

    def _is_poison(self, step: int, slot: int) -> bool:
        return (step, slot) in self._skipped or self._files.is_poison(step, slot)

    def _leave_out(self, step: int, slots: Collection[int]) -> None:
        if not self._skips_poison:
            super()._leave_out(step, slots)
        self._skipped |= {(step, slot) for slot in slots}

    def refused(self) -> frozenset[int]:
        return self._slots.refused()

    def results(self) -> SlotSums:
        tokens, loss = self._slots.tokens_and_losses()
        statuses = self._nothing.statuses.clone()
        if self._snapshots is not None:
            statuses[self._snapshots.group] = self._snapshots.status()
        further = StepSums(flat(self._slots.expert_loads), self._slots.reached(), statuses)
        return SlotSums(tokens, loss, further.pack(), self._slots.held)

    def discard(self) -> None:
        self._slots.discard()

    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        if self._snapshots is not None:
            self._snapshots.copier.wait()
        self.reducer.assign(self._slots.nominal_tokens / float(commit.tokens.sum()))
        self._assign(self._nothing.unpack(commit.extra))
        return float(self._slots.optimizer_step(commit.step)), {}

    def _assign(self, sums: StepSums) -> None:
        """Write the whole batch's expert loads to the buffers that torchtitan's load balancing reads. Set the gradients
        of parameters to None that no slot of any group reached: the optimizers then leave those parameters unchanged,
        without weight decay."""
        spread(sums.loads, self._slots.expert_loads)
        for param, groups in zip(self._slots.trainable, sums.reached.tolist(), strict=True):
            if groups == 0:
                param.grad = None

    def statuses(self, commit: Commit) -> dict[int, int]:
        statuses = self._nothing.unpack(commit.extra).statuses.tolist()
        return {group: round(status) for group, status in enumerate(statuses)}
