"""Snapshots between two that are coded: they cost the keepers nothing, and what they are worth is what is said."""

import time

import pytest

from everstep.snapshot.agreement import Agreed, Word, learn
from snapshot_cluster import Cluster, assert_is_step, damage, wait_until

RARE = 1e-6
"""So small a share that a keeper rests for the rest of the test."""


def is_interim(run: Cluster, step: int) -> bool:
    found = [
        header.interim for group in run.groups for header in run.segment(group).headers("data", 0)
        if header and header.step == step
    ]  # fmt: skip
    assert len(set(found)) == 1, "all groups alike"
    return found[0]


def test_between_two_that_are_coded_the_newest_survives_its_trainers_and_the_coded_one_its_host():
    with Cluster(3, coding_share=RARE) as run:
        run.take(1)
        for step in range(2, 6):
            run.commit(step)
            run.wait()
            assert is_interim(run, step)
        assert [run.copiers[g].agreed.anchor for g in run.groups] == [(1, 1)] * 3
        decision = run.decide()
        assert (decision.source, decision.step) == ("memory", 5)
        for group in run.groups:
            assert_is_step(run.restore(decision, group), 5)
        run.lose_host(1)
        decision = run.decide()
        assert (decision.source, decision.step) == ("parity", 1)
        for group in run.groups:
            assert_is_step(run.restore(decision, group), 1)
        assert not [kind for _, kind, _, _ in run.events if kind == "snapshot_unprotected"]


def test_an_interim_snapshot_that_is_damaged_gives_way_to_the_coded_one():
    with Cluster(2, coding_share=RARE) as run:
        run.take(1)
        run.commit(2)
        run.wait()
        damage(run, 0, "data", step=2, at=100)
        found = run.recover()
        assert found.restored is not None
        assert found.decision.step == 1
        assert_is_step(found.restored, 1)


def test_a_keeper_that_has_rested_verifies_and_codes_again():
    with Cluster(2, coding_share=0.02) as run:
        run.take(1)
        run.commit(2)
        run.wait()
        assert is_interim(run, 2)
        rest_s = max(run.segment(g).read_notes(0).rests_until for g in run.groups) - time.monotonic()
        wait_until(lambda: all(copier.word().rested for copier in run.copiers.values()), rest_s + 5.0)
        run.take(3)
        assert not is_interim(run, 3)
        run.commit(4)
        assert {copier.agreed.anchor for copier in run.copiers.values()} == {(3, 1)}


def test_when_members_come_or_go_the_next_one_is_coded():
    with Cluster(3, coding_share=RARE) as run:
        run.take(1)
        run.commit(2)
        run.commit(3, members=[0, 2])
        run.wait()
        wait_until(lambda: all(run.segment(g).read_notes(0).coded for g in (0, 2)))
        for group in (0, 2):
            newest = max((h for h in run.segment(group).headers("data", 0) if h), key=lambda h: h.sequence)
            assert (newest.step, newest.interim, newest.members) == (3, False, (0, 2))


def test_while_a_group_heals_the_others_snapshots_are_whole_without_it():
    """It applies what they committed meanwhile afterwards, says nothing of having no room, and then takes part."""
    with Cluster(3, coding_share=RARE) as run:
        run.take(1)
        agreed = run.copiers[0].agreed
        for step in range(2, 8):
            run.commit(step, members=[0, 2])
            run.wait()
        decision = run.decide()
        assert (decision.source, decision.step) == ("memory", 7)
        run.copiers[1].agreed = agreed
        for step in range(2, 8):
            assert not run.copiers[1].committed(step, 1, [0, 2], {}, lambda: None)
        assert not [group for group, kind, *_ in run.events if group == 1 and kind == "snapshot_skipped"]
        run.commit(8)
        run.wait()
        assert run.decide().step == 8


def test_all_die_while_they_copy_and_the_newest_that_all_have_is_resumed(monkeypatch):
    """Not the coded one, which may be far behind."""

    def dies(*_):
        raise OSError("by the test")

    with Cluster(2, coding_share=RARE) as run:
        run.take(1)
        for step in range(2, 8):
            run.commit(step)
        run.wait()
        for buffer in run.copiers[1]._buffers:
            monkeypatch.setattr(buffer.writer, "publish", dies)
        for step in (8, 9, 10):
            run.commit(step)
            run.wait()
            run.copiers[1]._unable_until = 0.0  # as one that died says nothing of it
        decision = run.decide()
        assert (decision.source, decision.step) == ("older", 7)
        for group in run.groups:
            assert_is_step(run.restore(decision, group), 7)


@pytest.mark.parametrize("weary", [0, 1, 2])
def test_one_keeper_that_rests_is_enough(weary):
    words = {group: Word(published=True, coded=True, rested=group != weary) for group in range(3)}
    agreed = Agreed(anchor=(1, 1), coders=(0, 1, 2)).take(2, 7, (0, 1, 2), words)
    assert agreed.taken is not None
    assert agreed.taken.interim
    assert Agreed.from_json(agreed.to_json()) == agreed
    after, why_not = learn(agreed, words)
    assert (after.anchor, why_not) == ((1, 1), ""), "it is what the next one overwrites"
    assert not Agreed().take(1, 7, (0, 1, 2), words).taken.interim, "without any that is coded"
