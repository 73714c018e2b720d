"""Reads a TOML file, and makes errors that name the file and line of a key."""

import math
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import tomli

from everstep.run.files import open_regular

from .errors import ConfigError
from .positions import Path, line_of

LARGEST_BYTES = 1 << 20
DEEPEST = 50


@dataclass(kw_only=True)
class Source:
    """One TOML document."""

    file: str
    """Name of the file, with which error messages begin."""

    table: dict[str, Any]
    """The document's values. Keys are today's after `legacy.translate` has run."""

    text: str = ""
    """The document's text."""

    elsewhere: dict[str, str] = field(default_factory=dict)
    """Key that only one section has -> that section, to name it if the key is in a wrong section."""

    written_as: dict[Path, Path] = field(default_factory=dict)
    """Path of a key that `legacy.translate` moved -> its path in the file."""

    def as_written(self, path: Path) -> Path:
        """Return the path in the file of a path in today's keys."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.written_as:
                return self.written_as[path[:end]] + path[end:]
        return path

    def name(self, path: Path) -> str:
        """Return the key as users write it, with the key in the file if that is another one."""
        written = self.as_written(path)
        return describe(path) if written == path else f"{describe(path)} ({describe(written)} in the file)"

    def error(self, path: Path, message: str) -> ConfigError:
        """Return a ConfigError that begins with file and line of `path`, or with the file alone if no line is known."""
        message = "".join(c if c.isprintable() else "?" for c in message)  # a key may contain terminal control codes
        line = line_of(self.text, self.as_written(path))
        return ConfigError(f"{self.file}:{line}: {message}" if line else f"{self.file}: {message}")


def read_source(path: FilePath) -> Source:
    """Read and parse a TOML file.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not TOML.
    """
    try:
        with open_regular(path, limit=LARGEST_BYTES) as file:
            text = file.read().decode("utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: byte {error.start} is not UTF-8") from None
    return parse_source(text, str(path))


def parse_source(text: str, file: str) -> Source:
    """Parse a TOML document, which error messages call `file`.

    Raises:
        ConfigError: it is not TOML, or has a value that cannot be used.
    """
    try:
        table = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid TOML: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file}: cannot be read as TOML: {error}"[:300]) from None
    source = Source(file=file, table=table, text=text)
    if wrong := _unusable(table):
        path, why = wrong
        raise source.error(path, f"{describe(path)} {why}")
    return source


def _unusable(value: Any, path: Path = ()) -> tuple[Path, str] | None:
    """Return the path of the first value that cannot be used, and why: an infinity, a NaN, an integer of more than 64
    bits, or nesting deeper than DEEPEST. None if there is none."""
    if len(path) > DEEPEST:
        return path[:1], f"is nested more than {DEEPEST} deep"
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next((found for key, item in items if (found := _unusable(item, (*path, key)))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return path, f"= {value} must be a finite number"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return path, f"= {hex(value)[:40]} (hexadecimal) must be a number of at most 64 bits"
    return None


def describe(path: Path) -> str:
    """Return a key's path as users write it: `[training] seq_len` for `("training", "seq_len")`."""
    *tables, key = path
    name = ""
    for part in tables:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    if isinstance(key, int):
        return f"[{name}[{key}]]"
    return f"[{name}] {key}" if name else str(key)


def describe_table(path: Path) -> str:
    """Return a table's path as users write it: `[validator.dataloader]` for `("validator", "dataloader")`."""
    return describe((*path, "")).rstrip() or "the top level"
