"""What a rank makes of the slots it refused, from what other groups say and from the commit."""

import pytest
import torch

from everstep.attention.evidence import Allowance, Sighting, Statement
from everstep.attention.guard import Checks
from everstep.attention.section import AttentionCheck
from everstep.run.exits import UNFIT_EXIT
from everstep.step.interfaces import Commit, Doubt
from everstep.titan.witness import Witnesses

SEEN = (Sighting(3, "wo.dx", "moderate", 4.0, 20.0, True),)
STEP, SLOT = 7, 2


class Told(list):
    def emit(self, kind, step, **fields):
        self.append({"kind": kind, "step": step, **fields})


class Rank:
    """Group 0's rank, which has computed SLOT some times."""

    def __init__(self, *seen):
        self.checks, self.events = Checks(AttentionCheck(enable=True)), Told()
        self.witnesses = Witnesses(self.checks, 0, self.events)
        self.checks.begin(STEP, SLOT)
        self.checks.findings._seen[SLOT].extend(seen)

    def weigh(self, said=None, *, asked=1, held=False, alone=False):
        words = {group: Statement({SLOT: evidence}).encode() for group, evidence in (said or {}).items()}
        words[0] = self.witnesses.testify([SLOT])
        self.witnesses.weigh(STEP, [Doubt(SLOT, asked, held, alone)], words)

    def committed(self, owner, step=STEP):
        none = torch.zeros(0)
        owners = tuple(owner if slot == SLOT else 0 for slot in range(4))
        fields = dict.fromkeys(Commit.__dataclass_fields__, 0)
        return self.witnesses.answered(
            Commit(**fields | {"step": step, "owners": owners, "tokens": none, "loss": none, "extra": none})
        )

    @property
    def kinds(self):
        return [event["kind"] for event in self.events]


def test_a_witness_that_computed_the_slot_names_the_rank_after_the_commit():
    rank = Rank(SEEN, SEEN)
    rank.weigh()
    assert rank.witnesses.doubted(STEP, SLOT)
    assert not rank.witnesses.doubted(STEP + 1, SLOT)
    assert not rank.events
    assert rank.committed(1)
    (event,) = rank.events
    assert (event["kind"], event["step"], event["slot"], event["witnesses"]) == ("unfit", STEP, SLOT, 1)
    assert not rank.committed(1), "once"


@pytest.mark.parametrize(
    ("asked", "owner", "step"), [(1, 2, STEP), (1, 0, STEP), (0, 0, STEP), (1, 1, STEP + 1)], ids=str
)
def test_nobody_is_named_by_a_commit_with_the_slot_of_somebody_else(asked, owner, step):
    rank = Rank(SEEN, SEEN)
    rank.weigh(asked=asked)
    assert not rank.committed(owner, step)


def test_a_bound_that_another_group_widened_is_widened_here_and_not_narrowed():
    rank = Rank()
    for factor in (40.0, 3.0):
        rank.witnesses.weigh(STEP, [], {1: Statement(allowed={(3, "wo.dx"): Allowance(factor)}).encode()})
        assert rank.checks.allowance == {(3, "wo.dx"): Allowance(40.0)}


def test_one_refusal_names_nobody():
    rank = Rank(SEEN)
    rank.weigh()
    assert not rank.committed(1)


def test_a_group_that_holds_the_slot_is_a_witness_if_it_has_looked_at_all_of_it():
    for said, named in (({1: ()}, True), ({}, False)):
        rank = Rank(SEEN, SEEN)
        rank.weigh(said, held=True)
        assert rank.committed(1) is named


def test_a_clean_look_at_a_part_is_not_told():
    rank = Rank()
    for whole in (False, True):
        rank.checks.begin(STEP, SLOT, whole=whole)
        assert not rank.checks.refused()
        assert Statement.decode(rank.witnesses.testify([SLOT])).seen == ({SLOT: ()} if whole else {})


def test_the_same_on_another_group_widens_the_bound_and_is_told_once():
    rank = Rank(SEEN, SEEN)
    for _ in range(3):
        rank.weigh({1: SEEN})
    assert rank.kinds == ["bound_suspect"]
    assert not rank.committed(1)


def test_where_all_refused_it_the_rank_leaves_for_what_only_it_saw():
    elsewhere = (Sighting(4, "wo.y", "moderate", 4.0, 20.0, True),)
    rank = Rank(SEEN, SEEN)
    rank.weigh({1: elsewhere})
    assert not rank.events
    with pytest.raises(SystemExit) as left:
        rank.weigh({1: elsewhere}, alone=True)
    assert left.value.code == UNFIT_EXIT
    assert rank.kinds == ["unfit"]


def test_a_rank_of_a_group_that_refused_the_slot_elsewhere_is_not_heard_too_early():
    """Its group computes the slot again: what it has kept would be lost if this rank left now."""
    rank = Rank(SEEN, SEEN)
    rank.weigh({1: ()})
    assert not rank.events


def test_what_cannot_be_read_is_no_statement(caplog):
    rank = Rank(SEEN, SEEN)
    rank.witnesses.weigh(STEP, [Doubt(SLOT, 1, held=False, alone=False)], {0: b"", 1: b"[{}", 2: b"\xff"})
    assert not rank.events
