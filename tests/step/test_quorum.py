"""What the members of a quorum make of it: who has the state that counts, and who heals from whom."""

import dataclasses
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.step.quorum import NO_STATE, Request, decode, encode, read_quorum, together


def member(group, step=NO_STATE, history=0, **said):
    fields = {
        "group": group,
        "life": f"life-{group}",
        "number": 1,
        "step": step,
        "history": history,
        "follows": NO_STATE,
        "followed": 0,
        "finishing": False,
        "connected": "",
        "store": f"host-{group}:1",
        "doors": (f"host-{group}:2",),
        "watches": (f"host-{group}:3",),
    }
    return Request(**fields | said)


def test_the_newest_state_counts_and_the_others_heal_from_it():
    quorum = read_quorum(3, [member(2, 7, 11), member(0, 8, 12), member(1)])
    assert (quorum.groups, quorum.step, quorum.history) == ((0, 1, 2), 8, 12)
    assert (quorum.able, quorum.sources) == ((0,), {1: 0, 2: 0})


def test_of_two_histories_of_one_step_the_more_common_one_counts():
    quorum = read_quorum(3, [member(0, 8, 12), member(1, 8, 13), member(2, 8, 13)])
    assert (quorum.able, quorum.sources, quorum.history) == ((1, 2), {0: 1}, 13)


def test_of_equally_common_histories_that_of_the_lowest_group_counts():
    assert read_quorum(3, [member(1, 8, 13), member(0, 8, 12)]).able == (0,)


def test_joiners_are_spread_over_those_that_have_the_state():
    quorum = read_quorum(3, [member(0, 8, 1), member(1, 8, 1), member(2), member(3), member(4)])
    assert quorum.sources == {2: 0, 3: 1, 4: 0}


def test_who_follows_needs_no_source_until_it_misses_a_step():
    able = member(0, 8, 12)
    assert read_quorum(3, [able, member(1, follows=8, followed=12)]).sources == {}
    assert read_quorum(3, [able, member(1, follows=7, followed=12)]).sources == {1: 0}
    assert read_quorum(3, [able, member(1, follows=8, followed=99)]).sources == {1: 0}


PAIRS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] < pair[1]))


@given(PAIRS, st.sets(st.integers(0, 7)))
def test_those_that_take_part_reach_each_other_and_have_the_state_and_nobody_is_left_out_in_vain(cut, able):
    inside = together(range(8), cut, able)
    assert not able or able.intersection(inside)
    for group in range(8):
        assert (group in inside) != any({group, other} in map(set, cut) for other in inside)


@pytest.mark.parametrize(
    ("cut", "left_out"),
    [
        ([(one, other) for one in range(32) for other in range(32, 64)], range(32, 64)),
        ([(0, other) for other in range(1, 64)], [0]),
        ([(one, one + 1) for one in range(0, 64, 2)], range(1, 64, 2)),
    ],
    ids=["halves", "one", "pairs"],
)
def test_64_groups_are_parted_at_once(cut, left_out):
    begin = time.monotonic()
    assert together(range(64), cut, [8]) == tuple(group for group in range(64) if group not in left_out)
    assert time.monotonic() - begin < 1.0


def test_who_is_not_reached_is_left_out_until_another_life_of_it_comes():
    """Whoever says so: the way is not open between the two."""
    one, two, three = member(0, 8, 1), member(1, 8, 1), member(2, 8, 1)
    for told in (
        [one, dataclasses.replace(two, unreached=("2:life-2",)), three],
        [one, two, dataclasses.replace(three, unreached=("1:life-1",))],
    ):
        quorum = read_quorum(3, told)
        assert (quorum.groups, quorum.left_out, quorum.cut) == ((0, 1), (2,), ((1, 2),))
    told[2] = dataclasses.replace(three, life="another", unreached=("1:before",))
    assert read_quorum(3, told).groups == (0, 1, 2)


def test_a_joiner_heals_from_one_that_it_reaches_and_a_state_is_not_left_for_a_larger_set():
    cut = {"unreached": ("1:life-1", "2:life-2")}
    quorum = read_quorum(3, [member(0, 8, 1, **cut), member(1), member(2)])
    assert (quorum.groups, quorum.step, quorum.left_out) == ((0,), 8, (1, 2))
    quorum = read_quorum(3, [member(0, 8, 1, unreached=("2:life-2",)), member(1, 8, 1), member(2), member(3)])
    assert (quorum.groups, quorum.able, quorum.sources) == ((0, 1, 3), (0, 1), {3: 0})


def test_of_two_histories_the_one_that_counts_is_that_of_all_that_asked():
    told = [member(0, 8, 12), member(1, 8, 13, unreached=("2:life-2",)), member(2, 8, 13)]
    assert (read_quorum(3, told).history, read_quorum(3, told).able) == (13, (1,))


def test_nobody_with_a_state_is_blank():
    quorum = read_quorum(3, [member(0), member(1)])
    assert (quorum.step, quorum.able, quorum.sources) == (NO_STATE, (), {})


def test_no_two_quorums_have_one_key():
    once = [member(0, 8, 1), member(1, 8, 1)]
    keys = {
        read_quorum(1, once).key,
        read_quorum(1, [once[0], dataclasses.replace(once[1], number=2)]).key,
        read_quorum(1, [once[0], dataclasses.replace(once[1], life="another")]).key,
        read_quorum(1, once[:1]).key,
    }
    assert len(keys) == 4
    assert read_quorum(9, once[::-1]).key == read_quorum(1, once).key, "neither order nor the lighthouse's id matters"


def test_a_process_group_is_used_again_only_where_all_are_in_the_same():
    one, other = member(0, 8, 1, connected="a"), member(1, 8, 1, connected="a")
    assert read_quorum(1, [one, other]).connected_in() == "a"
    assert read_quorum(1, [one, dataclasses.replace(other, connected="")]).connected_in() == ""


def test_a_group_that_is_there_twice_is_no_quorum():
    with pytest.raises(ValueError, match="cannot be the members"):
        read_quorum(1, [member(0), member(0, life="another")])


def test_requests_survive_the_wire():
    said = member(3, 8, 2**62 - 1, connected="ab", doors=("a:1", "b:2"))
    assert decode(encode(said)) == said


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_nothing_else_is_taken_for_a_request(value):
    with pytest.raises(ValueError, match=r"not a request|Expecting|Extra data"):
        decode(json.dumps(value))


@given(
    st.sampled_from([field.name for field in dataclasses.fields(Request)]),
    st.sampled_from([None, "x", -2, 2**63, 1.5, True, [], [1]]),
)
def test_a_field_of_another_type_is_refused(name, value):
    found = json.loads(encode(member(0, 8, 1)))
    changed = found | {name: value}
    try:
        said = decode(json.dumps(changed))
    except ValueError:
        return
    assert type(getattr(said, name)) is type(getattr(member(0), name))
