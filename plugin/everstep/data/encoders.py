"""Text to ids for packing: what packing asks of an encoder, and the one that reads byte by byte."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from everstep.data import byte_ids


class Encoder(Protocol):
    vocab_size: int
    identity: dict[str, Any]
    """Equal for encoders that give the same ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each document, with BOS and EOS where the tokenizer has them."""
        ...


class ByteEncoder:
    """The ids of ByteTokenizer, without torch."""

    vocab_size = byte_ids.VOCAB_SIZE
    identity = {"kind": "bytes", "bos_id": byte_ids.BOS_ID, "eos_id": byte_ids.EOS_ID}  # noqa: RUF012

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [byte_ids.document_ids(text.encode()) for text in texts]
