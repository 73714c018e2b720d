"""The contract between the trainer and its data.

One row stream feeds every run of a config, however many groups compute it. With S slots, R data-parallel
ranks in a group and B rows in a local batch, the batch of (step, slot) on a group's rank r is rows

    (((step - 1) * S + slot) * R + r) * B + i      for i in 0 … B-1, steps counted from 1,

or from the step at which the run turned to this data (`began_after`).

Row numbers run on for ever: number // rows is the epoch, and within an epoch rows are permuted by seed and
epoch. Under torchtitan's own trainer, rank d of D takes in its n-th microbatch (n from 0) the rows (n * D +
d) * B + i: with A = S * R / D accumulation steps the ranks together read in step k exactly the rows of step
k's slots."""

from typing import Any, Protocol, runtime_checkable

import torch

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""({"input", "positions"}, labels): CPU int64 tensors of shape [local_batch_size, seq_len]."""


@runtime_checkable
class SlotSource(Protocol):
    """What the trainer asks of its data. (step, slot, data-parallel rank) decides a batch, nothing else
    does."""

    began_after: int
    """The step before the one that reads the first rows: 0, or where a run turned to this data. May be set while no
    step is under way."""

    def open_slots(self, slots: int, dp_rank: int, dp_size: int) -> None:
        """Address the data by slot from now on: `slots` microbatches a step (S), this rank's place in its
        group's data-parallel ranks. Called once, before any other method here. With pipeline parallelism a
        dataloader's batch is a pipeline microbatch: count those as slots."""

    def microbatch(self, step: int, slot: int) -> Batch:
        """This rank's batch of (step, slot), in tensors that the caller may keep and change. `step` is
        later than `began_after`. May be asked for again until the step is committed. Raises torchtitan's
        DataloaderExhaustedError when finite data has ended."""
        ...

    def committed(self, step: int) -> None:
        """`step` is committed: the checkpoint's position moves behind it."""

    def fingerprint(self) -> str:
        """A short string that is equal where two processes would read the same data."""
        ...

    def known_states(self) -> bytes:
        """The newest known state of every stream as of the last committed step, for healing, checkpoints and `learn`
        elsewhere. Empty for sources whose rows are addressed directly."""
        ...

    def learn(self, states: bytes) -> None:
        """Take note of what `known_states` of another process gave."""

    def require_vocab(self, vocab_size: int) -> None:
        """Raises ValueError if the data has ids that a model with `vocab_size` embeddings does not have."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
