"""`everstep pack`: text to a token file, continued where it was interrupted.

While it works, three files stand beside OUT: `OUT.partial` (the token file so far), `OUT.partial.starts`
(document starts) and `OUT.partial.journal` (JSON lines: what is packed, then one line for each finished chunk
of whole documents). A chunk's line is written after its tokens are on disk. A run that finds a journal cuts
the other two files back to what the last whole line says and goes on at the next document. Where chunks end
depends on the documents alone, so the finished file is byte for byte that of a run without interruption. OUT
itself appears in one rename, after its checksums were compared."""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

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
from everstep.data.encoders import ByteEncoder, Encoder
from everstep.data.inputs import (
    DocumentError,
    InputError,
    OnBad,
    Place,
    identity,
    input_files,
    read_documents,
    refuse,
    share_read,
)
from everstep.data.token_format import HEAD, Footer, TokenFileError
from everstep.run import typed
from everstep.run.typed import Count, UnfitError

_CHUNK_TOKENS = 8 << 20
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1 << 12


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

    skip_bad: bool = False
    """Go on without documents that cannot be read, naming each. Also for a run that has stopped at one."""

    verify: bool = False
    """Make nothing; compare all of --out with its checksums."""


@dataclass
class _Packed:
    """How far a file has come."""

    tokens: int = 0
    documents: int = 0
    left_out: int = 0
    max_id: int = 0
    place: Place = field(default_factory=Place)
    chunks: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class _Entry:
    """A line of the journal: how far the file had come, and the SHA-256 of the chunk that was written last, if any."""

    tokens: Count
    documents: Count
    left_out: Count
    max_id: Count
    place: Place
    sha256: str | None


def run(args: Pack, encoder_for: Callable[[str], Encoder]) -> int:
    """Does what the command line asks, with the encoder that `encoder_for` makes of --tokenizer, tells about it on
    stderr, and returns the exit status: 0, 2 for something that the user can put right, 1 for what the system refused,
    130 after Ctrl-C."""
    console = Console(stderr=True)

    def say(message: object) -> None:
        console.print(str(message), markup=False, highlight=False, soft_wrap=True)

    try:
        with _progress(console) as on_progress:
            if args.verify:
                if args.inputs:
                    raise InputError("--verify checks --out and takes no input files.")
                size = args.out.stat().st_size if args.out.exists() else 0
                footer = token_format.verify(args.out, _counter(on_progress, "checking", size))
                result = "is whole"
            else:
                result = "was already made from this input" if args.out.exists() else "is made and checked"
                footer = pack(
                    args.inputs,
                    args.out,
                    encoder_of=lambda: encoder_for(args.tokenizer),
                    text_key=args.text_key,
                    on_bad=say if args.skip_bad else refuse,
                    on_progress=on_progress,
                )
    except KeyboardInterrupt:
        say("Stopped. The same command goes on where it was.")
        return 130
    except DocumentError as error:
        say(f"everstep pack: {error} Or add --skip-bad, which goes on here without such documents.")
        return 2
    except ValueError as error:
        say(f"everstep pack: {error}")
        return 2
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        say(f"everstep pack: {what}. What is packed stays; the same command goes on with it.")
        return 1
    left_out = f", {footer.left_out:,} left out as empty or bad" if footer.left_out else ""
    say(
        f"{args.out} {result}: {footer.documents:,} documents{left_out}, {footer.tokens:,} tokens "
        f"({footer.dtype}), ids up to {footer.max_id}."
    )
    return 0


