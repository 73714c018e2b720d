"""Token ids of text read byte by byte: a byte is its own id, two more ids mark where a document begins and
ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258


def document_ids(data: bytes) -> np.ndarray:
    """The ids of one document, BOS and EOS included: uint16, shape [len(data) + 2]."""
    ids = np.empty(len(data) + 2, dtype=np.uint16)
    ids[0] = BOS_ID
    ids[1:-1] = np.frombuffer(data, dtype=np.uint8)
    ids[-1] = EOS_ID
    return ids


@dataclass(frozen=True)
class Encoder:
    """What packing asks of a tokenizer."""

    vocab_size: int
    identity: dict[str, Any]
    """Equal for encoders that give the same ids."""
    encode: Callable[[Sequence[str]], list[np.ndarray]]
    """The ids of each document, with BOS and EOS if the tokenizer has them."""


BYTES = Encoder(
    VOCAB_SIZE,
    {"kind": "bytes", "bos_id": BOS_ID, "eos_id": EOS_ID},
    lambda texts: [document_ids(text.encode()) for text in texts],
)
"""The ids of ByteTokenizer, without torch."""
