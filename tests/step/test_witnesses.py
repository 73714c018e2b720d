"""A slot that a group's checks refuse again and again is computed by another group, in the same step."""

import pytest

from everstep.step import ledger
from harness import check


def computed(run, step, slot):
    """The groups that computed a slot of a step, refused or not, in the order of the attempts."""
    told = [*run.events("slot_refused"), *run.events("attempt")]
    return [
        event["group"]
        for event in sorted(told, key=lambda event: event["t"])
        if event["rank"] == 0
        and event["step"] == step
        and (event.get("slot") == slot or slot in event.get("computed", ()))
    ]


@pytest.mark.parametrize(("group", "slot"), [(0, 2), (1, 3)])
def test_a_slot_refused_twice_goes_to_another_group_and_nothing_else_is_computed_again(run, group, slot):
    first = run.ranks(0, 2, steps=9, pause_after=2, refuses=(6, slot) if group == 0 else (-1, -1))
    first[0].until(2)
    first[1].until(2)
    second = run.ranks(1, 2, steps=9, refuses=(6, slot) if group == 1 else (-1, -1))
    for rank in second:
        rank.ready()
    for rank in first:
        rank.go()
    for rank in (*first, *second):
        check(rank, 9)
    assert first[0].commits[6]["groups"] == (0, 1)
    other = 1 - group
    assert computed(run, 6, slot) == [group, group, other]
    assert first[0].commits[6]["owners"][slot] == other
    again = [event for event in run.events("attempt") if event["step"] == 6 and event["attempt"] > 1]
    assert {slot for event in again for slot in event["computed"]} == {slot}
    assert not any(event["recomputed"] for event in again)
    for number, rank in enumerate((*first, *second)):
        column = {g: f"rank {number % 2} of group {g}: [{slot}]" for g in (0, 1)}
        asked = [[(slot, group, False)], [(slot, other, False)]]
        assert rank.commits[9]["heard"] == [(6, doubts, column) for doubts in asked]


def test_each_group_is_asked_before_one_is_asked_again(run):
    """Two of three refuse a slot each time; the third has what none of them may keep."""
    step, slot = 6, 0
    groups = [run.group(0, steps=9, pause_after=2, refuses=(step, slot))]
    groups[0].until(2)
    groups += [
        run.group(number, steps=9, refuses=(step, slot) if number == 1 else (-1, -1)).ready() for number in (1, 2)
    ]
    groups[0].go()
    for group in groups:
        check(group, 9)
    assert groups[0].commits[step]["groups"] == (0, 1, 2)
    assert computed(run, step, slot) == [0, 0, 1, 1, 2]
    assert [doubts for _, doubts, _ in groups[2].commits[9]["heard"]] == [
        [(slot, asked, False)] for asked in (0, 1, 1, 2)
    ]


def test_the_witness_dies_and_the_next_one_is_asked(run):
    """What the others computed is kept; the slot does not go back to the group that refused it."""
    step, slot = 6, 0
    groups = [run.group(0, steps=9, pause_after=2, refuses=(step, slot))]
    groups[0].until(2)
    # Group 1 computes 1 and 4, then as a witness slot 0.
    groups += [run.group(1, steps=9, crash_at=f"compute:{step}:2").ready(), run.group(2, steps=9).ready()]
    groups[0].go()
    check(groups[0], 9)
    check(groups[2], 9)
    assert groups[1].death() < 0
    assert groups[0].commits[step]["owners"][slot] == 2
    assert computed(run, step, slot)[:2] == [0, 0]


def test_a_group_alone_is_told_so(run):
    run.group(0, steps=5, refuse=(3, 1)).until(2)
    group = run.members[0]
    check(group, 5)
    assert [doubts for _, doubts, _ in group.commits[5]["heard"]] == [[(1, 0, False)]]
    assert ledger.plan([ledger.Row(0, 5, 2, 9, True, refused=frozenset({1}), disputed=frozenset({1}))], 6).doubts == (
        ledger.Doubt(1, 0, held=False, alone=True),
    )
