"""The token file: tokens of whole documents, where each document starts, and what the file was made from.

    64 bytes           "everstep tokens 1\\n", zeros
    tokens             little-endian uint16 or uint32, padded with zeros to a multiple of 8 bytes
    document starts    little-endian uint64, one for each document and one for the end: token numbers
    footer             JSON: the fields of `Footer`
    48 bytes           length of the footer (uint64), SHA-256 of the footer, "evrtokns"

The footer comes last, so a file that was cut off anywhere has none and is known to be incomplete. Tokens are
covered by one SHA-256 for each chunk of whole documents, so that a damaged place can be named.
"""

import hashlib
import itertools
import os
import re
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np

from everstep.run import typed
from everstep.run.regular import NotRegularError, open_regular
from everstep.run.typed import Count, UnfitError

HEAD = b"everstep tokens 1\n".ljust(64, b"\0")
_TAIL = struct.Struct("<Q32s8s")
_TAIL_MAGIC = b"evrtokns"
_READ_BYTES = 16 << 20
_FOOTER_LIMIT = 1 << 30
_SHA256 = re.compile("[0-9a-f]{64}")
_WIDTH = {"uint16": 2, "uint32": 4}


class TokenFileError(ValueError):
    """A token file that cannot be used, in one sentence that names it."""


@dataclass(kw_only=True)
class Footer:
    """What a token file says of itself."""

    dtype: Literal["uint16", "uint32"]
    tokens: Annotated[int, typed.Within(0, 1 << 60)]
    documents: Annotated[int, typed.Within(0, 1 << 60)]
    left_out: Count
    """Documents of the input that are not in the file: without text, or too bad to read."""
    vocab_size: Count
    """The tokenizer's."""
    max_id: Count
    """The largest id in the file."""
    source: dict[str, Any]
    """Identity of what the file was made from: tokenizer, inputs, text key."""
    chunks: list[tuple[Count, str]]
    """For each chunk of tokens, in order: the token number where it ends, SHA-256 of its bytes."""
    starts_sha256: str

    def __post_init__(self) -> None:
        """Raises ValueError unless the fields can be together: chunks that cover all tokens, ids of the type."""
        ends = [0, *(end for end, _ in self.chunks)]
        if any(end <= begin for begin, end in itertools.pairwise(ends)) or ends[-1] != self.tokens:
            raise ValueError(f"its chunks do not cover its {self.tokens} tokens")
        if not all(map(_SHA256.fullmatch, [*(digest for _, digest in self.chunks), self.starts_sha256])):
            raise ValueError("a checksum is no SHA-256")
        if self.documents > self.tokens or self.max_id >= 256 ** _WIDTH[self.dtype]:
            raise ValueError(f"{self.documents} documents of {self.tokens} tokens with ids to {self.max_id} in no file")
        if type(self.source.get("tokenizer")) is not dict:
            raise ValueError("it does not say which tokenizer made it")

    @property
    def token_bytes(self) -> int:
        return self.tokens * _WIDTH[self.dtype]

    @property
    def starts_at(self) -> int:
        """Byte offset of the document starts."""
        return len(HEAD) + self.token_bytes + padding(self.token_bytes)

    @property
    def footer_at(self) -> int:
        """Byte offset of the footer."""
        return self.starts_at + 8 * (self.documents + 1)


def padding(token_bytes: int) -> int:
    """Zero bytes after `token_bytes` bytes of tokens."""
    return -token_bytes % 8


