"""Reads the documents of text, JSONL and parquet files, in order."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from everstep.data.token_format import DataError
from everstep.run.files import open_regular

_SAMPLE_BYTES = 1 << 20
_READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".ndjson": "json", ".parquet": "parquet"}
"""Suffix -> format of the file."""


def _reader(path: Path) -> str | None:
    return _READERS.get(Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower())


def input_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of `paths`, in order. A directory stands for the text, JSONL and parquet files below it, sorted.
    Raises DataError if a path does not exist or if there are no files."""
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: there is no such input file or directory.")
        below = (file for file in path.rglob("*") if _reader(file) and not file.is_dir())
        files += sorted(below) if path.is_dir() else [path]
    if not files:
        raise DataError(f"no input: name files, or directories that contain files of {', '.join(_READERS)}.")
    return files


def identity(file: Path) -> dict[str, Any]:
    """Return name, size, and SHA-256 of the first and last MiB, to identify an input without reading all of it."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return {"name": file.name, "bytes": size, "sample_sha256": digest.hexdigest()}


def documents(files: Sequence[Path], text_key: str) -> Iterator[str]:
    """Yield the text of each document, "" if it is null. Raises DataError for a file that cannot be read, that lacks
    `text_key`, or that has something other than text under it."""
    for file in files:
        reader, number = _reader(file) or "text", 0
        try:
            for number, row in enumerate(_rows(file, reader, text_key), 1):
                if text_key not in row:
                    there = ", ".join(map(repr, row))[:300]
                    raise DataError(
                        f"{file}: document {number} has no key {text_key!r}; its keys are {there}. Set --text-key."
                    )
                text = "" if row[text_key] is None else row[text_key]
                if not isinstance(text, str):
                    raise DataError(f"{file}: document {number}: {text_key!r} holds {type(text).__name__}, not text.")
                text.encode()
                yield text
        except (DataError, MemoryError):
            raise
        except Exception as error:  # each format's library has its own exceptions
            why = f"not readable as {reader} after {number} documents: {str(error)[:200]!r}"
            raise DataError(f"{file}: {why}.") from error


def _rows(file: Path, reader: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield a file's documents as dicts with the text under `key`, and possibly other keys."""
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        if reader == "text":
            yield {key: stream.read().decode()}
        elif reader == "json":
            yield from (dict(json.loads(line)) for line in stream if line.strip())
        else:
            from pyarrow.parquet import ParquetFile

            table = ParquetFile(stream)
            columns = [key] if key in table.schema_arrow.names else None
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()
