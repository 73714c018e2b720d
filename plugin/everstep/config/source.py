"""A TOML file read: its values, and a way to say where in it something is wrong."""

import os
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import tomli

from .errors import ConfigError, nearest
from .positions import Path, key_lines, line_of


@dataclass(kw_only=True)
class Source:
    """One TOML document."""

    file: str
    """Its name, as error messages begin."""

    table: dict[str, Any]
    """Its values, under today's keys once `legacy.translate` has run."""

    lines: dict[Path, int]
    """Lines by the keys as written."""

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
        line = line_of(self.lines, self.as_written(path))
        return ConfigError(f"{self.file}:{line}: {message}" if line else f"{self.file}: {message}")


def read_source(path: FilePath) -> Source:
    """Read and parse a TOML file.

    Raises:
        ConfigError: there is no such file, it cannot be read, or it is not TOML.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        near = _nearest_file(path)
        hint = f"; the nearest is {near}" if near else ""
        raise ConfigError(f"{path}: there is no such file{hint}") from None
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
    return Source(file=file, table=table, lines=key_lines(text))


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


def _nearest_file(path: FilePath) -> FilePath | None:
    """The TOML file most like `path`, in its directory or in a `configs/` there or here."""
    found: dict[str, FilePath] = {}
    for directory in (path.parent, path.parent / "configs", FilePath("configs")):
        if directory.is_dir() and os.access(directory, os.R_OK):
            found.update({str(near): near for near in directory.glob("*.toml")})
    by_name = {near.name: near for near in found.values()}
    name = nearest(path.name, by_name)
    return by_name[name] if name else None
