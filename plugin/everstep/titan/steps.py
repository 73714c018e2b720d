"""The `Work` of synchronous training, in which a commit is one optimizer step, made of slots."""

from typing import Any

import torch

from everstep.run.poison import poisoned
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
        self.refused, self.discard = slots.refused, slots.discard
        most_groups = slots.number + self._ft.spares  # every group but the spares has a slot (config.checks)
        statuses = torch.zeros(0 if self._snapshots is None else most_groups, dtype=torch.float64)
        self._nothing = StepSums(flat(slots.expert_loads), slots.reached(), statuses)
        """The extra sums of a group that has computed nothing; their lengths are those of every tally."""

    def compute(self, step: int, slot: int, *, check_all: bool) -> None:
        if self._ft.on_poison == "skip":
            dies = (step, slot) in self._skipped or poisoned(self._trainer.context.run_dir, (step, slot))
            if not all_in_group(not dies):  # another group's agent may be recording a death just now
                self._slots.hold_nothing(slot)
                self._events.emit("slot_skipped", step, slot=slot)
                return
        self._files.beat("compute", step, slot)
        self._slots.compute(step, slot, check_all=check_all)

    def results(self) -> SlotSums:
        tokens, loss = self._slots.tokens_and_losses()
        statuses = self._nothing.statuses.clone()
        if self._snapshots is not None:
            statuses[self._snapshots.group] = self._snapshots.status()
        further = StepSums(flat(self._slots.expert_loads), self._slots.reached(), statuses)
        return SlotSums(tokens, loss, further.pack(), self._slots.held)

    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        if self._snapshots is not None:
            self._snapshots.copier.wait()
        self.reducer.assign(self._slots.nominal_tokens / float(commit.tokens.sum()))
        sums = self._nothing.unpack(commit.extra)
        spread(sums.loads, self._slots.expert_loads)  # torchtitan's load balancing reads those of the whole batch
        for param, groups in zip(self._slots.trainable, sums.reached.tolist(), strict=True):
            if groups == 0:  # no slot reached it: without a gradient, the optimizer leaves it unchanged, without decay
                param.grad = None
        return float(self._slots.optimizer_step(commit.step)), {}

    def statuses(self, commit: Commit) -> dict[int, int]:
        statuses = self._nothing.unpack(commit.extra).statuses.tolist()
        return {group: round(status) for group, status in enumerate(statuses)}
