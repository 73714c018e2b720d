"""Ranks of a group that are at different decisions do not pair."""

import pytest

from everstep.quorum.errors import GroupBroken
from everstep.step.decisions import Decisions


def test_a_rank_at_another_decision_ends_the_group():
    class Behind:
        rank, size = 0, 3

        def gather(self, mine):
            return [mine, mine, mine.replace(b"1", b"0")]

    decisions = Decisions(Behind())
    with pytest.raises(GroupBroken, match="rank 2 of this group is not at decision 1, 'point'"):
        decisions.gather("point", None)
