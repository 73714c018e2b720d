"""The format of a token file: the tokens of whole documents, the start of each document, and the file's origin.

    64 bytes           "everstep tokens 1\\n", zeros
    tokens             little-endian uint16 or uint32, padded with zeros to a multiple of 8 bytes
    document starts    little-endian uint64, one for each document and one for the end: token numbers
    footer             JSON: the fields of `Footer`
    48 bytes           length of the footer (uint64), SHA-256 of the footer, "evrtokns"

The footer comes last, so a file that was cut off anywhere has no footer and is known to be incomplete. Each chunk of
whole documents has its own SHA-256, so that an error can name the damaged place.
"""

import hashlib
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
from pydantic import Field

from everstep.data.byte_ids import BYTES
from everstep.run import typed
from everstep.run.files import open_regular
from everstep.run.typed import Count, UnfitError

HEAD = b"everstep tokens 1\n".ljust(64, b"\0")
_TAIL = struct.Struct("<Q32s8s")
_TAIL_MAGIC = b"evrtokns"
FOOTER_LIMIT = 1 << 30


class DataError(ValueError):
    """A token file, or input for one, cannot be used. The message is one sentence that names the file."""


@dataclass(kw_only=True)
class Footer:
    """The footer of a token file."""

    dtype: Literal["uint16", "uint32"]
    tokens: Annotated[int, Field(ge=0, le=1 << 60)]
    documents: Annotated[int, Field(ge=0, le=1 << 60)]
    left_out: Count
    """Number of documents of the input that are not in the file, because they have no text or fewer than two tokens."""
    vocab_size: Count
    """Vocabulary size of the tokenizer."""
    max_id: Count
    """Largest token id in the file."""
    source: dict[str, Any]
    """Identity of the file's origin: tokenizer, inputs, text key, chunk size."""
    chunks: list[tuple[Count, str]]
    """For each chunk of tokens, in order: the token number where it ends, and the SHA-256 of its bytes."""
    starts_sha256: str

    @property
    def token_bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize

    @property
    def starts_at(self) -> int:
        """Byte offset of the document starts."""
        return len(HEAD) + self.token_bytes + -self.token_bytes % 8


def write_footer(file: BinaryIO, footer: Footer) -> None:
    """Write the end of a token file. `file` is positioned after the document starts."""
    text = typed.dumps(asdict(footer))
    file.write(text + _TAIL.pack(len(text), hashlib.sha256(text).digest(), _TAIL_MAGIC))


def read_footer(path: Path) -> tuple[Footer, str]:
    """Return the footer and its SHA-256. Raises DataError if the file is unreadable, incomplete, damaged or foreign."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(HEAD)) != HEAD:
                raise DataError(f"{path} is not a token file: make one with `everstep pack`.")
            file.seek(max(0, size - _TAIL.size))
            length, digest, magic = _TAIL.unpack(file.read(_TAIL.size))
            file.seek(max(0, size - _TAIL.size - min(length, FOOTER_LIMIT)))
            text = file.read(min(length, FOOTER_LIMIT))
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): data.path must be a token file made by `everstep pack`."
        ) from None
    if magic != _TAIL_MAGIC or length > size:
        raise DataError(f"{path} is incomplete: it was cut off after it was made. Copy it again or pack it again.")
    if hashlib.sha256(text).digest() != digest:
        raise DataError(f"{path} is damaged: the checksum of its footer differs. Copy it again or pack it again.")
    try:
        footer = typed.parse(Footer, typed.loads(text))
    except UnfitError as error:
        raise DataError(f"{path} has a footer that no version of `everstep pack` writes: {error}") from None
    if footer.starts_at + 8 * (footer.documents + 1) + length + _TAIL.size != size:
        raise DataError(f"{path} has {size} bytes, which do not match its {footer.tokens} tokens. Copy it again.")
    return footer, digest.hex()


def in_bytes(path: Path) -> bool:
    """Return whether the file was packed byte by byte, without a tokenizer. Raises DataError as `read_footer` does."""
    footer, _ = read_footer(path)
    return footer.source.get("tokenizer") == BYTES.identity


def map_tokens(path: Path, footer: Footer) -> tuple[np.ndarray, np.ndarray]:
    """Return the file's tokens, shape [tokens], and document starts, uint64, shape [documents + 1], memory-mapped and
    read-only. Raises DataError for a file without tokens, which cannot be mapped."""
    if not footer.tokens:
        raise DataError(f"{path} has no tokens.")
    tokens = np.memmap(path, np.dtype(footer.dtype).newbyteorder("<"), "r", len(HEAD), (footer.tokens,))
    starts = np.memmap(path, np.dtype("<u8"), "r", footer.starts_at, (footer.documents + 1,))
    return tokens, starts


def verify(path: Path) -> Footer:
    """Read a whole token file, compare it with its checksums, and compare footer and document starts with the tokens.
    Return the footer. Raises DataError, which names the file and the first damaged place."""
    footer, _ = read_footer(path)
    tokens, starts = map_tokens(path, footer)
    largest = begin = 0
    for end, sha256 in footer.chunks:
        chunk = tokens[begin:end]
        if not len(chunk) or hashlib.sha256(chunk.data).hexdigest() != sha256:
            raise _damaged(path, f"the checksum of its tokens {begin} to {end - 1} differs")
        largest, begin = max(largest, int(chunk.max())), end
    if begin != footer.tokens or largest != footer.max_id:
        raise _damaged(path, f"its chunks have {begin} tokens and ids up to {largest}, which its footer contradicts")
    if hashlib.sha256(starts.data).hexdigest() != footer.starts_sha256:
        raise _damaged(path, "the checksum of its document starts differs")
    if starts[0] != 0 or starts[-1] != footer.tokens or not (starts[1:] > starts[:-1]).all():
        raise _damaged(path, f"its document starts do not increase from 0 to {footer.tokens}")
    return footer


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is damaged: {what}. Copy it again or pack it again.")
