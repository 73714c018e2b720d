"""What a group holds and refuses: one rank's part, with a second rank that says what a test has it say."""

from types import SimpleNamespace

import pytest
import torch

from everstep.step import ledger
from everstep.step.attempt import Attempt, Host
from everstep.step.decisions import Decisions
from everstep.step.holding import FINDINGS, NOT_FINITE, OTHER_BITS, Holding
from everstep.step.interfaces import GroupBroken, OutOfData, SlotSums

SLOTS, ME = 4, 1


class Ranks:
    """Two ranks. `says`: what the second makes of what the first says, decision by decision."""

    rank, size = 0, 2

    def __init__(self):
        self.says = lambda words: words

    def gather(self, words):
        return [list(words), [*words[:2], *self.says(list(words[2:]))]]


class Trainer:
    """Work and reducer. `wrong`: slots that checks find wrong; `finite`, `own_finite`: what is said of the sums."""

    def __init__(self):
        self.wrong, self.finite_, self.own, self.ends_at = set(), True, True, None
        self.done, self.calls, self.forgotten = [], [], 0

    def compute(self, step, slot, *, whole):
        if slot == self.ends_at:
            raise OutOfData
        self.done.append(slot)
        self.calls.append((slot, whole))

    def audit(self, step, slot):
        if slot == self.ends_at:
            raise OutOfData
        self.calls.append(("audit", slot))
        return 100 + slot

    def bits(self, slot):
        assert slot == self.done[-1]
        return 100 + slot

    def refused(self):
        return frozenset(self.wrong.intersection(self.done))

    def discard(self):
        self.done.clear()

    def not_finite(self, step, slots):
        self.calls.append(("not finite", slots))

    def begin_slot(self, *, last):
        self.calls.append(last)

    def end_slot(self):
        self.calls.append("end")

    def forget(self):
        self.forgotten += 1

    def finite(self):
        assert self.finite_ is not None, "nothing is known of sums that are not there"
        return self.finite_

    def own_finite(self):
        return self.own


@pytest.fixture
def trainer():
    return Trainer()


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def told():
    return []


@pytest.fixture
def holding(trainer, ranks, told):
    events = SimpleNamespace(emit=lambda kind, step, **fields: told.append((kind, fields)))
    files = SimpleNamespace(beat=lambda phase, step: None)
    host = Host(SimpleNamespace(now=lambda: 0.0), files, events)
    return Holding(trainer, trainer, Decisions(ranks), host, SLOTS, ME)


def attempt(**plan):
    shares = {ME: (0, 1)}
    found = ledger.Plan(**{"shares": shares, "drops": frozenset(), "differing": frozenset()} | plan)
    return Attempt(1, 0.0, SimpleNamespace(step=4, history=9), 0.0, plan=found)


def judge(holding, trainer, of, error=""):
    return holding.judge_sums(of, frozenset(trainer.done), error)


def test_a_share_is_held_and_its_sums_begin_with_the_last_slot(holding, trainer):
    of = attempt()
    holding.compute(of, (0, 2))
    assert trainer.calls == [False, (0, False), "end", True, (2, False), "end"]
    assert holding.held.slots == {0, 2}
    assert holding.held.computed == [0, 2]
    assert judge(holding, trainer, of) == (True, "")
    assert holding.held.slots == {0, 2}
    assert not of.refused


def test_what_was_given_up_counts_as_recomputed(holding, trainer):
    holding.compute(attempt(), (0, 1))
    holding.drop()
    assert (holding.held.slots, holding.held.lost) == (set(), {0, 1})
    assert (trainer.done, trainer.forgotten) == ([], 1), "neither trainer nor reducer has anything of it"
    holding.compute(attempt(), (1, 2))
    assert holding.held.recomputed == {1}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_that_one_rank_refuses_drops_what_the_group_holds(holding, trainer, ranks, told, rank):
    of = attempt()
    holding.compute(of, (0, 1))
    if rank == 0:
        trainer.wrong = {1}
    else:
        ranks.says = lambda words: [*words[:4], *ledger.pack(frozenset({1}), SLOTS)]
    assert judge(holding, trainer, of) == (True, "")
    assert of.refused
    assert holding.held.slots == set()
    assert holding.held.refused == {1: 1}
    assert holding.held.refused_here == ({1} if rank == 0 else set())
    assert told == [("slot_refused", {"slot": 1, "reason": FINDINGS})]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_not_finite_on_one_rank_is_refused_whole(holding, trainer, ranks, told, rank):
    of = attempt()
    holding.compute(of, (0, 1))
    trainer.finite_ = False
    if rank == 0:
        trainer.own = False
    else:
        ranks.says = lambda words: [*words[:2], 0, *words[3:]]
    assert judge(holding, trainer, of)[0]
    assert holding.held.refused == {0: 1, 1: 1}
    assert holding.held.refused_here == ({0, 1} if rank == 0 else set())
    assert {fields["reason"] for _, fields in told} == {NOT_FINITE}


