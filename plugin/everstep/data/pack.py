"""Makes a token file from text, and resumes after an interruption.

Until OUT is complete, a draft of it grows by chunks of whole documents in a folder beside OUT whose name depends on the
input. A resumed `pack` continues after the documents of the chunks in the draft. The ends of chunks depend only on the
documents, so the finished file is byte for byte that of a run without interruption. After its checksums are verified,
one rename puts it at OUT."""

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from everstep.data import token_format
from everstep.data.byte_ids import BYTES, Encoder
from everstep.data.inputs import documents, identity, input_files
from everstep.data.token_format import HEAD, DataError, Footer
from everstep.run import typed
from everstep.run.files import lock_for_life

CHUNK_TOKENS = 8 << 20
_BATCH_DOCUMENTS = 1 << 8
"""Documents that are encoded together, on all cores."""


def pack(
    inputs: Sequence[Path],
    out: Path,
    encoder: Encoder = BYTES,
    text_key: str = "text",
    tell: Callable[[str], None] = lambda sentence: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Footer:
    """Make the token file `out` from `inputs`, unless it was already made from them. Return its footer.

    Args:
        inputs: text, JSONL or parquet files, or directories of them.
        text_key: the key or column that holds the text.
        tell: called after each chunk, with a sentence on the progress.
        chunk_tokens: size of a chunk; it ends with the first document that makes it at least this many tokens long.
    Raises:
        DataError, ValueError: with one sentence that names the file or the option.
    """
    files = input_files(inputs)
    source = {
        "tokenizer": encoder.identity,
        "text_key": text_key,
        "chunk_tokens": chunk_tokens,
        "inputs": [identity(file) for file in files],
    }
    if out.exists():
        try:
            footer, _ = token_format.read_footer(out)
        except DataError:
            raise DataError(f"{out} is not a complete token file: choose another --out, or delete it.") from None
        if footer.source != source:
            raise DataError(f"{out} was made from another input or tokenizer: choose another --out, or delete it.")
        return footer
    folder = out.with_name(f"{out.name}.{hashlib.sha256(typed.dumps(source)).hexdigest()[:12]}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise DataError(f"{folder} is a symbolic link: remove it.")
    if not lock_for_life(folder / "lock"):
        raise DataError(f"another `everstep pack` is writing {folder}: wait for it or stop it.")
    draft = _Draft(folder, encoder.vocab_size, source)
    texts = itertools.islice(documents(files, text_key), draft.footer.documents + draft.footer.left_out, None)
    try:
        for chunk in _encoded(texts, encoder, chunk_tokens):
            draft.add(chunk)
            tell(f"{draft.footer.documents:,} documents, {draft.footer.tokens:,} tokens")
    except ValueError as error:
        raise DataError(f"{error} What is packed so far is in {folder}: remove it if the input changes.") from None
    if not draft.footer.documents:
        shutil.rmtree(folder)
        raise DataError(f"no document with text in {', '.join(map(str, inputs))}.")
    draft.finish()
    try:
        footer = token_format.verify(draft.file)
    except DataError:
        raise DataError(f"{draft.file} is damaged: remove {folder} to start again.") from None
    os.replace(draft.file, out)
    shutil.rmtree(folder, ignore_errors=True)  # another `pack` may be opening the lock now
    for left in out.parent.glob(f"{escape(out.name)}.*.partial"):
        tell(f"{left} is what another `pack` for {out} left: remove it unless that still runs")
    return footer


def _encoded(texts: Iterator[str], encoder: Encoder, chunk_tokens: int) -> Iterator[list[np.ndarray]]:
    """Yield for each chunk the ids of its documents: none for one that has no text or fewer than two tokens, which is
    left out of the file."""
    chunk: list[np.ndarray] = []
    length = 0
    while batch := list(itertools.islice(texts, _BATCH_DOCUMENTS)):
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            chunk.append(ids if text and len(ids) > 1 else ids[:0])
            length += len(chunk[-1])
            if length >= chunk_tokens:
                yield chunk
                chunk, length = [], 0
    if chunk:
        yield chunk


class _Draft:
    """An unfinished token file: a file with head and tokens, a file with document starts, and a file with the footer of
    all complete chunks. Data beyond the footer, of a chunk that was interrupted, is cut off and written again."""

    def __init__(self, folder: Path, vocab_size: int, source: dict[str, Any]) -> None:
        self.file, self._starts, self._footer = folder / "tokens", folder / "starts", folder / "footer"
        self.footer = Footer(
            dtype="uint16" if vocab_size <= 1 << 16 else "uint32", tokens=0, documents=0, left_out=0,
            vocab_size=vocab_size, max_id=0, source=source, chunks=[], starts_sha256="",
        )  # fmt: skip
        try:
            self.footer = typed.parse(Footer, typed.loads(self._footer.read_bytes()))
        except FileNotFoundError:
            pass  # no chunk is complete yet
        except typed.UnfitError:
            raise DataError(f"{self._footer} is damaged: remove {folder} to start again.") from None
        if not self.footer.tokens:
            self.file.write_bytes(HEAD)
            self._starts.write_bytes(b"")
        for path, size in ((self.file, len(HEAD) + self.footer.token_bytes), (self._starts, 8 * self.footer.documents)):
            if path.stat().st_size < size:
                raise DataError(f"{path} is shorter than its footer says: remove {folder} to start again.")
            os.truncate(path, size)

    def add(self, chunk: list[np.ndarray]) -> None:
        """Write a chunk of documents, without those that have no ids."""
        before, documents = self.footer, [ids for ids in chunk if len(ids)]
        ids = np.concatenate(chunk).astype(np.dtype(before.dtype).newbyteorder("<"))
        lengths = np.array([len(document) for document in documents], np.int64)
        _append(self.file, ids.data)
        _append(self._starts, (before.tokens + np.cumsum(lengths) - lengths).astype("<u8").data)
        end = before.tokens + len(ids)
        self.footer = replace(
            before,
            tokens=end,
            documents=before.documents + len(documents),
            left_out=before.left_out + len(chunk) - len(documents),
            max_id=max(before.max_id, int(ids.max(initial=0))),
            chunks=[*before.chunks, (end, hashlib.sha256(ids.data).hexdigest())] if documents else before.chunks,
        )
        draft = self._footer.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        _append(draft, typed.dumps(asdict(self.footer)))
        os.replace(draft, self._footer)

    def finish(self) -> None:
        """Complete the file: pad the tokens, and append the document starts and the footer."""
        _append(self.file, bytes(-self.footer.token_bytes % 8))
        _append(self._starts, self.footer.tokens.to_bytes(8, "little"))
        with self.file.open("ab") as file, self._starts.open("rb") as starts:
            self.footer.starts_sha256 = hashlib.file_digest(starts, "sha256").hexdigest()
            starts.seek(0)
            shutil.copyfileobj(starts, file)
            token_format.write_footer(file, self.footer)
            file.flush()
            os.fsync(file.fileno())


def _append(path: Path, data: bytes | memoryview) -> None:
    """Append data to a file and sync it to disk."""
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
