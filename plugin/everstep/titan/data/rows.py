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
        self._rows_read = 0  # by all ranks together
        self._loaded = 0  # rows that had been read at the checkpoint just loaded
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

    def _slot(self, number: int, slot: int) -> Batch:
        batch_number = (number * self._slots + slot) * self.dp_size + self.dp_rank
        return self._batch(batch_number * self._local_batch_size)

    def committed(self, step: int) -> None:
        self._rows_read = (step - self.began_after) * self._slots * self.dp_size * self._local_batch_size
        if self._loaded and self._rows_read not in (0, self._loaded):
            raise ValueError(
                f"the checkpoint of step {step} has read {self._loaded} rows, but this run's steps up to there read "
                f"{self._rows_read}, so rows would be read twice or never: keep global_batch_size, or start a new run."
            )
        self._loaded = 0

    def fingerprint(self) -> str:
        order = f"shuffled by seed {self._seed}" if self._shuffle else "in order"
        return f"{self.documents.content}, rows of {self._seq_len}, {order}"

    @property
    def largest_id(self) -> int:
        return self.documents.max_id

    # Under torchtitan's own trainer.

    def __iter__(self) -> Iterator[Batch]:
        while True:
            first_row = self._rows_read + self.dp_rank * self._local_batch_size
            self._rows_read += self.dp_size * self._local_batch_size
            yield self._batch(first_row)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks: rows read by all ranks together, and the data's fingerprint."""
        return {"rows_read": self._rows_read, "data": self.fingerprint()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a checkpoint's position. Raises ValueError if it is of other data. If the global batch differs,
        `committed` raises it, which is called with the checkpoint's step."""
        if not state_dict:
            return
        if state_dict["data"] != self.fingerprint():
            raise ValueError(
                f"the checkpoint was trained on other data than {self.documents.name}: its data is "
                f"({state_dict['data']}), this run's is ({self.fingerprint()}). Use the checkpoint's data, seq_len and "
                'seed, or ignore its position with checkpoint.exclude_from_loading = ["dataloader"].'
            )
        self._rows_read = self._loaded = state_dict["rows_read"]