def test_a_sum_that_is_not_finite_because_of_others_is_not_committed_and_nothing_is_dropped(holding, trainer):
    of = attempt()
    holding.compute(of, (0, 1))
    trainer.finite_ = False
    assert judge(holding, trainer, of) == (True, "the sum of the gradients is not finite")
    assert holding.held.slots == {0, 1}


def test_a_rank_without_sums_fails_the_attempt_of_all_and_nothing_is_dropped(holding, trainer, ranks):
    of = attempt()
    holding.compute(of, (0, 1))
    trainer.finite_ = None
    assert judge(holding, trainer, of, "a peer is gone")[0] is False
    trainer.finite_, ranks.says = True, lambda words: [0, *words[1:]]
    assert judge(holding, trainer, of)[0] is False
    assert holding.held.slots == {0, 1}


def test_a_trainer_that_holds_something_else_ends_the_group(holding, trainer):
    holding.compute(attempt(), (0, 1))
    with pytest.raises(GroupBroken, match=r"ledger says slots \[0, 1\] and the trainer \[0\]"):
        holding.judge_sums(attempt(), frozenset({0}), "")


def test_a_doubted_slot_is_judged_alone(holding, trainer, told):
    of = attempt(doubted=frozenset({0, 2}))
    trainer.own = False
    holding.compute(of, (0,))
    assert (0, True) in trainer.calls, "with every check"
    assert holding.held.not_finite == holding.held.refused_here == {0}
    assert holding.held.slots == set()
    trainer.own, trainer.wrong = True, {2}
    holding.compute(of, (2, 3))
    assert holding.held.refused == {0: 1, 2: 1}
    assert holding.held.slots == {3}
    assert told[-1] == ("slot_refused", {"slot": 2, "reason": FINDINGS})


@pytest.mark.parametrize("flag", [0, 1])
def test_a_doubted_slot_is_refused_if_another_rank_says_so(holding, ranks, told, flag):
    ranks.says = lambda words: [word and number != flag for number, word in enumerate(words)]
    holding.compute(attempt(doubted=frozenset({0})), (0,))
    assert told == [("slot_refused", {"slot": 0, "reason": [NOT_FINITE, FINDINGS][flag]})]
    assert holding.held.not_finite == ({0} if flag == 0 else set())
    assert not holding.held.refused_here, "this rank found nothing"


def test_a_slot_that_is_to_pass_is_held_until_what_is_held_is_dropped(holding, trainer, told):
    passes = attempt(doubted=frozenset({0}), accepted=frozenset({0}))
    trainer.wrong = {0}
    holding.compute(passes, (0, 1))
    assert told == [("slot_accepted", {"slot": 0, "reason": "other groups refused it as well"})]
    assert judge(holding, trainer, passes) == (True, "")
    assert holding.held.slots == {0, 1}
    assert holding.held.refused == {0: 1}
    holding.drop()
    of = attempt()
    holding.compute(of, (0,))
    judge(holding, trainer, of)
    assert of.refused, "it passed once, and not whenever it is computed"


