"""Finds the line of a key in a TOML document.

tomli returns values without positions. But if a statement ends on line n, lines 1 to n are a TOML document too. A key
belongs to the statement with whose end it first appears in such a document. Bisection finds that statement.
"""

from bisect import bisect_left
from typing import Any

import tomli

Path = tuple[str | int, ...]
"""Keys from the root down. An int is an index into an array of tables or an array value."""

LONGEST_STATEMENT = 200
"""Most lines of a statement. Above it no line is searched, as it would take too long."""


def line_of(text: str, path: Path) -> int | None:
    """Return the line, from 1, of the header or `key = value` that first contains `path`, or the longest prefix of
    `path` in the document. None if even the first key is missing, or if a statement is too long. `text` is a valid
    document."""
    lines, whole = text.replace("\r\n", "\n").split("\n"), tomli.loads(text)
    there = next((path[:end] for end in range(len(path), 0, -1) if _has(whole, path[:end])), None)
    if there is None:
        return None

    def appears(line: int) -> bool:
        """Return whether the document contains it up to the end of the statement on this line."""
        for end in range(line, min(line + LONGEST_STATEMENT, len(lines)) + 1):
            try:
                return _has(tomli.loads("\n".join(lines[:end])), there)
            except tomli.TOMLDecodeError:  # the statement continues on the next line
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
