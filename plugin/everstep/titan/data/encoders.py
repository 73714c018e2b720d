"""The encoder that a name means, and the one with the tokenizer of a Hugging Face model directory."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from everstep.data.byte_ids import ByteEncoder
from everstep.data.pack import Encoder


class HuggingFaceEncoder:
    """The ids that torchtitan's HuggingFaceTokenizer gives with add_bos and add_eos, encoded on all cores."""

    def __init__(self, directory: Path):
        # Here, because it imports torch, which packing bytes does without.
        from everstep.titan.data.names import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(tokenizer_path=str(directory))
        self._tokenizer = tokenizer.tokenizer
        self._before = _added(tokenizer.bos_id, tokenizer.hf_adds_bos)
        self._after = _added(tokenizer.eos_id, tokenizer.hf_adds_eos)
        # get_vocab_size() counts ids; where a vocabulary has gaps the largest id is what a model must hold.
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.identity = {
            "kind": "huggingface",
            "sha256": hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest(),
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
        }

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts))
        return [np.array([*self._before, *encoding.ids, *self._after], np.uint32) for encoding in encodings]


def _added(token_id: int | None, tokenizer_adds_it: bool) -> list[int]:
    return [] if token_id is None or tokenizer_adds_it else [token_id]


def encoder_for(tokenizer: str) -> Encoder:
    """The encoder that `--tokenizer` names. Raises ValueError in one sentence."""
    if tokenizer == "bytes":
        return ByteEncoder()
    path = Path(tokenizer)
    if path.name == "tokenizer.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise ValueError(
            f"no tokenizer {tokenizer!r}: give a directory with tokenizer.json (a model's hf_assets_path), "
            "that file, or `bytes`."
        )
    try:
        return HuggingFaceEncoder(path)
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        # `tokenizers` raises bare Exception for files it cannot parse.
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {error}") from error
