"""A tokenizer that needs no files: one id per UTF-8 byte. Its 258 ids fit the vocabulary of torchtitan's debug models,
2048."""

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.data.byte_ids import BOS_ID, EOS_ID, VOCAB_SIZE
from everstep.titan.names import BaseTokenizer


class ByteTokenizer(BaseTokenizer):
    """Ids 0 to 255 are the bytes, 256 begins a document and 257 ends it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config | None = None, *, tokenizer_path: str | None = None):
        super().__init__()
        self.bos_id = BOS_ID
        self.eos_id = EOS_ID

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Return the ids of `text` in UTF-8, with the document's begin and end ids if requested."""
        return [BOS_ID] * add_bos + list(text.encode()) + [EOS_ID] * add_eos

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of `token_ids`, without begin and end ids and ids that this tokenizer does not have. Bytes
        that are not UTF-8 become U+FFFD."""
        return bytes(token for token in token_ids if 0 <= token < 256).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE
