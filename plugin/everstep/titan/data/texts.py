"""The documents that rows are cut from: a memory-mapped token file of `everstep pack`, or text that every machine has,
the sources of Python's standard library read byte by byte."""

import hashlib
import os
import sys
import sysconfig
from pathlib import Path

import numpy as np

from everstep.data.byte_ids import EOS_ID, document_ids
from everstep.data.documents import Documents
from everstep.data.token_format import DataError, map_tokens, read_footer
from everstep.titan.names import BaseTokenizer

_TEST_FOLDERS = {"test", "tests", "idle_test"}  # large, repetitive, and missing in some distributions of Python


def token_file(path: Path, tokenizer: BaseTokenizer) -> Documents:
    """Open a token file. Only the footer is read: `everstep pack --verify` compares the checksums of the tokens, and a
    row that contradicts the footer is refused when it is read. Raises DataError if the footer is damaged, or if the
    file has token ids that the tokenizer does not have."""
    footer, digest = read_footer(path)
    vocab_size = tokenizer.get_vocab_size()
    if footer.max_id >= vocab_size:
        raise DataError(
            f"{path} has token ids up to {footer.max_id}, but the tokenizer has {vocab_size} ids: the file was packed "
            "with another tokenizer. Set hf_assets_path to that tokenizer, or pack the text again."
        )
    tokens, starts = map_tokens(path, footer)
    return Documents(tokens, starts, footer.max_id, name=str(path), content=f"token file {digest[:16]}")


def stdlib_text() -> Documents:
    """Return the standard library's sources as documents of byte tokens, one for each file. The text depends on
    Python's version, so all hosts of a run need the same version; `content` differs if the text does."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pieces = [document_ids(path.read_bytes()) for path in stdlib_sources(root)]
    if not pieces:
        raise FileNotFoundError(
            f"no .py files of the standard library are under {root}: this Python has its library in another form. "
            'Set data.source = "tokens" and pack text with `everstep pack`.'
        )
    tokens = np.concatenate(pieces)
    starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    digest = hashlib.blake2b(tokens.data, digest_size=8).hexdigest()
    return Documents(
        tokens,
        starts,
        EOS_ID,
        name=f"the standard library's text ({root})",
        content=f"Python {sys.version_info.major}.{sys.version_info.minor} standard library {digest}",
    )


def stdlib_sources(root: Path) -> list[Path]:
    """Return the standard library's .py files under `root`, in the same order on every machine. Installed packages,
    tests and files that differ from build to build are left out."""
    sources = [path for path in root.glob("*.py") if path.stem in sys.stdlib_module_names]
    for package in root.iterdir():
        if package.name in sys.stdlib_module_names and package.is_dir():
            for folder, subfolders, names in os.walk(package):
                subfolders[:] = [name for name in subfolders if name not in _TEST_FOLDERS]
                sources += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(sources, key=lambda path: path.relative_to(root).parts)
