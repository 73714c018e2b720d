"""Every key of a TOML document is found on the line where what it is first written in begins, however it is written."""

import pytest
import tomli

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
