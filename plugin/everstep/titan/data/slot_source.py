"""The interface between the trainer and its data.

Every run of a config reads the same sequence of rows, however many groups compute it. With S slots, R data-parallel
ranks in a group and B rows in a local batch, the batch of (step, slot) on a group's rank r consists of the rows

    (((step - 1) * S + slot) * R + r) * B + i      for i in 0 … B-1

Steps count from 1, or from the step after `began_after` if the run changed to this data then.

Row numbers have no upper limit: number // rows is the epoch. Within an epoch, rows are permuted by seed and epoch."""

from abc import abstractmethod
from collections.abc import Collection

import torch

from everstep.titan.names import BaseDataLoader

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""(inputs by name, such as "input" and "positions"; labels): CPU int64 tensors of shape [local_batch_size, seq_len]."""


class SlotSource(BaseDataLoader):
    """A torchtitan dataloader that is read by slot. A batch depends only on step, slot and data-parallel rank.

    Args:
        dp_rank, dp_size: this rank's index among its group's data-parallel ranks, and their number.
    """

    began_after = 0
    """The step before the one that reads the first rows: 0, or the last step before a run changed to this data."""

    saved_ranks: Collection[int] = ()
    """The data-parallel ranks whose streams are in the checkpoint that is being loaded; else empty."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self._slots = 0
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def open_slots(self, slots: int) -> None:
        """Set the number of slots of a step, S. Called once, before any other method here. With pipeline parallelism a
        dataloader's batch is a pipeline microbatch, so `slots` is the number of pipeline microbatches of a step."""
        self._slots = slots

    def begin_after(self, step: int) -> None:
        """Begin with the first rows after this step, which is committed. Only while no step is in progress."""
        self.began_after = step

    def microbatch(self, step: int, slot: int) -> Batch:
        """Return this rank's batch of (step, slot), in tensors that the caller may keep and change. `step` is later
        than `began_after`. Can be called again for the same slot until the step is committed. Raises torchtitan's
        DataloaderExhaustedError when finite data has ended."""
        if step <= self.began_after or not 0 <= slot < self._slots:
            raise ValueError(f"no such slot: step {step}, slot {slot} of {self._slots}")
        return self._slot(step - self.began_after - 1, slot)

    @abstractmethod
    def _slot(self, number: int, slot: int) -> Batch:
        """Return the `microbatch` of a slot in step number `number`, counted from 0 at the first step of this data."""

    @abstractmethod
    def committed(self, step: int) -> None:
        """Move the position, which checkpoints save, to the end of `step`, which was just committed."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short string that two processes have in common if they read the same data."""

    @property
    @abstractmethod
    def largest_id(self) -> int:
        """The largest token id that the data may have."""

    # Positions of streams. A source that computes a row's address has no streams, and does nothing here.

    def note_live(self) -> None:
        """Remember the state of each stream of this process that is not beyond the last committed step."""

    def known_states(self, *, own: bool = False) -> bytes:
        """Return the newest known state of every stream, or of those that this process reads (`own`, for other groups'
        `learn`), none beyond the last committed step. Empty for sources without streams."""
        return b""

    def learn(self, states: bytes) -> None:
        """Remember states that another process's `known_states` returned, if they are newer."""
