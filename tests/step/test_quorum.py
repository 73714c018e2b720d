"""Quorums computed from requests: which state counts, which groups have it, and which groups heal from which."""

import contextlib
import dataclasses
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from damage import damaged
from everstep.quorum.request import LENDERS, NOTHING, Request, State, decode, encode, read_quorum, together


def member(group, *state, **said):
    fields = {
        "group": group, "life": f"life-{group}", "number": 1, "state": State(*state) if state else NOTHING,
        "follows": NOTHING, "finishing": False, "connected": "", "store": f"host-{group}:1",
        "state_addresses": (f"host-{group}:2",), "watches": (f"host-{group}:3",),
    }  # fmt: skip
    return Request(**fields | said)


ABLE = member(0, 8, 12)


@pytest.mark.parametrize(("members", "step", "history", "able", "sources"), [
    ([member(2, 7, 11), ABLE, member(1)], 8, 12, (0,), {1: (0,), 2: (0,)}),
    # Of two histories, the more common one counts; in a tie, that of the lowest group id.
    ([ABLE, member(1, 8, 13), member(2, 8, 13)], 8, 13, (1, 2), {0: (1, 2)}),
    ([member(1, 8, 13), ABLE], 8, 12, (0,), {1: (0,)}),
    # A joiner heals from several groups, and each joiner begins with a different one.
    ([ABLE, member(1, 8, 12), member(2), member(3)], 8, 12, (0, 1), {2: (0, 1), 3: (1, 0)}),
    # A group that follows needs no source until it misses a step.
    ([ABLE, member(1, follows=State(8, 12))], 8, 12, (0,), {}),
    ([ABLE, member(1, follows=State(7, 12))], 8, 12, (0,), {1: (0,)}),
    ([ABLE, member(1, follows=State(8, 99))], 8, 12, (0,), {1: (0,)}),
    ([member(0), member(1)], -1, 0, (), {}),
    # All groups that asked decide which history counts, also those that are left out.
    ([ABLE, member(1, 8, 13, unreached=("2:life-2",)), member(2, 8, 13)], 8, 13, (1,), {0: (1,)}),
    # Groups with different settings, such as the number of ranks, do not sum together.
    ([ABLE, member(1, 8, 12, settings=("ranks = 2",)), member(2, settings=("ranks = 2",))], 8, 12, (1,), {2: (1,)}),
    # A joiner heals from groups that it reaches. The state is not given up for the sake of a larger quorum.
    ([replace(ABLE, unreached=("2:life-2",)), member(1, 8, 12), member(2), member(3)], 8, 12, (0, 1), {3: (0, 1)}),
    ([member(0, 8, 12, unreached=("1:life-1", "2:life-2")), member(1), member(2)], 8, 12, (0,), {}),
])  # fmt: skip
def test_all_members_read_the_same_quorum(members, step, history, able, sources):
    for told in (members, members[::-1]):
        quorum = read_quorum(3, told)
        assert (quorum.state, quorum.able, quorum.sources) == (State(step, history), able, sources)


@given(st.integers(1, 70), st.integers(1, 70))
def test_a_joiner_asks_a_few_groups_that_have_the_state_and_the_next_one_others(able, joiners):
    having = [member(group, 8, 12) for group in range(able)]
    sources = read_quorum(3, [*having, *(member(able + joiner) for joiner in range(joiners))]).sources
    assert len(sources) == joiners
    asked = Counter(group for lenders in sources.values() for group in lenders)
    for lenders in sources.values():
        assert len(lenders) == len(set(lenders)) == min(LENDERS, able)
        assert set(lenders) <= set(range(able))
    if LENDERS * joiners <= able - able % LENDERS:
        assert max(asked.values()) == 1


PAIRS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1]))


@given(PAIRS, st.sets(st.integers(0, 7)))
def test_those_that_take_part_reach_each_other_and_one_has_the_state_and_nobody_is_left_out_for_nothing(cut, able):
    inside = {*together(range(8), cut, able)}
    assert not any(inside.issuperset(pair) for pair in cut)
    assert not able or inside & able
    for other in {*range(8)} - inside:
        assert any(other in pair and inside.intersection(pair) for pair in cut)


@pytest.mark.parametrize(("cut", "left_out"), [
    ([(one, other) for one in range(32) for other in range(32, 64)], range(32, 64)),
    ([(0, other) for other in range(1, 64)], [0]), ([(one, one + 1) for one in range(0, 64, 2)], range(1, 64, 2)),
], ids=["halves", "one", "pairs"])  # fmt: skip
def test_64_groups_are_parted_at_once(cut, left_out):
    begin = time.process_time()
    assert together(range(64), cut, [8]) == tuple(group for group in range(64) if group not in left_out)
    assert time.process_time() - begin < 1.0


def test_a_group_that_is_there_twice_is_no_quorum():
    with pytest.raises(ValueError, match="each of its members once"):
        read_quorum(1, [member(0), member(0, life="another")])


def test_what_is_damaged_is_no_request_or_one_of_the_right_types():
    chance, whole = random.Random(0), encode(member(3, 8, 12, connected="ab"))
    for _ in range(2000):
        with contextlib.suppress(ValueError):
            said = decode(damaged(whole.encode(), chance).decode(errors="replace"))
            for field in dataclasses.fields(said):
                assert type(getattr(said, field.name)) is type(getattr(member(3), field.name))
