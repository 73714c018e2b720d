"""A TOML file read: its values, and a way to say where in it something is wrong."""

import math
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import tomli

from everstep.run.regular import open_regular

from .errors import ConfigError
from .positions import Path, line_of

LARGEST_BYTES = 16 << 20
DEEPEST = 50


@dataclass(kw_only=True)
class Source:
    """One TOML document."""

    file: str
    """Its name, as error messages begin."""

    table: dict[str, Any]
    """Its values, under today's keys once `legacy.translate` has run."""

    text: str = ""
    """As it stands in the file."""

    elsewhere: dict[str, str] = field(default_factory=dict)
    """For keys of one section alone: that section. A key in the wrong section is sent there."""

    written_as: dict[Path, Path] = field(default_factory=dict)
    """For each key that was moved: the key as written."""

    def as_written(self, path: Path) -> Path:
        """The path as the file has it, for a path in today's keys."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.written_as:
                return self.written_as[path[:end]] + path[end:]
        return path

    def name(self, path: Path) -> str:
        """The key as users know it, and as the file has it where that differs."""
        written = self.as_written(path)
        return describe(path) if written == path else f"{describe(path)} ({describe(written)} in the file)"

    def error(self, path: Path, message: str) -> ConfigError:
        """A ConfigError that begins with file and line of `path`; with the file alone if the file lacks
        it."""
        message = "".join(c if c.isprintable() else "?" for c in message)  # a key may have what a terminal obeys
        line = line_of(self.text, self.as_written(path))
        return ConfigError(f"{self.file}:{line}: {message}" if line else f"{self.file}: {message}")


def read_source(path: FilePath) -> Source:
    """Read and parse a TOML file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not TOML.
    """
    try:
        with open_regular(path, limit=LARGEST_BYTES) as file:
            text = file.read().decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: byte {error.start} is not UTF-8") from None
    return parse_source(text, str(path))


def parse_source(text: str, file: str) -> Source:
    """Parse a TOML document that calls itself `file`.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        table = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid TOML: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise ConfigError(f"{file}: not a TOML file that can be read: {error}"[:300]) from None
    source = Source(file=file, table=table, text=text)
    if wrong := _unusable(table):
        path, why = wrong
        raise source.error(path, f"{describe(path)} {why}")
    return source


def _unusable(value: Any, path: Path = ()) -> tuple[Path, str] | None:
    """The first value that cannot be used, and why: a number that is infinite, not a number, or of more than 64 bits,
    or what is nested too deep."""
    if len(path) > DEEPEST:
        return path[:1], f"is nested more than {DEEPEST} deep"
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next((found for key, item in items if (found := _unusable(item, (*path, key)))), None)
    if isinstance(value, float) and not math.isfinite(value):
        return path, f"= {value} is no number that can be used"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return path, f"= {hex(value)[:40]} (hexadecimal) is no number that can be used"
    return None


def describe(path: Path) -> str:
    """`("training", "seq_len")` as users write it: `[training] seq_len`."""
    *tables, key = path
    name = ""
    for part in tables:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    if isinstance(key, int):
        return f"[{name}[{key}]]"
    return f"[{name}] {key}" if name else str(key)


def describe_table(path: Path) -> str:
    """`("validator", "dataloader")` as users write it: `[validator.dataloader]`."""
    return describe((*path, "")).rstrip() or "the top level"