def pack(
    inputs: Sequence[Path],
    out: Path,
    *,
    encoder_of: Callable[[], Encoder] = ByteEncoder,
    text_key: str = "text",
    on_bad: OnBad = refuse,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> Footer:
    """Makes `out` from `inputs`, or returns the footer of `out` if it was made from them before.

    Args:
        encoder_of: makes what gives the ids; called when the inputs are known to be there.
        on_bad: called with each document that cannot be read; if it returns, the document is left out.
        on_progress: called with what is being done, bytes done, bytes in all.
        chunk_tokens: a chunk ends with the first document that brings it to as many tokens.
    Raises:
        InputError, TokenFileError, ValueError: in one sentence that names the file, its line, or the option.
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
        documents = read_documents(files, text_key, partial.packed.place, on_bad)
        _fill(partial, files, documents, encoder, chunk_tokens, on_progress)
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
    documents: Iterator[tuple[str, Place]],
    encoder: Encoder,
    chunk_tokens: int,
    on_progress: Callable[[str, int, int], None],
) -> None:
    sizes = [item["bytes"] for item in partial.source["inputs"]]
    chunk: list[np.ndarray] = []
    chunk_length = left_out = 0
    place = partial.packed.place
    for texts, places in _batches(documents):
        for text, ids, place in zip(texts, encoder.encode(texts), places, strict=True):
            # A document of one token has no next token to learn.
            if not text or len(ids) < 2:
                left_out += 1
                continue
            chunk.append(ids)
            chunk_length += len(ids)
            if chunk_length >= chunk_tokens:
                partial.append(chunk, place, left_out)
                chunk, chunk_length, left_out = [], 0, 0
                read = share_read(files[place.file], place, sizes[place.file])
                on_progress("packing", sum(sizes[: place.file]) + read, sum(sizes))
    if chunk or left_out:
        partial.append(chunk, place, left_out)


def _batches(documents: Iterator[tuple[str, Place]]) -> Iterator[tuple[list[str], list[Place]]]:
    """Documents in batches large enough to be encoded on all cores."""
    texts: list[str] = []
    places: list[Place] = []
    characters = 0
    for text, place in documents:
        texts.append(text)
        places.append(place)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
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
        self._line_digest = b""

    def __enter__(self) -> "_Partial":
        with ExitStack() as files:
            self._journal = files.enter_context(open(self._journal_path, "a+b", opener=_own))
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TokenFileError(
                    f"another `everstep pack` is writing {self.path}: wait for it or stop it."
                ) from None
            self._read_journal()
            self._tokens = files.enter_context(open(self.path, "r+b", opener=_own))
            self._starts = files.enter_context(open(self._starts_path, "r+b", opener=_own))
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
        begun_from, *lines = self._journal.read().split(b"\n")[:-1] or [b""]
        try:
            begun = typed.loads(self._checked(begun_from)) if begun_from else None
            entries = [typed.parse(_Entry, typed.loads(self._checked(line))) for line in lines]
        except UnfitError as error:
            raise TokenFileError(
                f"{self._journal_path} is damaged ({error}): delete {self.path}* to begin anew."
            ) from None
        if begun != self.source:
            if lines:
                raise TokenFileError(
                    f"{self.path} was begun from other input or with another tokenizer: choose another "
                    f"--out, or delete {self.path}* to begin anew."
                )
            self._journal.truncate(0)
            self._line_digest = b""
            self._write_line(self.source)
            return
        chunks = self.packed.chunks
        for entry in entries:
            if entry.sha256 is not None:
                chunks.append((entry.tokens, entry.sha256))
            self.packed = _Packed(entry.tokens, entry.documents, entry.left_out, entry.max_id, entry.place, chunks)
        self._journal.truncate(len(begun_from) + 1 + sum(len(line) + 1 for line in lines))

    def _checked(self, line: bytes) -> bytes:
        """A line of the journal without its check, which covers it and all before it. Raises UnfitError."""
        text, _, check = line.rpartition(b" ")
        self._line_digest = hashlib.sha256(self._line_digest + text).digest()
        if check != self._line_digest.hex()[:16].encode():
            raise UnfitError("a line does not match its checksum")
        return text

    def _write_line(self, entry: dict[str, Any]) -> None:
        text = typed.dumps(entry)
        self._line_digest = hashlib.sha256(self._line_digest + text).digest()
        self._journal.write(text + b" " + self._line_digest.hex()[:16].encode() + b"\n")
        _sync(self._journal)

    def append(self, documents: Sequence[np.ndarray], place: Place, left_out: int) -> None:
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
        packed.left_out += left_out
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
            dtype=cast(Literal["uint16", "uint32"], self._dtype.name),
            tokens=packed.tokens,
            documents=packed.documents,
            left_out=packed.left_out,
            vocab_size=vocab_size,
            max_id=packed.max_id,
            source=self.source,
            chunks=packed.chunks,
            starts_sha256=digest.hexdigest(),
        )
        token_format.write_footer(self._tokens, footer)
        _sync(self._tokens)
        return footer


def _own(path: str, flags: int) -> int:
    """Opens or makes a file beside OUT. Raises TokenFileError if its name is a link's or anything else's."""
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise TokenFileError(f"{path} is no regular file: delete it, or choose another --out.") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise TokenFileError(f"{path} is no regular file: delete it, or choose another --out.")
    return fd


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
    return (
        out.with_name(out.name + ".partial"),
        out.with_name(out.name + ".partial.starts"),
        out.with_name(out.name + ".partial.journal"),
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
