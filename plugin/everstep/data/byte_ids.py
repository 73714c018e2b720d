"""Token ids of text read byte by byte: each byte is its own id; two more mark begin and end of a document."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BOS_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258


def document_ids(data: bytes) -> np.ndarray:
    """Return the ids of one document with BOS and EOS: uint16, shape [len(data) + 2]."""
    return np.pad(np.frombuffer(data, np.uint8).astype(np.uint16), 1, constant_values=(BOS_ID, EOS_ID))


@dataclass(frozen=True)
class Encoder:
    """A tokenizer as packing uses it."""

    vocab_size: int
    identity: dict[str, Any]
    """JSON values that are equal for encoders with the same ids."""
    encode: Callable[[Sequence[str]], list[np.ndarray]]
    """Returns the ids of each document, with BOS and EOS if the tokenizer has them."""


BYTES = Encoder(
    VOCAB_SIZE,
    {"kind": "bytes", "bos_id": BOS_ID, "eos_id": EOS_ID},
    lambda texts: [document_ids(text.encode()) for text in texts],
)
"""The encoder with the ids of ByteTokenizer. It does not import torch."""
