"""Token ids of text read byte by byte: a byte is its own id, two more ids mark where a document begins and
ends."""

from collections.abc import Sequence
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


class ByteEncoder:
    """An `everstep.data.pack.Encoder` that gives the ids of ByteTokenizer, without torch."""

    vocab_size = VOCAB_SIZE
    identity: dict[str, Any] = {"kind": "bytes", "bos_id": BOS_ID, "eos_id": EOS_ID}  # noqa: RUF012

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [document_ids(text.encode()) for text in texts]
