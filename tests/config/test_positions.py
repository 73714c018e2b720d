"""Every key of a TOML document is found on the line where what it is first written in begins, however it is written."""

import json

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.positions import key_lines, line_of

DOCUMENT = '''\
# [fake]
top = 1

[training]   # x = 1
seq_len = 128
"quoted.key" = "a # b"
'literal' = \'\'\'
[not_a_table]
not_a_key = 1
\'\'\'
text = """\\
  closing quotes \\"""
  key = 2""""
after = [ 1, 2,  # ]
  3 ]

[a.b]
c.d.e = { f = 1, g = { h = [ { i = 1 } ] } }
c.d.j = 1979-05-27 07:32:00

[[optimizer.param_groups]]
pattern = "x"
[optimizer.param_groups.optimizer_kwargs]
lr = 1.0
[[optimizer.param_groups]]
pattern = "y"
  [optimizer.param_groups.optimizer_kwargs]
  lr = 2.0
'''


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("top",), 2),
        (("training",), 4),
        (("training", "seq_len"), 5),
        (("training", "quoted.key"), 6),
        (("training", "literal"), 7),
        (("training", "text"), 11),
        (("training", "after"), 14),
        (("training", "after", 2), 14),
        (("a",), 17),
        (("a", "b", "c", "d", "e", "g", "h", 0, "i"), 18),
        (("a", "b", "c", "d", "j"), 19),
        (("optimizer", "param_groups"), 21),
        (("optimizer", "param_groups", 0, "pattern"), 22),
        (("optimizer", "param_groups", 0, "optimizer_kwargs", "lr"), 24),
        (("optimizer", "param_groups", 1), 25),
        (("optimizer", "param_groups", 1, "optimizer_kwargs", "lr"), 28),
    ],
)
def test_a_key_is_found_on_its_line(path, line):
    tomli.loads(DOCUMENT)
    assert key_lines(DOCUMENT)[path] == line


def test_a_statement_without_end_costs_no_time():
    lines = key_lines("a = 1\nb = [\n" + "1,\n" * 100_000 + "]\nc = 1\n")
    assert lines == {("a",): 1}


def test_windows_line_ends_count_once():
    assert key_lines("a = 1\r\n\r\n[b]\r\nc = 1\r\n")[("b", "c")] == 4


def test_a_key_that_is_not_there_is_placed_at_its_table():
    lines = key_lines("[a]\nb = 1\n")
    assert line_of(lines, ("a", "missing", "deeper")) == 1
    assert line_of(lines, ("missing",)) is None


def paths(value, path=()):
    """All paths below a parsed value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


class Writer:
    """Writes a document in a style drawn at random, and notes where it put each key."""

    def __init__(self, choose):
        self.lines: list[str] = [""]
        self.where: dict[tuple, int] = {}
        self.begin = 0
        """The line of the statement that is being written."""
        self.choose = choose

    def put(self, text):
        first, *more = text.split("\n")
        self.lines[-1] += first
        self.lines += more

    def note(self, path):
        self.where.setdefault(path, self.begin)

    def key(self, key):
        bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
        if bare and self.choose(2):
            return key
        literal = "'" not in key and key.isprintable() and self.choose(2)
        return f"'{key}'" if literal else json.dumps(key, ensure_ascii=False).replace("\x7f", "\\u007f")

    def string(self, value):
        quoted = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if self.choose(2):
            return f'"""\n{quoted[1:-1]}"""'
        return quoted

    def value(self, value, path, inline=False):
        if isinstance(value, dict):
            self.put("{ ")
            for i, (key, item) in enumerate(value.items()):
                self.put(", " if i else "")
                self.note((*path, key))
                self.put(f"{self.key(key)} = ")
                self.value(item, (*path, key), inline=True)
            self.put(" }")
        elif isinstance(value, list):
            self.put("[")
            for i, item in enumerate(value):
                self.put("," if i else "")
                self.put("\n # ] } [x] y = 1\n  " if self.choose(2) else " ")
                self.note((*path, i))
                self.value(item, (*path, i), inline=inline)
            self.put(" ]")
        elif isinstance(value, str):
            self.put(self.string(value))
        else:
            self.put(str(value).lower())

    def pair(self, path, start, value):
        """One line `a.b = value` for the last keys of `path`, from `start` on."""
        self.begin = len(self.lines)
        for end in range(start + 1, len(path) + 1):
            self.note(path[:end])
        self.put(" . ".join(self.key(key) for key in path[start:]) + " = ")
        self.value(value, path)
        self.put("  # a = 1\n" if self.choose(2) else "\n")

    def dotted(self, path, start, table):
        for key, value in table.items():
            if isinstance(value, dict) and value and self.choose(2):
                self.dotted((*path, key), start, value)
            else:
                self.pair((*path, key), start, value)

    def table(self, path, table, header):
        tables, arrays = {}, {}
        for key, value in table.items():
            is_array = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
            if isinstance(value, dict) and self.choose(2):
                tables[key] = value
            elif is_array and self.choose(2):
                arrays[key] = value
            elif isinstance(value, dict) and value and self.choose(2):
                self.dotted((*path, key), len(path), value)
            else:
                self.pair((*path, key), len(path), value)
        for key, value in tables.items():
            name = f"{header}.{self.key(key)}" if header else self.key(key)
            self.put(f"\n # comment\n[ {name} ]\n" if self.choose(2) else f"[{name}]\n")
            self.where.setdefault((*path, key), len(self.lines) - 1)
            self.table((*path, key), value, name)
        for key, value in arrays.items():
            name = f"{header}.{self.key(key)}" if header else self.key(key)
            for i, item in enumerate(value):
                self.put(f"[[{name}]]\n")
                self.where.setdefault((*path, key), len(self.lines) - 1)
                self.where.setdefault((*path, key, i), len(self.lines) - 1)
                self.table((*path, key, i), item, name)


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
    ["a", "b", "training", "1", "a.b", "#", '"', "'", "[", "="]
)
SCALARS = (
    st.booleans()
    | st.integers(-9, 99)
    | st.text(st.sampled_from("ab\"'\\\n#[]{}=,. \t"), max_size=8)
    | st.sampled_from(['"""', "'''", "# no", "x = 1\n[y]"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(st.dictionaries(KEYS, inner, max_size=2), min_size=1, max_size=2)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(document=st.dictionaries(KEYS, VALUES, max_size=4), random=st.randoms(use_true_random=False))
def test_every_key_of_any_document_is_found_where_it_was_written(document, random):
    writer = Writer(random.randrange)
    writer.table((), document, "")
    text = "\n".join(writer.lines)
    assert tomli.loads(text) == document, text
    found = key_lines(text)
    assert found.keys() == set(paths(document))
    assert found == writer.where
