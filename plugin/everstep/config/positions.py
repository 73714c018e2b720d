"""Where each key of a TOML document stands.

tomli tells values, not places. But every header and every `key = value` of a document that it has accepted is a
document of its own, so tomli itself says where one ends: at the first line with which it can be parsed.
"""

from collections.abc import Iterator
from typing import Any

import tomli

Path = tuple[str | int, ...]
"""Keys from the root down; an int is an index into an array (of tables, or a value's)."""

LONGEST_STATEMENT = 200
"""Lines. Behind a longer one nothing is told, as finding its end takes the square of its length."""


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, on which the header or `key = value` begins that each key and table of a valid TOML document is
    first written in.

    Args:
        text: the document. It must parse; otherwise the result means nothing.

    Returns:
        A line for every path that `tomli.loads(text)` has: tables (also those that a dotted key implies), keys, and the
        elements of arrays.
    """
    lines: dict[Path, int] = {}
    lengths: dict[Path, int] = {}
    """Of arrays of tables, so far."""
    table: Path = ()
    for line, statement, parsed in _statements(text):
        if not statement.lstrip().startswith("["):
            for path in _paths(parsed, table):
                lines.setdefault(path, line)
            continue
        table = ()
        while parsed:
            ((key, parsed),) = parsed.items()
            table = (*table, key)
            lines.setdefault(table, line)
            if isinstance(parsed, list):
                lengths[table] = lengths.get(table, 0) + 1
                parsed = {}
            if table in lengths:
                # a header below an array of tables means the element written last
                table = (*table, lengths[table] - 1)
                lines.setdefault(table, line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each header and `key = value` of a document: its first line, its text, and what it says."""
    begin, statement = 1, ""
    for line, part in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        statement = f"{statement}\n{part}" if statement else part
        if line - begin > LONGEST_STATEMENT:
            return
        try:
            parsed = tomli.loads(statement)
        except tomli.TOMLDecodeError:  # it goes on in the next line
            continue
        if parsed:
            yield begin, statement, parsed
        begin, statement = line + 1, ""


def _paths(value: Any, path: Path) -> Iterator[Path]:
    """All paths below a parsed value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of the longest known beginning of `path`; None if not even its first key is in the file."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None
