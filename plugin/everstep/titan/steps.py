"""An optimizer step, made of slots: what a commit is in synchronous training."""

from typing import Any

import torch

from everstep.quorum.heal import HealState
from everstep.step.interfaces import Commit, SlotSums
from everstep.step.reduction import GradientReducer, local
from everstep.titan.slots import Slots
from everstep.titan.snapshots import Snapshots
from everstep.titan.tally import Layout, StepSums


class Steps:
    """The slots of a step; see `everstep.step.interfaces.Work` for what is not said here.

    Args:
        slots: the trainer's.
        snapshots: of this rank's state, if there are any.
        reducer: of the gradients.
        is_exact: whether sums are, so that `param.grad` has one slot at a time.
    """

    def __init__(
        self,
        slots: Slots,
        snapshots: Snapshots | None,
        reducer: GradientReducer,
        *,
        is_exact: bool,
    ) -> None:
        self._slots, self._snapshots, self.reducer = slots, snapshots, reducer
        self.shares = slots.number
        """Of how many parts a commit is made, each of which a group computes."""
        self._is_exact = is_exact
        # There are no more groups than slots, however many the run is scaled to.
        groups = 0 if snapshots is None else slots.number
        loads = sum(local(load).numel() for load in slots.expert_loads)
        self._sums = Layout(StepSums, loads, len(slots.trainable), groups)
        """How a step's further sums travel."""

    def compute(self, step: int, slot: int, *, whole: bool) -> None:
        self._slots.compute(step, slot, whole=whole)
        if self._is_exact:
            self._slots.keep_bits(slot)

    def refused(self) -> frozenset[int]:
        return self._slots.refused()

    def results(self) -> SlotSums:
        tokens, loss = self._slots.tokens_and_losses()
        held = self._slots.held
        further = StepSums(
            loads=torch.cat([torch.zeros(0), *(local(load).flatten().cpu() for load in self._slots.expert_loads)]),
            reached=self._slots.reached(),
            words=self._words(),
        )
        return SlotSums(tokens, loss, self._sums.pack(further), held)

    def _words(self) -> torch.Tensor:
        """What this group says of its snapshots, in a vector with a place for each group; a collective of the group."""
        if self._snapshots is None:
            return torch.zeros(0)
        words = torch.zeros(self._slots.number, dtype=torch.float64)
        words[self._snapshots.group] = self._snapshots.word()
        return words

    def discard(self) -> None:
        self._slots.discard()

    def update(self, commit: Commit) -> tuple[float, dict[str, Any]]:
        """Change the parameters; the norm of what they were changed by, and further fields of the commit's event."""
        if self._snapshots is not None:
            self._snapshots.wait()
        self.reducer.assign(self._slots.nominal_tokens / float(commit.tokens.sum()))
        self._assign(self._sums.unpack(commit.extra))
        return float(self._slots.step(commit.step)), {}

    def _assign(self, sums: StepSums) -> None:
        """Put the loads of the whole global batch where torchtitan's balancing reads them, and take the gradients away
        of parameters that no slot of any group reached: torchtitan's optimizers leave those as they are, without weight
        decay."""
        sizes = [local(load).numel() for load in self._slots.expert_loads]
        for load, part in zip(self._slots.expert_loads, sums.loads.split(sizes), strict=True):
            local(load).copy_(part.view_as(local(load)))
        for param, groups in zip(self._slots.trainable, sums.reached.tolist(), strict=True):
            if groups == 0:
                param.grad = None

    def words(self, commit: Commit) -> dict[int, int]:
        """What each group said of its snapshots."""
        words = self._sums.unpack(commit.extra).words.tolist()
        return {group: round(word) for group, word in enumerate(words)}

    # A step has no state besides the trainer's: nothing is to be done

    def before_restore(self) -> None:
        """before a state is loaded, as no group has one,"""

    def restored(self, history: int) -> None:
        """when it was,"""

    def serve(self, state: HealState) -> None:
        """for a joiner,"""

    def healed(self, state: HealState) -> None:
        """as a joiner,"""

    def close(self) -> None:
        """or when this group leaves."""
