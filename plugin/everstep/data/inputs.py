"""Documents out of text, JSONL and parquet files, readable from any document on."""

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from everstep.run.regular import open_regular

_SAMPLE_BYTES = 1 << 20
LONGEST_DOCUMENT_BYTES = 1 << 30
"""As text, unpacked. A few MB of gzip can stand for more than a machine has memory."""
_JSONL = {".jsonl", ".ndjson"}
_KNOWN = {*_JSONL, ".parquet", ".txt", ".md"}


class InputError(ValueError):
    """Input that cannot be packed, in one sentence that names its file and line."""


class DocumentError(InputError):
    """One document that cannot be packed, in input that is fine otherwise."""


def refuse(error: DocumentError) -> None:
    """What is done about a bad document unless somebody wants to go on without it."""
    raise error


OnBad = Callable[[DocumentError], None]


@dataclass(frozen=True)
class Place:
    """Where a document ends and the next begins."""

    file: int = 0
    """Number of the input file."""
    offset: int = 0
    """JSONL: bytes (uncompressed); parquet: rows; text: 1 behind the file's only document."""
    line: int = 0
    """JSONL: lines."""


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix == ".gz" else path.suffix.lower()


def input_files(paths: Sequence[Path]) -> list[Path]:
    """The files of `paths`, in order; a directory stands for the text, JSONL and parquet files below it,
    sorted.

    Raises InputError for a path that is not there and for nothing at all.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if _suffix(file) in _KNOWN and file.is_file())
            if not found:
                raise InputError(f"{path} holds no .txt, .md, .jsonl, .ndjson or .parquet file.")
            files += found
        elif path.exists():
            files.append(path)
        else:
            raise InputError(f"no input file {path}.")
    if not files:
        raise InputError("no input: name text, JSONL or parquet files, or directories of them.")
    return files


def identity(file: Path) -> dict[str, Any]:
    """What tells one input from another without reading all of it: name, size, SHA-256 of its first and last
    MiB."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = hashlib.sha256(stream.read(_SAMPLE_BYTES))
        stream.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(stream.read(_SAMPLE_BYTES))
    return {"name": file.name, "bytes": size, "sample_sha256": digest.hexdigest()}


def read_documents(
    files: Sequence[Path], text_key: str, start: Place, on_bad: OnBad = refuse
) -> Iterator[tuple[str, Place]]:
    """The documents from `start` on, each with the place behind it.

    Args:
        on_bad: called with each document that cannot be read; if it returns, the document's text is empty.
    Raises:
        InputError: for a file that cannot be read on.
    """
    for number in range(start.file, len(files)):
        place = start if number == start.file else Place(file=number)
        suffix = _suffix(files[number])
        if suffix in _JSONL:
            yield from _jsonl(files[number], text_key, place, on_bad)
        elif suffix == ".parquet":
            yield from _parquet(files[number], text_key, place, on_bad)
        else:
            yield from _text(files[number], place, on_bad)


def share_read(file: Path, place: Place, size: int) -> int:
    """About how many of `file`'s `size` bytes lie before `place`. For a progress bar."""
    if _suffix(file) in _JSONL and file.suffix != ".gz":
        return place.offset
    if _suffix(file) == ".parquet":
        import pyarrow.parquet

        return size * place.offset // max(1, pyarrow.parquet.read_metadata(file).num_rows)
    return 0


def _open(file: Path) -> Any:
    stream = open_regular(file)
    return gzip.GzipFile(fileobj=stream) if file.suffix == ".gz" else stream


def _text(file: Path, place: Place, on_bad: OnBad) -> Iterator[tuple[str, Place]]:
    if place.offset:
        return
    with _open(file) as stream:
        data = _read(str(file), lambda: stream.read(LONGEST_DOCUMENT_BYTES + 1))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text, line = "", data.count(b"\n", 0, error.start) + 1
        bad = DocumentError(
            f"{file}:{line}: byte {data[error.start]:#04x} is not UTF-8. Convert the file, for instance with iconv."
        )
        on_bad(bad)
    yield text, replace(place, offset=1)


def _read(where: str, read: Callable[[], bytes]) -> bytes:
    try:
        data = read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{where}: the gzip data is damaged or cut off ({error}).") from None
    if len(data) > LONGEST_DOCUMENT_BYTES:
        raise InputError(f"{where}: a document of more than {LONGEST_DOCUMENT_BYTES} bytes. Cut it into several.")
    return data


def _seek(stream: Any, offset: int) -> bytes:
    stream.seek(offset)
    return b""


def _jsonl(file: Path, text_key: str, place: Place, on_bad: OnBad) -> Iterator[tuple[str, Place]]:
    with _open(file) as stream:
        _read(f"{file}:{place.line}", lambda: _seek(stream, place.offset))
        while True:
            line = _read(f"{file}:{place.line + 1}", lambda: stream.readline(LONGEST_DOCUMENT_BYTES + 1))
            if not line:
                return
            place = replace(place, offset=place.offset + len(line), line=place.line + 1)
            if line.strip():
                try:
                    text = _json_text(line, text_key, f"{file}:{place.line}")
                except DocumentError as error:
                    on_bad(error)
                    text = ""
                yield text, place


def _json_text(line: bytes, text_key: str, where: str) -> str:
    try:
        record = json.loads(line.rstrip())
    except UnicodeDecodeError:
        raise DocumentError(f"{where}: not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where}: not JSON ({error.msg} at column {error.colno}).") from None
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where}: JSON with a number too long or nested too deeply ({error}).") from None
    if not isinstance(record, dict):
        raise DocumentError(f"{where}: a JSON object with the key {text_key!r} is needed.")
    if text_key not in record:
        keys = ", ".join(map(repr, record))[:300] or "none"
        raise DocumentError(f"{where}: no key {text_key!r} (there: {keys}). Name the text's key with --text-key.")
    return _checked(record[text_key], text_key, where)


def _checked(text: Any, text_key: str, where: str) -> str:
    if not isinstance(text, str):
        raise DocumentError(f"{where}: {text_key!r} holds {type(text).__name__}, not text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"{where}: {text_key!r} has half a surrogate pair at character {error.start}.") from None
    return text


def _parquet(file: Path, text_key: str, place: Place, on_bad: OnBad) -> Iterator[tuple[str, Place]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with open_regular(file) as stream, pyarrow.parquet.ParquetFile(stream) as table:
            if text_key not in table.schema_arrow.names:
                raise InputError(
                    f"{file}: no column {text_key!r} (there: {', '.join(table.schema_arrow.names)}). Name "
                    "the text's column with --text-key."
                )
            first_row = 0
            for group in range(table.num_row_groups):
                group_rows = table.metadata.row_group(group).num_rows
                if first_row + group_rows > place.offset:
                    row = first_row
                    for batch in table.iter_batches(row_groups=[group], columns=[text_key], batch_size=1024):
                        for value in batch.column(0):
                            row += 1
                            if row > place.offset:
                                try:
                                    text = _checked(_python(value), text_key, f"{file}: row {row}")
                                except DocumentError as error:
                                    on_bad(error)
                                    text = ""
                                yield text, replace(place, offset=row)
                first_row += group_rows
    except (pyarrow.ArrowException, OSError, OverflowError) as error:
        raise InputError(f"{file}: not readable as parquet ({_first_line(error)}).") from None


def _python(value: Any) -> Any:
    try:
        return value.as_py()
    except (ValueError, OverflowError) as error:  # a string that is not UTF-8, a date that Python does not have
        return error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
