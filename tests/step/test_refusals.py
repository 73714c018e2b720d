"""Slots that groups refuse: who computes them, who is at fault, and what is let pass."""

import pytest

from everstep.step import ledger
from everstep.step.ledger import Row


def row(group, refused=(), disputed=(), held=(), not_finite=()):
    sets = map(frozenset, (held, refused, disputed, not_finite))
    held, refused, disputed, not_finite = sets
    return Row(group, "5", 4, 9, True, held=held, refused=refused | disputed, disputed=disputed, not_finite=not_finite)


@pytest.mark.parametrize(
    ("rows", "asked", "accepted"),
    [
        ([row(0), row(1, [0]), row(2)], 1, False),
        ([row(0), row(1, disputed=[0]), row(2)], 0, False),
        ([row(0, [3]), row(1, disputed=[0]), row(2)], 2, False),
        ([row(0, held=[1, 2]), row(1, disputed=[0]), row(2, held=[3])], 0, False),
        ([row(0), row(1, disputed=[0]), row(2, [0])], 0, False),
        ([row(0, [0], held=[1, 2]), row(1, disputed=[0], held=[3])], 0, True),
        ([row(0, [0], not_finite=[0]), row(1, disputed=[0])], 1, True),
        ([row(0, disputed=[0])], 0, True),
        ([row(0, [0]), row(1, disputed=[0]), row(2, [0]), row(3, [1]), row(4)], 4, True),
        ([row(0, [0]), row(1, [0]), row(2, [0])], 0, False),
    ],
)
def test_who_is_asked_for_a_refused_slot(rows, asked, accepted):
    plan = ledger.plan(rows, 4)
    assert [group for group, share in plan.shares.items() if 0 in share] == [asked]
    assert (0 in plan.accepted) == accepted
    assert ledger.plan(rows[::-1], 4) == plan


def test_a_refused_slot_is_computed_first_and_is_not_lost_where_lost_slots_are_left_out():
    rows = [row(0, [3], held=[0]), row(1, held=[1])]
    assert ledger.plan(rows, 4).shares[0][0] == 3
    assert ledger.plan(rows, 4, ledger.Dealing("shrink")).shares == {0: (3,), 1: ()}
    assert ledger.plan(rows, 4, ledger.Dealing(homes=2)).shares == {0: (3, 2), 1: ()}


@pytest.mark.parametrize(
    ("seen", "groups", "gives_up"),
    [
        ([0], 1, True),
        ([0], 2, False),
        ([0, 1], 2, True),
        ([0, 1], 3, False),
        ([0, 1, 2], 3, True),
        ([0, 1, 2], 5, False),
        ([0, 1, 2, 3], 5, True),
    ],
)
def test_what_is_not_finite_on_every_group_that_is_asked_is_given_up(seen, groups, gives_up):
    rows = [row(g, disputed=[2], not_finite=[2] if g in seen else []) for g in range(groups)]
    assert ledger.plan(rows, 4).not_finite == ({2} if gives_up else frozenset())


def test_a_group_is_at_fault_for_what_another_one_was_asked_for_and_computed():
    rows = [row(0, disputed=[1, 2]), row(1, [3], held=[2]), row(2)]
    owners = (0, 1, 1, 1)
    assert ledger.at_fault(0, rows, {1: 1, 2: 1}, owners) == {1, 2}
    assert ledger.at_fault(0, rows, {1: 2}, owners) == frozenset(), "the one that was asked has not computed it"
    assert ledger.at_fault(1, rows, {3: 1}, owners) == frozenset(), "refused once"
    both = [row(0, disputed=[3]), row(1, [3], held=[3])]
    assert ledger.at_fault(0, both, {3: 1}, owners) == frozenset(), "accepted: the other one refused it as well"
