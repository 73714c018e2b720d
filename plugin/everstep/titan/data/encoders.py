"""Makes the encoder that `everstep pack --tokenizer` names: bytes, or a Hugging Face model directory's tokenizer."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from everstep.data.byte_ids import BYTES, Encoder


def _hugging_face(directory: Path) -> Encoder:
    """Return an encoder with the ids of torchtitan's HuggingFaceTokenizer with add_bos and add_eos. Uses all cores."""
    # Imported here because it imports torch, which packing bytes does not need.
    from everstep.titan.names import HuggingFaceTokenizer

    theirs = HuggingFaceTokenizer(tokenizer_path=str(directory))
    tokenizer = theirs.tokenizer
    tokenizer.no_padding()  # to the longest text of a batch; torchtitan encodes one text at a time
    tokenizer.no_truncation()
    before = [] if theirs.bos_id is None or theirs.hf_adds_bos else [theirs.bos_id]
    after = [] if theirs.eos_id is None or theirs.hf_adds_eos else [theirs.eos_id]

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast(list(texts))
        return [np.array([*before, *encoding.ids, *after], np.uint32) for encoding in encodings]

    return Encoder(
        # Not get_vocab_size(), which counts ids: a vocabulary may have gaps, and a model must hold the largest id.
        vocab_size=max(theirs.get_vocab().values(), default=-1) + 1,
        identity={
            "kind": "huggingface",
            "sha256": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
            "bos_id": theirs.bos_id,
            "eos_id": theirs.eos_id,
        },
        encode=encode,
    )


def encoder_for(tokenizer: str) -> Encoder:
    """Return the encoder that `--tokenizer` names. Raises ValueError with one sentence for the user."""
    if tokenizer == "bytes":
        return BYTES
    path = Path(tokenizer)
    if path.name == "tokenizer.json" and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise ValueError(
            f"no tokenizer {tokenizer!r}: give a directory with tokenizer.json (a model's hf_assets_path), "
            "that file, or `bytes`."
        )
    try:
        return _hugging_face(path)
    except Exception as error:
        # The package `tokenizers` raises a bare Exception for a file that it cannot parse.
        raise ValueError(f"the tokenizer in {path} cannot be loaded: {error}") from error
