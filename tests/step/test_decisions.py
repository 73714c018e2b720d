"""Decisions of a group: every rank learns what each said, and ranks at different decisions do not pair."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from everstep.quorum.errors import GroupBroken
from everstep.step.decisions import Decisions


class Ranks:
    """Three ranks, of which this is one; the others say what `says` makes of their number and what this one says."""

    rank, size = 0, 3

    def __init__(self, says=lambda rank, words: words):
        self.says = says

    def gather(self, words):
        return [list(words), *([*words[:2], *self.says(rank, list(words[2:]))] for rank in (1, 2))]

    def broadcast(self, payload):
        return payload


@pytest.mark.parametrize(
    "texts", [(b"a", b"longer than two words of seven", b""), (b"x" * 14, b"y" * 7, b"z" * 8), (b"", b"", b"")]
)
def test_texts_of_any_length_come_as_they_were_given(texts):
    """Three ranks in threads, each with its own text."""
    meeting, said = threading.Barrier(3), [None] * 3

    class Rank(Ranks):
        def __init__(self, rank):
            self.rank = rank

        def gather(self, words):
            said[self.rank] = list(words)
            meeting.wait(10)
            every = list(said)
            meeting.wait(10)
            assert len({len(words) for words in every}) == 1, "equally many on each"
            return every

    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda rank: Decisions(Rank(rank)).gather_bytes("text", texts[rank]), range(3))
        assert list(found) == [list(texts)] * 3


def test_a_rank_at_another_decision_ends_the_group():
    class Behind(Ranks):
        def gather(self, words):
            return [list(words), list(words), [words[0] - 1, *words[1:]]]

    decisions = Decisions(Behind())
    with pytest.raises(GroupBroken, match="rank 2 of this group is not at decision 1, 'point'"):
        decisions.gather("point", [])