def test_who_is_asked_for_a_refused_slot_is_remembered_unless_it_is_to_pass(holding, trainer):
    holding.heed(attempt(shares={ME: (0,), 2: (1, 3)}, doubted=frozenset({0, 3})).plan, 5)
    assert holding.held.asked == {0: ME, 3: 2}
    more = {"doubted": frozenset({0, 3}), "accepted": frozenset({3}), "not_finite": frozenset({3})}
    holding.heed(attempt(shares={ME: (3,), 2: (0,)}, **more).plan, 5)
    assert holding.held.asked == {0: 2}
    assert trainer.calls == [("not finite", [3])]


def test_the_end_of_the_data_ends_a_share_and_an_audit(holding, trainer):
    trainer.ends_at = 1
    of = attempt()
    holding.compute(of, (0, 1, 2))
    assert of.exhausted
    assert holding.held.slots == {0}
    of = attempt(audited=(1,), auditors={1: ME})
    holding.compute(of, (2,))
    assert of.exhausted
    assert holding.held.slots == {0}, "nothing is computed without the audit"


def test_an_auditor_computes_a_slot_once_unless_it_is_doubted(holding, trainer):
    plan = {"audited": (0, 3), "auditors": {0: 2, 3: ME}}
    holding.compute(attempt(**plan), (0,))
    holding.compute(attempt(**plan), ())
    assert trainer.calls.count(("audit", 3)) == 1
    assert holding.bits(attempt(**plan).plan) == [100, 0, 0, 103]
    holding.compute(attempt(**plan, doubted=frozenset({3})), ())
    assert trainer.calls.count(("audit", 3)) == 2


def tally(owner, bits, slot=0):
    """Of a step in which this group holds all slots but one audited one, which `owner` has."""
    sums = SlotSums(torch.zeros(SLOTS), torch.zeros(SLOTS), torch.zeros(0), frozenset())
    owners = tuple(1 + (owner if each == slot else ME) for each in range(SLOTS))
    return ledger.Tally((1,) * SLOTS, owners, sums, 0, 0, 0, tuple(bits))


def audit(holding, owner, auditor, bits, **plan):
    of = attempt(audited=(0,), auditors={0: auditor}, **plan)
    holding.heed_bits(of, tally(owner, bits))


def test_owner_and_auditor_whose_bits_differ_both_refuse_and_the_owner_drops(holding, told):
    holding.compute(attempt(), (0, 1))
    audit(holding, ME, 2, (7, 8))
    assert holding.held.refused == {0: 1}
    assert holding.held.slots == set()
    assert told == [("slot_differs", {"slot": 0, "groups": [ME, 2], "reason": OTHER_BITS})]


def test_a_group_that_is_neither_keeps_what_it_holds_and_says_nothing(holding, told):
    holding.compute(attempt(), (1, 2))
    audit(holding, 0, 2, (7, 8))
    assert holding.held.slots == {1, 2}
    assert not holding.held.refused
    assert told == []


@pytest.mark.parametrize(("mine", "outvoted"), [(7, True), (8, False)])
def test_two_groups_with_the_same_bits_outvote_a_third(holding, mine, outvoted):
    """Whoever of the three it is; it refuses the slot for good, and the others no more."""
    audit(holding, ME, 0, (mine, 15 - mine))
    holding.held.refused_here.clear()
    audit(holding, ME, 2, (mine, 8))
    if outvoted:
        assert holding.held.refused == {0: ledger.ASK_AFTER}
    assert (holding.held.outvoted, holding.held.refused_here) == (({0}, {0}) if outvoted else (set(), set()))


def test_the_owner_names_the_groups_that_were_wrong_once_bits_agree(holding, told):
    audit(holding, ME, 0, (8, 7))
    told.clear()
    audit(holding, ME, 2, (8, 8))
    assert told == [("slot_wrong", {"slot": 0, "groups": [0], "reason": OTHER_BITS})]
    told.clear()
    audit(holding, 2, ME, (8, 8))
    assert told == [], "only its owner says so"


def test_bits_that_nobody_is_left_to_compare_pass_and_are_told(holding, told):
    audit(holding, ME, 2, (7, 8), doubted=frozenset({0}), accepted=frozenset({0}))
    assert told == [("slot_accepted", {"slot": 0, "reason": f"{OTHER_BITS}, and nobody is left to ask"})]
    audit(holding, ME, 2, (7, 0))
    assert len(told) == 1, "without both there is nothing to compare"
