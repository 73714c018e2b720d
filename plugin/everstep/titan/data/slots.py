"""The contract between the trainer and its data.

One row stream feeds every run of a config, however many groups compute it. With S slots, R data-parallel
ranks in a group and B rows in a local batch, the batch of (step, slot) on a group's rank r is rows

    (((step - 1) * S + slot) * R + r) * B + i      for i in 0 … B-1, steps counted from 1,

or from the step at which the run turned to this data (`began_after`).

Row numbers run on for ever: number // rows is the epoch, and within an epoch rows are permuted by seed and
epoch."""

from abc import abstractmethod
from collections.abc import Collection

import torch

from everstep.titan.names import BaseDataLoader

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input", "positions"}, labels): CPU int64 tensors of shape [local_batch_size, seq_len]."""


class SlotSource(BaseDataLoader):
    """A torchtitan dataloader that is read by slot: (step, slot, data-parallel rank) decides a batch, and nothing else.

    Args:
        dp_rank, dp_size: this rank's place in its group's data-parallel ranks.
    """

    began_after = 0
    """The step before the one that reads the first rows: 0, or where a run turned to this data. May be set while no
    step is under way."""

    saved_ranks: Collection[int] = ()
    """While a checkpoint is loaded: the data-parallel ranks whose streams it has."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self._slots = 0
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def open_slots(self, slots: int) -> None:
        """Address the data by slot from now on, `slots` microbatches a step (S). Called once, before any other method
        here. With pipeline parallelism a dataloader's batch is a pipeline microbatch: count those as slots."""
        self._slots = slots

    def microbatch(self, step: int, slot: int) -> Batch:
        """This rank's batch of (step, slot), in tensors that the caller may keep and change. `step` is
        later than `began_after`. May be asked for again until the step is committed. Raises torchtitan's
        DataloaderExhaustedError when finite data has ended."""
        if step <= self.began_after or not 0 <= slot < self._slots:
            raise ValueError(f"no such slot: step {step}, slot {slot} of {self._slots}")
        return self._slot(step - self.began_after - 1, slot)

    @abstractmethod
    def _slot(self, number: int, slot: int) -> Batch:
        """`microbatch` of the step that is `number` steps, from 0, behind the first one."""

    @abstractmethod
    def committed(self, step: int) -> None:
        """`step` is committed: the checkpoint's position moves behind it."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A short string that is equal where two processes would read the same data."""

    @abstractmethod
    def require_vocab(self, vocab_size: int) -> None:
        """Raises ValueError if the data has ids that a model with `vocab_size` embeddings does not have."""

    # Where its streams stand. Sources whose rows are addressed directly have none.

    def note_live(self) -> None:
        """Remember where this process's own streams stand, as far as they are not beyond the last committed step."""

    def known_states(self) -> bytes:
        """The newest known state of every stream as of the last committed step, for healing, checkpoints and `learn`
        elsewhere. Empty for sources without streams."""
        return b""

    def learn(self, states: bytes) -> None:
        """Take note of what `known_states` of another process gave."""
