"""Every key of a TOML document is found on the line where what it is first written in begins, however it is written."""

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.config.positions import key_lines, line_of
from everstep.config.resolved import _toml_key, _toml_lines

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
@given(document=st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_key_of_any_document_is_found_on_a_line_that_begins_with_it(document):
    """Other ways to write the same are in DOCUMENT."""
    text = "\n".join(_toml_lines(document, ()))
    assert tomli.loads(text) == document, text
    found, lines = key_lines(text), text.split("\n")
    assert found.keys() == set(paths(document))
    for path, line in found.items():
        written = [key for key in path if isinstance(key, str)]
        assert any(_toml_key(key) in lines[line - 1] for key in written), (path, line, text)
