"""Which slots are whose: laws that hold for any quorum."""

from hypothesis import given
from hypothesis import strategies as st

from everstep.step import ledger
from everstep.step.ledger import Row


@st.composite
def quorums(draw):
    """Rows of a quorum with S slots. Held slots may overlap, as after a false alarm about a live group."""
    slots = draw(st.integers(1, 200))
    groups = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True))
    rows = []
    for group in groups:
        computes = draw(st.booleans()) or group == groups[0]
        held = draw(st.frozensets(st.integers(0, slots - 1), max_size=slots)) if computes else frozenset()
        rows.append(Row(group, 7 if computes else 3, computes, None, held))
    return slots, draw(st.permutations(rows))


@given(quorums())
def test_every_slot_is_held_or_computed_exactly_once(quorum):
    slots, rows = quorum
    plan = ledger.plan(rows, slots)
    count = [0] * slots
    for row in rows:
        kept = row.held if row.group not in plan.drops else frozenset()
        for slot in [*kept, *plan.shares.get(row.group, ())]:
            count[slot] += 1
    assert count == [1] * slots
    assert ledger.verdict(count) is None


@given(quorums())
def test_all_groups_make_the_same_plan_from_rows_in_any_order(quorum):
    slots, rows = quorum
    assert ledger.plan(rows, slots) == ledger.plan(rows[::-1], slots)


@given(quorums())
def test_work_is_spread_evenly_over_those_that_compute(quorum):
    slots, rows = quorum
    plan = ledger.plan(rows, slots)
    assert set(plan.shares) == {row.group for row in rows if row.computes}
    sizes = [len(share) for share in plan.shares.values()]
    assert max(sizes) - min(sizes) <= 1


@given(quorums())
def test_a_group_lets_go_of_its_slots_only_for_another_that_holds_one_of_them(quorum):
    slots, rows = quorum
    drops = ledger.plan(rows, slots).drops
    for row in rows:
        if row.group in drops:
            kept = [other.held for other in rows if other.group not in drops]
            assert any(row.held & held for held in kept)


@given(quorums())
def test_rows_survive_the_wire(quorum):
    slots, rows = quorum
    for row in rows:
        values = ledger.encode(row, slots)
        assert all(-(2**63) <= value < 2**63 for value in values)
        assert len(values) == ledger.words(slots)
        assert ledger.decode(values, slots) == row


@given(st.integers(0, 2**63 - 1))
def test_a_checksum_of_63_bits_survives_the_wire(checksum):
    row = Row(0, 12, True, checksum)
    assert ledger.decode(ledger.encode(row, 5), 5) == row


def test_after_a_death_only_the_dead_groups_slots_are_computed_again():
    rows = [Row(0, 4, True, None, frozenset({0, 3})), Row(2, 4, True, None, frozenset({2, 5}))]
    assert ledger.plan(rows, 6).shares == {0: (1,), 2: (4,)}


def test_more_groups_than_slots_leaves_spares_idle():
    rows = [Row(group, 0, True) for group in range(4)]
    assert ledger.plan(rows, 2).shares == {0: (0,), 1: (1,), 2: (), 3: ()}


def test_a_joiner_gets_no_slots():
    rows = [Row(0, 9, True), Row(1, -1, False)]
    assert ledger.plan(rows, 3).shares == {0: (0, 1, 2)}


def test_shrink_leaves_lost_slots_out_but_begins_with_all_of_them():
    fresh = [Row(0, 4, True), Row(1, 4, True)]
    assert ledger.plan(fresh, 4, "shrink").shares == {0: (0, 2), 1: (1, 3)}
    after_a_death = [Row(0, 4, True, None, frozenset({0, 2}))]
    assert ledger.plan(after_a_death, 4, "shrink").shares == {0: ()}
    assert ledger.verdict([1, 0, 1, 0], "shrink") is None


def test_a_sum_with_a_slot_twice_or_never_is_not_the_step():
    assert ledger.verdict([1, 2, 1]) == "slots [1] are in the sum more than once"
    assert ledger.verdict([1, 2, 1], "shrink") == "slots [1] are in the sum more than once"
    assert ledger.verdict([0, 1, 0]) == "slots [0, 2] are missing from the sum"
    assert ledger.verdict([0, 0], "shrink") == "slots [0, 1] are missing from the sum"


def test_the_audit_names_the_group_that_differs_from_the_others():
    rows = [Row(0, 50, True, 11), Row(1, 50, True, 12), Row(2, 50, True, 11)]
    assert ledger.differing_groups(rows) == {1}
    assert ledger.plan(rows, 4).shares.keys() == {0, 2}


def test_of_two_groups_that_differ_the_lower_id_is_believed():
    assert ledger.differing_groups([Row(3, 50, True, 1), Row(1, 50, True, 2)]) == {3}


def test_no_audit_no_blame():
    assert ledger.differing_groups([Row(0, 50, True), Row(1, 50, True)]) == frozenset()
    assert ledger.differing_groups([Row(0, 50, True, 5), Row(1, -1, False)]) == frozenset()
