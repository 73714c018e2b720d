"""The dataloader for rows of documents, numbered as `slot_source` defines."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.data.permutation import permutation
from everstep.titan.data.slot_source import Batch, SlotSource
from everstep.titan.data.texts import stdlib_text, token_file
from everstep.titan.names import BaseDataLoader, BaseTokenizer


class Rows(SlotSource):
    """Reads the rows of a token file or of the standard library's text.

    Under torchtitan's own trainer, rank d of D reads the rows (n * D + d) * B + i in its n-th microbatch, n from 0.
    With A = S * R / D accumulation steps, all ranks together read exactly the rows of step k's slots in step k.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        shuffle: bool = True
        """Read rows in an order that depends on `seed` and the epoch. Off: in the order of the text."""

        seed: int = 0
        """Seed of the shuffle."""

        path: str = ""
        """The token file; empty: the standard library's text."""

        step_rows: int = 0
        """Rows of a global batch under torchtitan's own trainer. 0: unknown."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        **kwargs,
    ):
        super().__init__(dp_rank, dp_world_size)
        self.documents = token_file(Path(config.path), tokenizer) if config.path else stdlib_text()
        self.rows = self.documents.rows(seq_len)
        if self.rows == 0:
            raise ValueError(
                f"{self.documents.name} has {self.documents.pairs} tokens with a label, too few for one row of "
                f"training.seq_len = {seq_len}: set a smaller seq_len or use more text."
            )
        self._shuffle, self._seed = config.shuffle, config.seed
        self._seq_len, self._local_batch_size = seq_len, local_batch_size
        self._step_rows = max(0, config.step_rows)
        self._rows_read = 0  # by all ranks together
        self._permutation = lru_cache(maxsize=2)(partial(permutation, self.rows, self._seed))  # by epoch

    def _batch(self, first_row: int) -> Batch:
        rows = []
        for number in range(first_row, first_row + self._local_batch_size):
            epoch, index = divmod(number, self.rows)
            if self._shuffle:
                index = self._permutation(epoch)(index)
            rows.append(self.documents.row(index, self._seq_len))
        inputs, labels, positions = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return {"input": inputs, "positions": positions}, labels

    # By slot.

    @property
    def _rows_per_step(self) -> int:
        """Rows of one global batch; 0 if `open_slots` was not called."""
        return self._slots * self.dp_size * self._local_batch_size

    def _slot(self, number: int, slot: int) -> Batch:
        batch_number = (number * self._slots + slot) * self.dp_size + self.dp_rank
        return self._batch(batch_number * self._local_batch_size)

    def committed(self, step: int) -> None:
        self._rows_read = (step - self.began_after) * self._rows_per_step

    def fingerprint(self) -> str:
        order = f"shuffled by seed {self._seed}" if self._shuffle else "in order"
        return f"{self.documents.content}, rows of {self._seq_len}, {order}"

    @property
    def largest_id(self) -> int:
        return self.documents.max_id

    # Under torchtitan's own trainer.

    def __iter__(self) -> Iterator[Batch]:
        stride = self.dp_size * self._local_batch_size
        if self._rows_read % stride:
            raise ValueError(
                f"the checkpoint has read {self._rows_read} rows, which {self.dp_size} ranks with batches "
                f"of {self._local_batch_size} cannot have read in equal parts: keep the number of ranks and "
                "training.local_batch_size."
            )
        while True:
            first_row = self._rows_read + self.dp_rank * self._local_batch_size
            self._rows_read += stride
            yield self._batch(first_row)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is equal on all ranks: rows read by all ranks together, rows of a step (0 if
        unknown), and the data's fingerprint."""
        return {
            "rows_read": self._rows_read,
            "rows_per_step": self._rows_per_step or self._step_rows,
            "data": self.fingerprint(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's position. Raises ValueError if it is of other data or another global batch."""
        if not state_dict:
            return
        if state_dict["data"] != self.fingerprint():
            raise ValueError(
                f"the checkpoint was trained on other data than {self.documents.name}: its data is "
                f"({state_dict['data']}), this run's is ({self.fingerprint()}). Use the checkpoint's data, seq_len and "
                'seed, or ignore its position with checkpoint.exclude_from_loading = ["dataloader"].'
            )
        per_step = self._rows_per_step
        if per_step and state_dict["rows_per_step"] not in (0, per_step):
            raise ValueError(
                f"the checkpoint's steps had {state_dict['rows_per_step']} rows, but this run's have {per_step}, so "
                "rows would be read twice or never: keep global_batch_size, or start a new run."
            )
        self._rows_read = state_dict["rows_read"]
        if per_step and self._rows_read % per_step:
            raise ValueError(
                f"the checkpoint has read {self._rows_read} rows, which is not a whole number of steps of {per_step} "
                "rows: keep global_batch_size."
            )
