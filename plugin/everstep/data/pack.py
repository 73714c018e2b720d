"""`everstep pack`: text to a token file, continued where it was interrupted.

While it works, three files stand beside OUT: `OUT.partial` (the token file so far), `OUT.partial.starts`
(document starts) and `OUT.partial.journal` (JSON lines: what is packed, then one line for each finished chunk
of whole documents). A chunk's line is written after its tokens are on disk. A run that finds a journal cuts
the other two files back to what the last whole line says and goes on at the next document. Where chunks end
depends on the documents alone, so the finished file is byte for byte that of a run without interruption. OUT
itself appears in one rename, after its checksums were compared."""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from everstep.data import token_format
from everstep.data.encoders import Encoder, encoder_for
from everstep.data.inputs import InputError, Place, identity, input_files, read_documents, share_read
from everstep.data.token_format import HEAD, Footer, TokenFileError

_CHUNK_TOKENS = 8 << 20
_BATCH_CHARACTERS = 1 << 20


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


@dataclass
class _Packed:
    """How far a file has come: what a journal line says."""

    tokens: int = 0
    documents: int = 0
    dropped: int = 0
    max_id: int = 0
    place: Place = field(default_factory=Place)
    chunks: list[tuple[int, str]] = field(default_factory=list)


def run(args: Pack) -> int:
    """Does what the command line asks, tells about it on stderr, and returns the exit status."""
    console = Console(stderr=True)
    try:
        with _progress(console) as on_progress:
            if args.verify:
                if args.inputs:
                    raise InputError("--verify checks --out and takes no input files.")
                footer = token_format.verify(
                    args.out,
                    _counter(on_progress, "checking", _size(args.out)),
                )
                result = "is whole"
            else:
                before = args.out.exists()
                footer = pack(
                    args.inputs,
                    args.out,
                    tokenizer=args.tokenizer,
                    text_key=args.text_key,
                    on_progress=on_progress,
                )
                result = "was already made from this input" if before else "is made and checked"
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on where it was.")
        return 130
    except ValueError as error:
        console.print(f"everstep pack: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        console.print(
            f"everstep pack: {what}. What is packed stays; the same command goes on with it.",
            style="red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return 1
    console.print(
        f"{args.out} {result}: {footer.documents:,} documents, {footer.tokens:,} tokens ({footer.dtype}), "
        f"ids up to {footer.max_id}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def pack(
    inputs: Sequence[Path],
    out: Path,
    *,
    tokenizer: str = "bytes",
    text_key: str = "text",
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> Footer:
    """Makes `out` from `inputs`, or returns the footer of `out` if it was made from them before.

    Args:
        on_progress: called with what is being done, bytes done, bytes in all.
        chunk_tokens: a chunk ends with the first document that brings it to as many tokens.
    Raises:
        InputError, TokenFileError, ValueError: in one sentence that names the file, its line, or the option.
    """
    files = input_files(inputs)
    encoder = encoder_for(tokenizer)
    source = {
        "tokenizer": encoder.identity,
        "text_key": text_key,
        "chunk_tokens": chunk_tokens,
        "inputs": [identity(file) for file in files],
    }
    if out.exists():
        footer, _ = token_format.read_footer(out)
        if footer.source != source:
            raise TokenFileError(
                f"{out} is already made, from other input or with another tokenizer: choose another --out, "
                "or delete it first."
            )
        _remove_traces(out)
        return footer
    out.parent.mkdir(parents=True, exist_ok=True)
    with _Partial(out, source, token_format.dtype_for(encoder.vocab_size)) as partial:
        _fill(partial, files, text_key, encoder, chunk_tokens, on_progress)
        if not partial.packed.documents:
            _remove_traces(out)
            raise InputError(f"no document with text in {', '.join(map(str, inputs))}.")
        footer = partial.finish(encoder.vocab_size)
        size = partial.path.stat().st_size
        try:
            token_format.verify(partial.path, _counter(on_progress, "checking", size))
        except TokenFileError as error:
            raise TokenFileError(
                f"what was written does not read back as it was written ({error}) Check the disk, delete "
                f"{partial.path}* and begin anew."
            ) from error
        os.replace(partial.path, out)
        _sync_directory(out.parent)
        _remove_traces(out)
    return footer


def _fill(
    partial: "_Partial",
    files: Sequence[Path],
    text_key: str,
    encoder: Encoder,
    chunk_tokens: int,
    on_progress: Callable[[str, int, int], None],
) -> None:
    sizes = [item["bytes"] for item in partial.source["inputs"]]
    packed = partial.packed
    chunk: list[np.ndarray] = []
    chunk_length = dropped = 0
    place = packed.place
    for texts, places in _batches(read_documents(files, text_key, packed.place)):
        for ids, place in zip(encoder.encode(texts), places, strict=True):
            # A document of one token has no next token to learn; an empty one only its marks.
            if len(ids) < 2:
                dropped += 1
                continue
            chunk.append(ids)
            chunk_length += len(ids)
            if chunk_length >= chunk_tokens:
                partial.append(chunk, place, dropped)
                chunk, chunk_length, dropped = [], 0, 0
                read = share_read(files[place.file], place, sizes[place.file])
                on_progress("packing", sum(sizes[: place.file]) + read, sum(sizes))
    if chunk or dropped:
        partial.append(chunk, place, dropped)


def _batches(documents: Iterator[tuple[str, Place]]) -> Iterator[tuple[list[str], list[Place]]]:
    """Documents in batches large enough to be encoded on all cores. Documents without text are left out."""
    texts: list[str] = []
    places: list[Place] = []
    characters = 0
    for text, place in documents:
        if not text:
            continue
        texts.append(text)
        places.append(place)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield texts, places
            texts, places, characters = [], [], 0
    if texts:
        yield texts, places


class _Partial:
    """The unfinished files beside OUT. As a context it holds the journal's lock."""

    def __init__(self, out: Path, source: dict[str, Any], dtype: str):
        self.path, self._starts_path, self._journal_path = _traces(out)
        self.source, self._dtype = source, np.dtype(dtype).newbyteorder("<")
        self.packed = _Packed()

    def __enter__(self) -> "_Partial":
        with ExitStack() as files:
            self._journal = files.enter_context(open(self._journal_path, "a+b"))
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TokenFileError(
                    f"another `everstep pack` is writing {self.path}: wait for it or stop it."
                ) from None
            self._read_journal()
            for path in (self.path, self._starts_path):
                path.touch()
            self._tokens = files.enter_context(open(self.path, "r+b"))
            self._starts = files.enter_context(open(self._starts_path, "r+b"))
            _cut(self._starts, 8 * self.packed.documents)
            if self.packed.tokens:
                _cut(self._tokens, len(HEAD) + self.packed.tokens * self._dtype.itemsize)
            else:
                _cut(self._tokens, 0)
                self._tokens.write(HEAD)
            self._files = files.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()

    def _read_journal(self) -> None:
        """Takes up what the journal says and cuts off a line that was not finished."""
        self._journal.seek(0)
        whole = 0
        for number, line in enumerate(self._journal):
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            if number == 0:
                if entry != self.source:
                    raise TokenFileError(
                        f"{self.path} was begun from other input or with another tokenizer: choose another "
                        f"--out, or delete {self.path}* to begin anew."
                    )
            else:
                chunks = self.packed.chunks
                if sha256 := entry.pop("sha256"):
                    chunks.append((entry["tokens"], sha256))
                self.packed = _Packed(**{**entry, "place": Place(**entry["place"])}, chunks=chunks)
            whole += len(line)
        self._journal.truncate(whole)
        if not whole:
            self._write_line(self.source)

    def _write_line(self, entry: dict[str, Any]) -> None:
        self._journal.write(json.dumps(entry, sort_keys=True).encode() + b"\n")
        _sync(self._journal)

    def append(self, documents: Sequence[np.ndarray], place: Place, dropped: int) -> None:
        """Puts one chunk of documents on disk, then into the journal. `place` is where the next one
        begins."""
        packed = self.packed
        if documents:
            tokens = np.concatenate(documents)
            lengths = np.array([len(ids) for ids in documents])
            starts = packed.tokens + np.cumsum(lengths) - lengths
            data = tokens.astype(self._dtype).tobytes()
            self._tokens.write(data)
            self._starts.write(starts.astype("<u8").tobytes())
            _sync(self._tokens)
            _sync(self._starts)
            packed.tokens += len(tokens)
            packed.documents += len(documents)
            packed.max_id = max(packed.max_id, int(tokens.max()))
            packed.chunks.append((packed.tokens, hashlib.sha256(data).hexdigest()))
        packed.dropped += dropped
        packed.place = place
        entry = {name: value for name, value in asdict(packed).items() if name != "chunks"}
        self._write_line({**entry, "sha256": packed.chunks[-1][1] if documents else None})

    def finish(self, vocab_size: int) -> Footer:
        """Adds document starts and footer to the tokens. Done again from the start if it is interrupted."""
        packed = self.packed
        self._tokens.write(bytes(token_format.padding(packed.tokens * self._dtype.itemsize)))
        digest = hashlib.sha256()
        self._starts.write(np.array([packed.tokens], "<u8").tobytes())
        self._starts.seek(0)
        while block := self._starts.read(16 << 20):
            digest.update(block)
            self._tokens.write(block)
        footer = Footer(
            dtype=self._dtype.name,
            tokens=packed.tokens,
            documents=packed.documents,
            vocab_size=vocab_size,
            max_id=packed.max_id,
            source=self.source,
            chunks=packed.chunks,
            starts_sha256=digest.hexdigest(),
        )
        token_format.write_footer(self._tokens, footer)
        _sync(self._tokens)
        return footer


def _cut(file: BinaryIO, size: int) -> None:
    """Leaves `file` with its first `size` bytes, standing at its end."""
    if os.fstat(file.fileno()).st_size < size:
        raise TokenFileError(
            f"{file.name} is shorter than its journal says: it was changed. Delete it and the .partial files "
            "beside it to begin anew."
        )
    file.truncate(size)
    file.seek(size)


def _traces(out: Path) -> tuple[Path, Path, Path]:
    return tuple(
        out.with_name(out.name + suffix) for suffix in (".partial", ".partial.starts", ".partial.journal")
    )


def _remove_traces(out: Path) -> None:
    for path in _traces(out):
        path.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _counter(on_progress: Callable[[str, int, int], None], what: str, total: int) -> Callable[[int], None]:
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        on_progress(what, done, total)

    return count


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar where somebody looks at it."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)

        yield show


if __name__ == "__main__":
    sys.exit(run(tyro.cli(Pack)))
