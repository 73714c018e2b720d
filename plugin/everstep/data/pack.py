"""Makes a token file from text.

The file grows in a temporary folder beside OUT. After its checksums are verified, one rename puts it at OUT, so a file
at OUT is complete."""

import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from everstep.data import token_format
from everstep.data.byte_ids import BYTES, Encoder
from everstep.data.inputs import documents, input_files
from everstep.data.token_format import HEAD, DataError, Footer

CHUNK_TOKENS = 8 << 20
_BATCH_DOCUMENTS = 1 << 8
"""Documents that are encoded together, on all cores."""


def pack(
    inputs: Sequence[Path],
    out: Path,
    encoder_of: Callable[[], Encoder] = lambda: BYTES,
    text_key: str = "text",
    tell: Callable[[str], None] = lambda sentence: None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Footer:
    """Make the token file `out` from `inputs`. Return its footer.

    Args:
        inputs: text, JSONL or parquet files, or directories of them.
        encoder_of: makes the encoder; called after the inputs are found.
        text_key: the key or column that holds the text.
        tell: called after each chunk, with a sentence on the progress.
        chunk_tokens: size of a chunk; it ends with the first document that makes it at least this many tokens long.
    Raises:
        DataError, ValueError: with one sentence that names the file or the option.
    """
    if os.path.lexists(out):
        raise DataError(f"{out} exists already: choose another --out, or delete it.")
    files = input_files(inputs)
    encoder = encoder_of()
    footer = Footer(
        dtype=token_format.dtype_for(encoder.vocab_size), tokens=0, documents=0, left_out=0,
        vocab_size=encoder.vocab_size, max_id=0, chunks=[], starts_sha256="",
        source={"tokenizer": encoder.identity, "text_key": text_key, "inputs": [file.name for file in files]},
    )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.parent) as folder:
        draft = Path(folder) / "tokens"
        _write(draft, footer, _encoded(documents(files, text_key), encoder, chunk_tokens), tell)
        if not footer.documents:
            raise DataError(f"no document with text in {', '.join(map(str, inputs))}.")
        token_format.verify(draft)
        os.replace(draft, out)
    return footer


def _encoded(texts: Iterator[str], encoder: Encoder, chunk_tokens: int) -> Iterator[tuple[list[np.ndarray], int]]:
    """Yield for each chunk the ids of its documents, and the number of documents read for it. The number includes those
    left out, which have no text or fewer than two tokens."""
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


def _write(
    path: Path, footer: Footer, chunks: Iterable[tuple[list[np.ndarray], int]], tell: Callable[[str], None]
) -> None:
    """Write a token file of these chunks, as from `_encoded`. `footer` is that of a file without tokens; it is updated
    with each chunk."""
    with path.open("xb") as file, tempfile.TemporaryFile(dir=path.parent) as starts:
        file.write(HEAD)
        for documents, read in chunks:
            ids = np.concatenate([*documents, np.empty(0, np.uint16)]).astype(np.dtype(footer.dtype).newbyteorder("<"))
            lengths = np.array([len(document) for document in documents], np.int64)
            file.write(ids.data)
            starts.write((footer.tokens + np.cumsum(lengths) - lengths).astype("<u8").data)
            footer.tokens += len(ids)
            footer.documents += len(documents)
            footer.left_out += read - len(documents)
            footer.max_id = max(footer.max_id, int(ids.max(initial=0)))
            if documents:
                footer.chunks.append((footer.tokens, hashlib.sha256(ids.data).hexdigest()))
            tell(f"{footer.documents:,} documents, {footer.tokens:,} tokens")
        file.write(bytes(-footer.token_bytes % 8))
        starts.write(footer.tokens.to_bytes(8, "little"))
        starts.seek(0)
        footer.starts_sha256 = hashlib.file_digest(starts, "sha256").hexdigest()
        starts.seek(0)
        shutil.copyfileobj(starts, file)
        token_format.write_footer(file, footer)
        file.flush()
        os.fsync(file.fileno())
