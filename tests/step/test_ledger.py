"""Plans, audits and tallies: properties that hold for any quorum, and examples of single rules."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.step import ledger
from everstep.step.attempt import Rules
from everstep.step.interfaces import SlotSums
from everstep.step.ledger import Row


def row(group, step=4, computes=True, checksum=None, held=frozenset(), proven=False, history=9):
    return Row(group, "5", step, history, computes, checksum, proven, held=frozenset(held))


def tally(coverage, refused=0):
    zeros, ones = torch.zeros(len(coverage), dtype=torch.float64), torch.ones(len(coverage), dtype=torch.float64)
    return ledger.Tally(tuple(coverage), SlotSums(zeros.clone(), zeros, ones, frozenset()), 0, 0, refused)


@st.composite
def quorums(draw):
    """Draw S and the rows of a quorum. Held slots may overlap, as if a living group seemed dead. Any may be refused."""
    slots = draw(st.integers(1, 200))
    groups = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True))
    rows = []
    for group in groups:
        computes = draw(st.booleans()) or group == groups[0]
        some = st.frozensets(st.integers(0, slots - 1), max_size=slots)
        held, refused = (draw(some) if computes else frozenset() for _ in range(2))
        disputed, not_finite = draw(some) & refused, draw(some) & refused
        said = row(group, 7 if computes else 3, computes, held=held)
        rows.append(replace(said, refused=refused, disputed=disputed, not_finite=not_finite))
    return slots, draw(st.permutations(rows))


def times_covered(plan, rows, slots):
    """Return, by slot, how many groups hold or compute it."""
    count = [0] * slots
    for said in rows:
        kept = said.held if said.group not in plan.drops else frozenset()
        for slot in [*kept, *plan.shares.get(said.group, ())]:
            count[slot] += 1
    return count


@given(quorums())
def test_every_slot_is_held_or_computed_exactly_once_by_rows_that_survive_the_wire(quorum):
    slots, rows = quorum
    assert [Row.decode(said.encode()) for said in rows] == rows
    plan = ledger.plan(rows, slots)
    count = times_covered(plan, rows, slots)
    assert count == [1] * slots
    assert not ledger.verdict(tally(count))
    assert plan == ledger.plan(rows[::-1], slots), "rows in any order make the same plan"


@given(st.integers(1, 60), st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.booleans())
def test_slots_are_dealt_so_that_all_groups_are_done_as_early_as_can_be(slots, took_us, retry):
    """No group would be done with the last slot of another group earlier than that group is."""
    groups = len(took_us)
    held = frozenset(range(slots // 2)) if retry else frozenset()
    rows = [replace(row(group, held=held if not group else ()), slot_us=us) for group, us in enumerate(took_us)]
    plan = ledger.plan(rows, slots)
    assert times_covered(plan, rows, slots) == [1] * slots
    counts = {group: len(share) for group, share in plan.shares.items()}
    if not held and slots >= groups:
        assert min(counts.values()) >= 1, "a slow group needs a slot to find out whether it is faster again"
    for group, count in counts.items():
        if count > (0 if held else 1):
            last = plan.paces[group] * count
            assert all(last <= plan.paces[other] * (counts[other] + 1) for other in counts)


@pytest.mark.parametrize(("took_us", "at_work"), [
    ((0, 0, 0, 0), {0, 1, 2}),
    ((0, 1000, 1000, 1000), {1, 2, 3}),  # 0 came back after its death, and 3 took its place
    ((1000, 2000, 1000, 0), {0, 2, 3}),  # 1 is slow
    ((1000, 2000, 1000, 2000), {0, 1, 2}),
    ((1000, 1000, 1000), {0, 1, 2}),  # one of the four is lost
    ((1000, 1000), {0, 1}),
    ((1000, 1000, 1000, 1000, 0), {0, 1, 2, 3}),  # a fifth group has joined
])  # fmt: skip
def test_a_spare_computes_nothing_until_another_group_is_lost_or_slow(took_us, at_work):
    rows = [replace(row(group), slot_us=us) for group, us in enumerate(took_us)]
    shares = ledger.plan(rows, 12, ledger.Dealing(groups=4, spares=1)).shares
    assert {group for group, share in shares.items() if share} == at_work
    assert set(shares) == set(range(len(took_us))), "every group has the state and commits the step"


@pytest.mark.parametrize("spares", [0, 1])
def test_a_group_of_a_run_that_was_scaled_up_sums_with_the_others_unless_spares_stand_by(spares):
    some, more = (Rules(12, ledger.Dealing(groups=groups, spares=spares), None).settings for groups in (3, 4))
    assert (some == more) == (spares == 0)
    assert Rules(13, ledger.Dealing(groups=3, spares=spares), None).settings != some


def test_shrink_leaves_lost_slots_out_but_begins_with_all_of_them():
    fresh = [row(0, 4, True), row(1, 4, True)]
    assert ledger.plan(fresh, 4, ledger.Dealing("shrink")).shares == {0: (0, 2), 1: (1, 3)}
    after_a_death = [row(0, 4, True, held=frozenset({0, 2}))]
    assert ledger.plan(after_a_death, 4, ledger.Dealing("shrink")).shares == {0: ()}
    assert not ledger.verdict(tally([1, 0, 1, 0]), "shrink")


@pytest.mark.parametrize(("rows", "differing"), [
    ([row(0, 50, True, 11), row(1, 50, True, 12), row(2, 50, True, 11)], {1}),
    ([row(3, 50, True, 1), row(1, 50, True, 2)], {3}),  # in a tie, the lower group id counts
    ([row(0, 50, True), row(1, 50, True)], set()),  # no audit is due
    ([row(0, 50, True, 5), row(1, -1, False)], set()),
    # Groups that took over a state since the last audit have no vote against a group that it confirmed.
    ([row(0, checksum=11, proven=True), row(1, checksum=12), row(2, checksum=12)], {1, 2}),
    # But they decide between two groups that it confirmed.
    ([row(0, checksum=11, proven=True), row(1, checksum=12, proven=True), row(2, checksum=12)], {0}),
])  # fmt: skip
def test_the_audit_names_the_group_that_differs_from_the_others(rows, differing):
    assert ledger.differing_groups(rows) == differing


def refusing(group, refused=(), disputed=(), held=(), not_finite=()):
    refused, disputed = frozenset(refused) | frozenset(disputed), frozenset(disputed)
    return replace(row(group, held=held), refused=refused, disputed=disputed, not_finite=frozenset(not_finite))


@pytest.mark.parametrize(("rows", "asked", "accepted"), [
    ([refusing(0), refusing(1, [0]), refusing(2)], 1, False),
    ([refusing(0), refusing(1, disputed=[0]), refusing(2)], 0, False),
    ([refusing(0, [3]), refusing(1, disputed=[0]), refusing(2)], 2, False),
    ([refusing(0, held=[1, 2]), refusing(1, disputed=[0]), refusing(2, held=[3])], 0, False),
    ([refusing(0), refusing(1, disputed=[0]), refusing(2, [0])], 0, False),
    ([refusing(0, [0], held=[1, 2]), refusing(1, disputed=[0], held=[3])], 0, True),
    ([refusing(0, [0], not_finite=[0]), refusing(1, disputed=[0])], 1, True), ([refusing(0, disputed=[0])], 0, True),
    ([refusing(0, [0]), refusing(1, disputed=[0]), refusing(2, [0]), refusing(3, [1]), refusing(4)], 4, True),
    ([refusing(0, [0]), refusing(1, [0]), refusing(2, [0])], 0, False),
])  # fmt: skip
def test_which_group_computes_a_refused_slot(rows, asked, accepted):
    plan = ledger.plan(rows, 4)
    assert [group for group, share in plan.shares.items() if 0 in share] == [asked]
    assert (0 in plan.accepted) == accepted
    assert ledger.plan(rows[::-1], 4) == plan


def test_a_refused_slot_is_computed_first_and_is_not_lost_where_lost_slots_are_left_out():
    rows = [refusing(0, [3], held=[0]), refusing(1, held=[1])]
    assert ledger.plan(rows, 4).shares[0][0] == 3
    assert ledger.plan(rows, 4, ledger.Dealing("shrink")).shares == {0: (3,), 1: ()}
    assert ledger.plan(rows, 4, ledger.Dealing(homes=2)).shares == {0: (3, 2), 1: ()}


def test_a_home_is_also_given_to_groups_that_were_added():
    shares = ledger.plan([refusing(group) for group in (0, 1, 3)], 4, ledger.Dealing(homes=2)).shares
    assert shares == {0: (0, 2), 1: (1,), 3: (3,)}


@pytest.mark.parametrize(("seen", "groups", "gives_up"), [
    ([0], 1, True), ([0], 2, False), ([0, 1], 2, True), ([0, 1], 3, False), ([0, 1, 2], 3, True),
    ([0, 1, 2], 5, False), ([0, 1, 2, 3], 5, True),
])  # fmt: skip
def test_what_is_not_finite_on_every_group_that_is_asked_is_given_up(seen, groups, gives_up):
    rows = [refusing(g, disputed=[2], not_finite=[2] if g in seen else []) for g in range(groups)]
    assert ledger.plan(rows, 4).not_finite == ({2} if gives_up else frozenset())


def test_a_group_is_at_fault_for_what_another_one_was_asked_for_and_computed():
    rows = [refusing(0, disputed=[1, 2]), refusing(1, [3], held=[2]), refusing(2)]
    owners = (0, 1, 1, 1)
    assert ledger.at_fault(0, rows, {1: 1, 2: 1}, owners) == {1, 2}
    assert ledger.at_fault(0, rows, {1: 2}, owners) == frozenset(), "the group that was asked has not computed it"
    assert ledger.at_fault(1, rows, {3: 1}, owners) == frozenset(), "refused only once"
    both = [refusing(0, disputed=[3]), refusing(1, [3], held=[3])]
    assert ledger.at_fault(0, both, {3: 1}, owners) == frozenset(), "the other group refused it too"


def test_ranks_that_would_scale_the_gradient_differently_do_not_see_the_same_tally():
    """The gradient is divided by the number of tokens, so the digest covers that."""
    mine, other = tally([1, 1]), tally([1, 1])
    assert mine.digest() == other.digest()
    other.sums.tokens[1] = 7.0
    assert mine.digest() != other.digest()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_share_of_the_slots_is_drawn_alike_by_everybody(share):
    drawn = [ledger.audited_slots(7, step, 100, share) for step in range(100)]
    assert drawn == [ledger.audited_slots(7, step, 100, share) for step in range(100)]
    assert sum(map(len, drawn)) / 1e4 == pytest.approx(share, abs=0.015)
    assert share in (0.0, 1.0) or drawn != [ledger.audited_slots(8, step, 100, share) for step in range(100)]


def test_every_audited_slot_has_another_group_that_computes_it_and_none_is_alone_with_that():
    audited = tuple(range(8))
    plan = ledger.plan([row(0), row(1), row(2, held=[0, 1])], 8, audited=audited)
    owners = {slot: group for group, share in plan.shares.items() for slot in share} | {0: 2, 1: 2}
    assert set(plan.auditors) == set(audited)
    assert all(plan.auditors[slot] != owners[slot] for slot in audited)
    audits = [list(plan.auditors.values()).count(group) for group in range(3)]
    assert max(audits) - min(audits) <= 1
    assert sum(plan.loads.values()) == 8 + len(audited) - 2, "two slots are held already"
    assert ledger.plan([row(0)], 8, audited=audited).auditors == {}


def test_an_outvoted_group_computes_the_slot_no_more_and_a_third_audits_it():
    doubted = ledger.plan([refusing(0, [3]), refusing(1, [3]), row(2)], 8, audited=(3,))
    assert 3 not in doubted.shares[2]
    assert doubted.auditors == {3: 2}
    voted = [refusing(0, disputed=[3]), row(1), row(2)]
    for left in (voted, voted[:2]):
        plan = ledger.plan(left, 8, audited=(3,))
        assert 3 in plan.shares[1]
        assert plan.auditors == ({3: 2} if len(left) > 2 else {}), "group 0's bits would differ in every attempt"
        assert not plan.accepted
    for held in ([], [3]):
        two = ledger.plan([refusing(0, disputed=[3], held=held), refusing(1, disputed=[3])], 8, audited=(3,))
        assert two.accepted == {3}, "no other group is left to ask, also in the next attempt"


def test_a_tally_brings_the_bits_of_owner_and_auditor_together():
    audited = (1, 4)
    plan = replace(ledger.NO_PLAN, audited=audited, auditors={1: 2, 4: 1})
    most = 1 << 52
    parts = [
        replace(tally([0, 1, 1, 1, 0, 0, 0, 0]), bits=(most, 0, 0, 17)),
        replace(tally([1, 0, 0, 0, 1, 1, 1, 1]), bits=(0, most - 1, 17, 0)),
    ]
    total = ledger.Tally.decode(sum(part.encode() for part in parts), 8, len(audited))
    assert total.bits == (most, most - 1, 17, 17)
    assert total.sums.extra.tolist() == [2.0] * 8
    assert ledger.differing_bits(total, plan) == {1}
    assert ledger.differing_bits(total, replace(plan, accepted=frozenset({1}))) == frozenset()
    assert ledger.differing_bits(ledger.Tally.decode(parts[0].encode(), 8, len(audited)), plan) == frozenset()
