"""What tyro refuses is told in one sentence; a release of tyro that changes its errors fails here."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from everstep.config.grammar import FlagError, parse


@dataclass
class Inner:
    mode: Literal["a", "b"] = "a"
    on: bool = False
    size: int | None = None


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    rate: float = 0.0


@dataclass
class Needs:
    name: str


@pytest.mark.parametrize(
    ("kind", "args", "sentence"),
    [
        (Outer, ["--inner.size", "x"], "--inner.size must be an integer, got x"),
        (Outer, ["--inner.size=x"], "--inner.size must be an integer, got x"),
        (Outer, ["--rate", "fast"], "--rate must be a number, got fast"),
        (Outer, ["--rate"], "--rate needs a value: a number"),
        (Outer, ["--inner.mode", "c"], "--inner.mode must be one of a, b, got c"),
        (Needs, [], "--name is missing; see --help"),
    ],
)
def test_a_refusal_is_one_sentence(kind, args, sentence, capsys):
    with pytest.raises(FlagError) as caught:
        parse(kind, args)
    assert str(caught.value) == sentence
    assert capsys.readouterr() == ("", "")


def test_what_is_unknown_is_returned_or_refused_with_the_nearest():
    assert parse(Outer, ["--inner.on", "--other", "5"]) == (Outer(Inner(on=True)), ["--other", "5"])
    with pytest.raises(FlagError, match=r"there is no flag --inner\.sise, the nearest is --inner\.size"):
        parse(Outer, ["--inner.sise", "3"], known=["inner.size", "inner.mode", "rate"])
    with pytest.raises(FlagError, match=r"--job\.module is no flag: it is set in the file alone"):
        parse(Outer, ["--job.module", "mine"], known=["job.module", "rate"])
