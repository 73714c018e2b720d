"""Which slots two groups compute, and what follows from their bits."""

from dataclasses import replace

import pytest
import torch

from everstep.step import ledger
from everstep.step.interfaces import SlotSums

SLOTS = 8


def row(group, **more):
    sets = {name: frozenset(slots) for name, slots in more.items()}
    return ledger.Row(group, quorum="1", step=4, history=5, computes=True, **sets)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_share_of_the_slots_is_drawn_alike_by_everybody(share):
    drawn = [ledger.audited_slots(7, step, 100, share) for step in range(100)]
    assert drawn == [ledger.audited_slots(7, step, 100, share) for step in range(100)]
    assert sum(map(len, drawn)) / 1e4 == pytest.approx(share, abs=0.015)
    assert share in (0.0, 1.0) or drawn != [ledger.audited_slots(8, step, 100, share) for step in range(100)]


def test_every_audited_slot_has_another_group_that_computes_it_and_none_is_alone_with_that():
    audited = tuple(range(SLOTS))
    plan = ledger.plan([row(0), row(1), row(2, held=[0, 1])], SLOTS, audited=audited)
    owners = {slot: group for group, share in plan.shares.items() for slot in share} | {0: 2, 1: 2}
    assert set(plan.auditors) == set(audited)
    assert all(plan.auditors[slot] != owners[slot] for slot in audited)
    audits = [list(plan.auditors.values()).count(group) for group in range(3)]
    assert max(audits) - min(audits) <= 1
    assert sum(plan.loads.values()) == SLOTS + len(audited) - 2, "what is held is computed already"
    assert ledger.plan([row(0)], SLOTS, audited=audited).auditors == {}


def test_who_is_outvoted_computes_the_slot_no_more_and_a_third_one_audits_a_doubted_one():
    doubted = ledger.plan([row(0, refused=[3]), row(1, refused=[3]), row(2)], SLOTS, audited=(3,))
    assert 3 not in doubted.shares[2]
    assert doubted.auditors == {3: 2}
    voted = [row(0, refused=[3], disputed=[3]), row(1), row(2)]
    for left in (voted, voted[:2]):
        plan = ledger.plan(left, SLOTS, audited=(3,))
        assert 3 in plan.shares[1]
        assert plan.auditors == ({3: 2} if len(left) > 2 else {}), "its bits would differ in every attempt"
        assert not plan.accepted
    two = ledger.plan([row(0, refused=[3], disputed=[3]), row(1, refused=[3], disputed=[3])], SLOTS, audited=(3,))
    assert two.accepted == {3}, "nobody is left to ask"


def test_a_tally_brings_the_bits_of_owner_and_auditor_together():
    audited = (1, 4)
    plan = replace(ledger.NO_PLAN, audited=audited, auditors={1: 2, 4: 1})
    zeros, most = torch.zeros(SLOTS, dtype=torch.float64), (1 << 52)
    sums = SlotSums(zeros, zeros, torch.ones(3, dtype=torch.float64), frozenset())

    def tally(held, *bits):
        return ledger.Tally(tuple(int(slot in held) for slot in range(SLOTS)), sums, 0, 0, 0, bits=bits)

    parts = [tally([1, 2, 3], most, 0, 0, 17), tally([0, 4, 5, 6, 7], 0, most - 1, 17, 0)]
    total = ledger.Tally.decode(sum(part.encode() for part in parts), SLOTS, len(audited))
    assert total.bits == (most, most - 1, 17, 17)
    assert total.sums.extra.tolist() == [2.0, 2.0, 2.0]
    assert ledger.differing_bits(total, plan) == {1}
    assert ledger.differing_bits(total, replace(plan, accepted=frozenset({1}))) == frozenset()
    alone = ledger.Tally.decode(parts[0].encode(), SLOTS, len(audited))
    assert ledger.differing_bits(alone, plan) == frozenset()