def dtype_for(vocab_size: int) -> str:
    """The narrowest of the two token types that holds ids below `vocab_size`."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_footer(file: BinaryIO, footer: Footer) -> None:
    """Ends `file`, which stands right after the document starts."""
    text = typed.dumps(asdict(footer))
    file.write(text + _TAIL.pack(len(text), hashlib.sha256(text).digest(), _TAIL_MAGIC))


def read_footer(path: Path) -> tuple[Footer, str]:
    """The footer and its SHA-256. Raises TokenFileError unless the file is whole and of this format."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(HEAD)) != HEAD:
                raise TokenFileError(f"{path} is no token file: make one with `everstep pack`.")
            cut = TokenFileError(
                f"{path} is incomplete: it was cut off after it was made. Copy it again or pack it again."
            )
            if size < len(HEAD) + _TAIL.size:
                raise cut
            file.seek(size - _TAIL.size)
            length, digest, magic = _TAIL.unpack(file.read(_TAIL.size))
            if magic != _TAIL_MAGIC or length > min(_FOOTER_LIMIT, size - len(HEAD) - _TAIL.size):
                raise cut
            file.seek(size - _TAIL.size - length)
            text = file.read(length)
    except FileNotFoundError:
        raise TokenFileError(f"no token file {path}: check the path, or make it with `everstep pack`.") from None
    except IsADirectoryError:
        raise TokenFileError(f"{path} is a directory, data.path needs a token file.") from None
    except NotRegularError:
        raise TokenFileError(f"{path} is no file, data.path needs a token file.") from None
    if hashlib.sha256(text).digest() != digest:
        raise TokenFileError(f"{path} is damaged: the checksum of its footer differs. Copy it again or pack it again.")
    try:
        footer = typed.parse(Footer, typed.loads(text, _FOOTER_LIMIT))
    except UnfitError as error:
        raise TokenFileError(f"{path} has a footer that no version of `everstep pack` writes: {error}") from None
    if footer.footer_at + length + _TAIL.size != size:
        raise cut
    return footer, digest.hex()


def in_bytes(path: Path) -> bool:
    """Whether the file was packed byte by byte, without a tokenizer. Raises TokenFileError as `read_footer`."""
    footer, _ = read_footer(path)
    return footer.source["tokenizer"].get("kind") == "bytes"


def map_tokens(path: Path, footer: Footer) -> tuple[np.ndarray, np.ndarray]:
    """The file's tokens, shape [tokens], and document starts, uint64, shape [documents + 1]; memory-mapped,
    read only. Raises TokenFileError for a file without tokens, which cannot be mapped."""
    if not footer.tokens:
        raise TokenFileError(f"{path} has no tokens.")
    tokens = np.memmap(path, np.dtype(footer.dtype).newbyteorder("<"), "r", len(HEAD), (footer.tokens,))
    starts = np.memmap(path, np.dtype("<u8"), "r", footer.starts_at, (footer.documents + 1,))
    return tokens, starts


def verify(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> Footer:
    """Reads all of `path` and compares it with its checksums, and what its footer and its document starts say with the
    tokens.

    Args:
        on_bytes: called with the number of bytes read since the last call.
    Raises:
        TokenFileError: naming the file and the first damaged place.
    """
    footer, _ = read_footer(path)
    width = _WIDTH[footer.dtype]
    with open_regular(path) as file:
        begin = 0
        for end, sha256 in footer.chunks:
            place = f"tokens {begin} to {end - 1}"
            _check(file, path, len(HEAD) + begin * width, (end - begin) * width, sha256, place, on_bytes)
            begin = end
        starts_bytes = 8 * (footer.documents + 1)
        _check(file, path, footer.starts_at, starts_bytes, footer.starts_sha256, "document starts", on_bytes)
    tokens, starts = map_tokens(path, footer)
    if not documents_rise(starts, footer.tokens):
        raise TokenFileError(f"{path} is damaged: its document starts do not rise from 0 to {footer.tokens}.")
    largest = max((int(tokens[at : at + _READ_BYTES].max()) for at in range(0, footer.tokens, _READ_BYTES)), default=0)
    if largest != footer.max_id:
        raise TokenFileError(f"{path} is damaged: it has ids up to {largest}, its footer says {footer.max_id}.")
    return footer


def documents_rise(starts: np.ndarray, tokens: int) -> bool:
    """Whether document starts, shape [documents + 1], rise strictly from 0 to `tokens`."""
    if not len(starts) or int(starts[0]) != 0 or int(starts[-1]) != tokens:
        return False
    blocks = (starts[at : at + _READ_BYTES + 1] for at in range(0, len(starts), _READ_BYTES))
    return all(bool((block[1:] > block[:-1]).all()) for block in blocks)


def _check(
    file: BinaryIO, path: Path, at: int, size: int, sha256: str, place: str, on_bytes: Callable[[int], None]
) -> None:
    file.seek(at)
    digest = hashlib.sha256()
    while size > 0:
        block = file.read(min(size, _READ_BYTES))
        if not block:
            break
        digest.update(block)
        size -= len(block)
        on_bytes(len(block))
    if digest.hexdigest() != sha256:
        raise TokenFileError(f"{path} is damaged: the checksum of its {place} differs. Copy it again or pack it again.")
