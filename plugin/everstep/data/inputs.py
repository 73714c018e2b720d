"""The documents of text, JSONL and parquet files, in order.

Not by `datasets`: it gives a file one schema, and fails at the first line of JSON whose other keys differ."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.run.regular import open_regular

LONGEST_DOCUMENT_BYTES = 1 << 30
"""As text, unpacked. A few MB of gzip can stand for more than a machine has memory."""
_SAMPLE_BYTES = 1 << 20
_KINDS = (".txt", ".md", ".jsonl", ".ndjson", ".parquet")


class InputError(ValueError):
    """Input that cannot be packed, in one sentence that names its file and line."""


class DocumentError(InputError):
    """One document that cannot be packed, in input that is fine otherwise."""


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def input_files(paths: Sequence[Path]) -> list[Path]:
    """The files of `paths`, in order; a directory stands for the text, JSONL and parquet files below it, sorted.

    Raises InputError for a path that is not there and for nothing at all.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"no input file {path}.")
        files += sorted(file for file in path.rglob("*") if _suffix(file) in _KINDS) if path.is_dir() else [path]
    if not files:
        raise InputError(f"no input: name text, JSONL or parquet files, or directories of {', '.join(_KINDS)}.")
    return files


def identity(file: Path) -> dict[str, Any]:
    """What tells one input from another without reading all of it: name, size, SHA-256 of its first and last MiB."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return {"name": file.name, "bytes": size, "sample_sha256": digest.hexdigest()}


def documents(files: Sequence[Path], text_key: str) -> Iterator[str | DocumentError]:
    """The text of each document, or why it cannot be read. Raises InputError if a file cannot be read on."""
    for file in files:
        if _suffix(file) == ".parquet":
            yield from _parquet(file, text_key)
            continue
        try:
            with open_regular(file) as stream:
                unpacked: Any = gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream
                as_lines = _suffix(file) in (".jsonl", ".ndjson")
                yield from _jsonl(file, unpacked, text_key) if as_lines else _text(file, unpacked)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{file}: the gzip data is damaged or cut off ({error}).") from None


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > LONGEST_DOCUMENT_BYTES:
        raise InputError(f"{where}: a document of more than {LONGEST_DOCUMENT_BYTES} bytes. Cut it into several.")
    return data


def _text(file: Path, stream: Any) -> Iterator[str | DocumentError]:
    data = _bounded(stream.read(LONGEST_DOCUMENT_BYTES + 1), str(file))
    try:
        yield data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        yield DocumentError(f"{file}:{line}: not UTF-8 ({error.reason}). Convert the file, for instance with iconv.")


def _jsonl(file: Path, stream: Any, text_key: str) -> Iterator[str | DocumentError]:
    number = 0
    while line := _bounded(stream.readline(LONGEST_DOCUMENT_BYTES + 1), f"{file}:{number + 1}"):
        number += 1
        if not line.strip():
            continue
        try:
            record = json.loads(line.rstrip())
        except (ValueError, RecursionError) as error:
            yield DocumentError(f"{file}:{number}: not JSON ({error}).")
            continue
        keys = record if isinstance(record, dict) else {}
        if text_key in keys:
            yield _checked(record[text_key], text_key, f"{file}:{number}")
        else:
            there = ", ".join(map(repr, keys))[:300] or "no object"
            yield DocumentError(f"{file}:{number}: no key {text_key!r} (there: {there}). Name the text's: --text-key.")


def _parquet(file: Path, text_key: str) -> Iterator[str | DocumentError]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with open_regular(file) as stream, pyarrow.parquet.ParquetFile(stream) as table:
            names = ", ".join(table.schema_arrow.names)
            if text_key not in table.schema_arrow.names:
                raise InputError(f"{file}: no column {text_key!r} (there: {names}). Name the text's: --text-key.")
            for batch in table.iter_batches(columns=[text_key], batch_size=1024):
                for value in batch.column(0):
                    row += 1
                    yield _checked(value, text_key, f"{file}: row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: not readable as parquet after row {row} ({str(error)[:200]!r}).") from None


def _checked(value: Any, text_key: str, where: str) -> str | DocumentError:
    """A value of JSON or of parquet as text."""
    try:
        text = value.as_py() if hasattr(value, "as_py") else value
        if not isinstance(text, str):
            return DocumentError(f"{where}: {text_key!r} holds {type(text).__name__}, not text.")
        text.encode()
    except (ValueError, OverflowError) as error:  # half a surrogate pair, a date that Python does not have
        return DocumentError(f"{where}: {text_key!r} holds what is no text ({error}).")
    return text
