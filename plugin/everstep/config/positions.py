"""Where each key of a TOML document stands.

tomli tells values, not places, so that an error about a value could not name its line. This walks over a
document that tomli has accepted and needs no more of the grammar (TOML 1.0) than tells keys from values:
strings, comments, brackets. Values are skipped, except that inline tables hold keys too.
"""

import tomli

Path = tuple[str | int, ...]
"""Keys from the root down; an int is an index into an array (of tables, or a value's)."""

_BARE_END = frozenset(" \t\r\n.=]},#")


def key_lines(text: str) -> dict[Path, int]:
    """The line, from 1, on which each key and table of a valid TOML document is first written.

    Args:
        text: the document. It must parse; otherwise the result means nothing.

    Returns:
        A line for every path that `tomli.loads(text)` has: tables (also those that a dotted key implies),
        keys, and the elements of arrays that are tables themselves.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of the longest known beginning of `path`; None if not even its first key is in the file."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None


class _Scanner:
    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.lines: dict[Path, int] = {}
        self._line, self._counted = 1, 0
        self._array_lengths: dict[Path, int] = {}

    def document(self) -> None:
        table: Path = ()
        while self._skip_blank():
            if self._peek("["):
                table = self._header()
            else:
                self._key_value(table)

    def _header(self) -> Path:
        is_array = self._peek("[[")
        self.at += 2 if is_array else 1
        line = self._current_line()
        keys = self._dotted_key()
        self.at += 2 if is_array else 1
        table: Path = ()
        for i, key in enumerate(keys):
            table = (*table, key)
            self.lines.setdefault(table, line)
            last = i == len(keys) - 1
            if last and is_array:
                self._array_lengths[table] = self._array_lengths.get(table, 0) + 1
            if table in self._array_lengths:
                # a header below an array of tables means the element written last
                table = (*table, self._array_lengths[table] - 1)
                self.lines.setdefault(table, line)
        return table

    def _key_value(self, table: Path) -> None:
        line = self._current_line()
        for key in self._dotted_key():
            table = (*table, key)
            self.lines.setdefault(table, line)
        self.at += 1  # the equals sign, at which a dotted key ends
        self._skip_spaces()
        self._value(table)

    def _dotted_key(self) -> list[str]:
        keys = []
        while True:
            self._skip_spaces()
            keys.append(self._simple_key())
            self._skip_spaces()
            if not self._peek("."):
                return keys
            self.at += 1

    def _simple_key(self) -> str:
        start = self.at
        if self.text[start] in "\"'":
            self._string()
            # an escaped key is spelled by tomli, not by a second reading of the escapes
            return tomli.loads(f"key = {self.text[start : self.at]}")["key"]
        while self.text[self.at] not in _BARE_END:
            self.at += 1
        return self.text[start : self.at]

    def _value(self, path: Path) -> None:
        if self.text[self.at] in "\"'":
            self._string()
        elif self._peek("["):
            self.at += 1
            self._elements(path)
        elif self._peek("{"):
            self.at += 1
            self._inline_table(path)
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def _elements(self, path: Path) -> None:
        index = 0
        while True:
            self._skip_blank()
            if self._peek("]"):
                self.at += 1
                return
            if self._peek(","):
                self.at += 1
                index += 1
                continue
            element = (*path, index)
            self.lines.setdefault(element, self._current_line())
            self._value(element)

    def _inline_table(self, path: Path) -> None:
        while True:
            self._skip_blank()
            if self._peek("}"):
                self.at += 1
                return
            if self._peek(","):
                self.at += 1
                continue
            self._key_value(path)

    def _string(self) -> None:
        quote = self.text[self.at]
        if self._peek(quote * 3):
            self.at += 3
            while not self._peek(quote * 3):
                self.at += 2 if quote == '"' and self._peek("\\") else 1
            self.at += 3
            while self._peek(quote):  # up to two quotes may touch the closing three
                self.at += 1
        else:
            self.at += 1
            while not self._peek(quote):
                self.at += 2 if quote == '"' and self._peek("\\") else 1
            self.at += 1

    def _skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def _skip_blank(self) -> bool:
        """Moves to the next thing that is neither space, line end nor comment; False at the end of the
        text."""
        while self.at < len(self.text):
            if self.text[self.at] in " \t\n":
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def _peek(self, token: str) -> bool:
        return self.text.startswith(token, self.at)

    def _current_line(self) -> int:
        self._line += self.text.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line
