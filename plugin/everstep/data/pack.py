"""Text to a token file, continued where it was interrupted.

Until OUT is whole, each chunk of whole documents is a file, renamed into place, in a folder beside it that is named
after the input. Another start reads on behind the documents of the chunks that are there. Where chunks
end depends on the documents alone, so the finished file is byte for byte that of a run without interruption. It needs
as much disk again as the chunks, and appears in one rename, after its checksums were compared."""

import contextlib
import hashlib
import io
import itertools
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from everstep.data import token_format
from everstep.data.byte_ids import BYTES, Encoder
from everstep.data.inputs import documents, identity, input_files
from everstep.data.token_format import HEAD, DataError, Footer
from everstep.run import typed
from everstep.run.files import hold_alone, write_whole

CHUNK_TOKENS = 8 << 20
_BATCH_DOCUMENTS = 1 << 8
"""Encoded together, on all cores."""
_DAMAGED = OSError, ValueError, KeyError, EOFError, NotImplementedError, zipfile.BadZipFile
"""What numpy raises for a file that is no whole archive of arrays."""


def pack(
    inputs: Sequence[Path],
    out: Path,
    encoder_of: Callable[[], Encoder] = lambda: BYTES,
    text_key: str = "text",
    tell: Callable[[str], None] = lambda sentence: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Footer:
    """Makes the token file `out` from `inputs`, or returns its footer if it was made from them before.

    Args:
        inputs: text files, JSONL, parquet, or directories of them.
        encoder_of: makes what gives the ids; called when the inputs are known to be there.
        text_key: the key or column that holds the text.
        tell: called with a sentence for each chunk.
        chunk_tokens: a chunk ends with the first document that brings it to as many tokens.
    Raises:
        DataError, ValueError: in one sentence that names the file or the option.
    """
    files = input_files(inputs)
    encoder = encoder_of()
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
            raise DataError(f"{out} exists and is no whole token file: choose another --out, or delete it.") from None
        if footer.source != source:
            raise DataError(
                f"{out} was made from other input or with another tokenizer: choose another --out, or delete it."
            )
        return footer
    folder = out.with_name(f"{out.name}.{hashlib.sha256(typed.dumps(source)).hexdigest()[:12]}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise DataError(f"{folder} is a link: remove it.")
    if not hold_alone(folder / "lock"):
        raise DataError(f"another `everstep pack` is writing {folder}: wait for it or stop it.")
    chunks = _Chunks(folder, np.dtype(token_format.dtype_for(encoder.vocab_size)).newbyteorder("<"))
    texts = itertools.islice(documents(files, text_key), chunks.read, None)
    for ids, read in _encoded(texts, encoder, chunk_tokens):
        chunks.add(ids, read)
        tell(f"{chunks.documents:,} documents, {chunks.tokens:,} tokens")
    if not chunks.documents:
        shutil.rmtree(folder)
        raise DataError(f"no document with text in {', '.join(map(str, inputs))}.")
    footer = chunks.join(folder / "whole", encoder.vocab_size, source)
    token_format.verify(folder / "whole")
    os.replace(folder / "whole", out)
    shutil.rmtree(folder, ignore_errors=True)  # another start may look for its lock at this moment
    return footer


def _encoded(texts: Iterator[str], encoder: Encoder, chunk_tokens: int) -> Iterator[tuple[list[np.ndarray], int]]:
    """For each chunk, the ids of its documents, and how many documents it took, including those that are left out
    for having fewer than two tokens."""
    chunk: list[np.ndarray] = []
    length = read = 0
    while batch := list(itertools.islice(texts, _BATCH_DOCUMENTS)):
        for text, ids in zip(batch, encoder.encode(batch), strict=True):
            read += 1
            if text and len(ids) > 1:
                chunk.append(ids)
                length += len(ids)
                if length >= chunk_tokens:
                    yield chunk, read
                    chunk, length, read = [], 0, 0
    if read:
        yield chunk, read


class _Chunks:
    """The chunks in a folder, in order: `ids` of type `dtype`, `lengths` of documents, and how many were `read`."""

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self._folder, self._dtype = folder, dtype
        self.read = self.documents = self.tokens = self._count = 0
        with contextlib.suppress(*_DAMAGED):  # stops at the first that is missing or damaged
            while True:
                with np.load(self._path(self._count), allow_pickle=False) as found:
                    self._added(found["lengths"], int(found["read"]))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.npz"

    def _added(self, lengths: np.ndarray, read: int) -> None:
        self._count += 1
        self.read += read
        self.documents += len(lengths)
        self.tokens += int(lengths.sum())

    def add(self, documents: list[np.ndarray], read: int) -> None:
        lengths = np.array([len(ids) for ids in documents], "<u8")
        ids = np.concatenate([*documents, np.empty(0, self._dtype)]).astype(self._dtype)
        file = io.BytesIO()
        np.savez(file, ids=ids, lengths=lengths, read=np.array(read))
        write_whole(self._path(self._count), file.getbuffer())
        self._added(lengths, read)

    def _all(self, name: str) -> Iterator[np.ndarray]:
        for number in range(self._count):
            try:
                with np.load(self._path(number), allow_pickle=False) as found:
                    yield found[name]
            except _DAMAGED as error:
                raise DataError(f"{self._path(number)} is damaged ({error}): delete it to make it again.") from None

    def join(self, path: Path, vocab_size: int, source: dict[str, Any]) -> Footer:
        """Writes the token file."""
        ends, largest, end = [], 0, 0
        starts_digest = hashlib.sha256()
        with path.open("wb") as file:
            file.write(HEAD)
            for ids in self._all("ids"):
                if len(ids):
                    file.write(ids.data)
                    end, largest = end + len(ids), max(largest, int(ids.max()))
                    ends.append((end, hashlib.sha256(ids.data).hexdigest()))
            file.write(bytes(-end * self._dtype.itemsize % 8))
            at = 0
            for lengths in (*self._all("lengths"), np.zeros(1, "<u8")):
                starts = (at + np.cumsum(lengths) - lengths).astype("<u8")
                at += int(lengths.sum())
                file.write(starts.data)
                starts_digest.update(starts.data)
            footer = Footer(
                dtype=token_format.dtype_for(vocab_size),
                tokens=end,
                documents=self.documents,
                left_out=self.read - self.documents,
                vocab_size=vocab_size,
                max_id=largest,
                source=source,
                chunks=ends,
                starts_sha256=starts_digest.hexdigest(),
            )
            token_format.write_footer(file, footer)
            file.flush()
            os.fsync(file.fileno())
        return footer
