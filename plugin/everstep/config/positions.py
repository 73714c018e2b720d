"""Where a key of a TOML document stands.

tomli tells values, not places. But the first lines of a document are a document too, wherever a statement ends: a key
stands in the statement with which it first appears.
"""

from bisect import bisect_left
from typing import Any

import tomli

Path = tuple[str | int, ...]
"""Keys from the root down; an int is an index into an array (of tables, or a value's)."""

LONGEST_STATEMENT, LARGEST = 200, 1 << 20
"""Lines, and characters of a document: where there are more no line is told, as finding it would take long."""


def line_of(text: str, path: Path) -> int | None:
    """The line, from 1, on which the header or `key = value` begins that `path` first appears with, or else the longest
    beginning of it that is in the document; None if not even its first key is. `text` is a valid document."""
    lines, whole = text.replace("\r\n", "\n").split("\n"), tomli.loads(text)
    there = next((path[:end] for end in range(len(path), 0, -1) if _has(whole, path[:end])), None)
    if there is None or len(text) > LARGEST:
        return None

    def appears(line: int) -> bool:
        """Whether it is there once the statement ends that is written on this line."""
        for end in range(line, min(line + LONGEST_STATEMENT, len(lines)) + 1):
            try:
                return _has(tomli.loads("\n".join(lines[:end])), there)
            except tomli.TOMLDecodeError:  # it goes on in the next line
                continue
        raise LookupError("a statement is too long")

    try:
        return 1 + bisect_left(range(1, len(lines) + 1), True, key=appears)
    except LookupError:
        return None


def _has(value: Any, path: Path) -> bool:
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return False
    return True
