"""Text to a token file, continued where it was interrupted.

Until OUT is whole, three files stand beside it: `OUT.partial` (the token file so far), `OUT.partial.starts` (document
starts) and `OUT.partial.json` (the footer of what is finished so far, replaced after each chunk of whole documents).
Another start cuts the first two back to what the third says, and reads on behind as many documents as it counts. Where
chunks end depends on the documents alone, so the finished file is byte for byte that of a run without interruption.
OUT itself appears in one rename, after its checksums were compared."""

import fcntl
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import tyro

from everstep.data import token_format
from everstep.data.byte_ids import ByteEncoder
from everstep.data.inputs import InputError, documents, identity, input_files
from everstep.data.token_format import HEAD, Footer, TokenFileError
from everstep.run import typed
from everstep.run.files import write_json
from everstep.run.regular import read_regular
from everstep.run.typed import UnfitError

CHUNK_TOKENS = 8 << 20
_BATCH_DOCUMENTS = 1 << 8
"""Encoded together, on all cores."""


class Encoder(Protocol):
    """What packing asks of a tokenizer."""

    vocab_size: int
    identity: dict[str, Any]
    """Equal for encoders that give the same ids."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each document, with BOS and EOS if the tokenizer has them."""
        ...


@dataclass
class Pack:
    """Make a token file from text. Interrupted, the same command goes on where it was."""

    inputs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Text files (a document each), .jsonl and .parquet files (a document a line or row; .gz too), or
    directories of them."""

    out: Path = Path("corpus.tokens")
    """The token file to make, or to check with --verify."""

    tokenizer: str = "bytes"
    """A directory with a Hugging Face tokenizer.json (a model's hf_assets_path), or `bytes`."""

    text_key: str = "text"
    """The key or column that holds the text, in JSONL and parquet."""

    verify: bool = False
    """Make nothing; compare all of --out with its checksums."""


def pack(
    command: Pack,
    encoder_of: Callable[[], Encoder] = ByteEncoder,
    tell: Callable[[str], None] = lambda sentence: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Footer:
    """Makes `command.out` from `command.inputs`, or returns its footer if it was made from them before.

    Args:
        encoder_of: makes what gives the ids; called when the inputs are known to be there.
        tell: called with a sentence for each chunk.
        chunk_tokens: a chunk ends with the first document that brings it to as many tokens.
    Raises:
        InputError, TokenFileError, ValueError: in one sentence that names the file or the option.
    """
    files, out = input_files(command.inputs), command.out
    encoder = encoder_of()
    footer = Footer(
        dtype=token_format.dtype_for(encoder.vocab_size),
        tokens=0,
        documents=0,
        left_out=0,
        vocab_size=encoder.vocab_size,
        max_id=0,
        source={
            "tokenizer": encoder.identity,
            "text_key": command.text_key,
            "chunk_tokens": chunk_tokens,
            "inputs": [identity(file) for file in files],
        },
        chunks=[],
        starts_sha256="",
    )
    if out.exists():
        return _same(out, token_format.read_footer(out)[0], footer)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, starts_path, state = (
        out.with_name(out.name + end) for end in (".partial", ".partial.starts", ".partial.json")
    )
    with _own(partial) as tokens, _own(starts_path) as starts:
        try:
            fcntl.flock(tokens, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TokenFileError(f"another `everstep pack` is writing {partial}: wait for it or stop it.") from None
        footer = _taken_up(state, footer)
        _cut(tokens, len(HEAD) + footer.token_bytes if footer.tokens else 0)
        _cut(starts, 8 * footer.documents)
        if not footer.tokens:
            tokens.write(HEAD)
        texts = itertools.islice(documents(files, command.text_key), footer.documents + footer.left_out, None)
        for chunk, left_out in _chunks(texts, encoder, chunk_tokens):
            footer = replace(footer, left_out=footer.left_out + left_out)
            footer = _append(tokens, starts, chunk, footer) if chunk else footer
            write_json(state, asdict(footer))
            tell(f"{footer.documents:,} documents, {footer.tokens:,} tokens")
        if footer.documents:
            _finish(tokens, starts, footer)
            token_format.verify(partial)
    state.unlink(missing_ok=True)
    starts_path.unlink()
    if not footer.documents:
        partial.unlink()
        raise InputError(f"no document with text in {', '.join(map(str, command.inputs))}.")
    os.replace(partial, out)
    return footer


def _same(path: Path, made: Footer, wanted: Footer) -> Footer:
    """`made` if it is from what `wanted` is from. Raises TokenFileError."""
    if made.source != wanted.source:
        raise TokenFileError(
            f"{path} was made from other input or with another tokenizer: choose another --out, or delete {path}*."
        )
    return made


def _taken_up(state: Path, wanted: Footer) -> Footer:
    """What is finished so far, nothing of `wanted` if there is nothing. Raises TokenFileError."""
    try:
        found = typed.parse(Footer, typed.loads(read_regular(state)))
    except FileNotFoundError:
        return wanted
    except UnfitError as error:
        raise TokenFileError(f"{state} is damaged ({error}): delete {state.with_suffix('')}* to begin anew.") from None
    return _same(state.with_suffix(""), found, wanted) if found.documents else wanted


def _own(path: Path) -> BinaryIO:
    """A file beside OUT, made if it is not there. A link may be somebody else's and is not followed."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b")


def _cut(file: BinaryIO, size: int) -> None:
    """Leaves `file` with its first `size` bytes, standing at its end."""
    if os.fstat(file.fileno()).st_size < size:
        raise TokenFileError(f"{file.name} is shorter than it was. Delete the .partial files beside it to begin anew.")
    file.truncate(size)
    file.seek(size)


def _chunks(texts: Iterator[str], encoder: Encoder, chunk_tokens: int) -> Iterator[tuple[list[np.ndarray], int]]:
    """The ids of the documents of each chunk, and how many documents before its end are left out."""
    chunk: list[np.ndarray] = []
    length = left_out = 0
    while batch := list(itertools.islice(texts, _BATCH_DOCUMENTS)):
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            # A document of one token has no next token to learn.
            if not text or len(ids) < 2:
                left_out += 1
                continue
            chunk.append(ids)
            length += len(ids)
            if length >= chunk_tokens:
                yield chunk, left_out
                chunk, length, left_out = [], 0, 0
    if chunk or left_out:
        yield chunk, left_out


def _append(tokens: BinaryIO, starts: BinaryIO, chunk: Sequence[np.ndarray], footer: Footer) -> Footer:
    """Puts one chunk of documents on disk; `footer` with them."""
    ids = np.concatenate(chunk).astype(np.dtype(footer.dtype).newbyteorder("<"))
    ends = footer.tokens + np.cumsum([len(document) for document in chunk])
    tokens.write(ids.data)
    starts.write(np.array([footer.tokens, *ends[:-1]], "<u8").data)
    _sync(tokens)
    _sync(starts)
    end = int(ends[-1])
    return replace(
        footer,
        tokens=end,
        documents=footer.documents + len(chunk),
        max_id=max(footer.max_id, int(ids.max())),
        chunks=[*footer.chunks, (end, hashlib.sha256(ids.data).hexdigest())],
    )


def _finish(tokens: BinaryIO, starts: BinaryIO, footer: Footer) -> None:
    """Adds document starts and footer to the tokens. Done again from the start if it is interrupted."""
    tokens.write(bytes(-footer.token_bytes % 8))
    starts.write(np.array([footer.tokens], "<u8").data)
    starts.seek(0)
    digest = hashlib.sha256()
    while block := starts.read(16 << 20):
        digest.update(block)
        tokens.write(block)
    footer.starts_sha256 = digest.hexdigest()
    token_format.write_footer(tokens, footer)
    _sync(tokens)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
