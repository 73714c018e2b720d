"""What is left when something dies: real keepers, real segments, real deaths."""

import json
import os
import time
from datetime import timedelta

import pytest
import torch

from everstep.report.protection import Protection
from everstep.snapshot import peers, recovery
from everstep.snapshot.agreement import Agreed
from everstep.snapshot.layout import State
from everstep.snapshot.parity import Domains
from everstep.snapshot.restore import in_turn
from snapshot_cluster import Cluster, assert_is_step, slowed, wait_until


def line_of(run: Cluster) -> str:
    """What `everstep status` says of the run."""
    found = Protection()
    for group, kind, step, fields in run.events:
        found.take({"kind": kind, "group": group, "rank": 0, "step": step, **fields})
    return found.line()


def protected(run: Cluster) -> list[int]:
    """Steps that a group has said are protected."""
    return [step for group, kind, step, _ in run.events if (group, kind) == (0, "snapshot_protected")]


@pytest.mark.parametrize(
    ("groups", "per_host", "parity", "lost"),
    [(2, 1, 1, [0]), (3, 1, 2, [0, 1]), (4, 1, 2, [0, 1]), (6, 2, 1, [0]), (6, 3, 1, [0])],
)
def test_as_many_lost_hosts_as_there_is_parity_cost_nothing(groups, per_host, parity, lost):
    with Cluster(groups, per_host, parity=parity) as run:
        run.take(1, 2)
        headers = [run.segment(g).headers("data", 0)[1] for g in run.groups]
        assert max(h.part[1] - h.part[0] for h in headers) <= headers[0].state_bytes / groups + 64, "each copies a part"
        assert len({place.pid for place in peers.read_places(run.run_dir)}) == groups // per_host
        assert {f["exposed"] == [] for _, kind, _, f in run.events if kind == "snapshot_protected"} == {True}
        run.kill_trainers()
        for group in run.groups:
            run.resumes("memory", 2, group=group)
        for group in lost:
            run.lose_host(group)
        gone = tuple(group for group in run.groups if run.host_of(group) in lost)
        assert run.resumes("parity", 2, group=groups - 1).restored.decoded == gone


def test_one_host_more_than_parity_falls_to_disk_and_says_why():
    with Cluster(3) as run:
        run.take(7)
        run.lose_host(0)
        run.lose_host(2)
        decision = run.decide(disk_step=5)
        assert (decision.source, decision.step) == ("disk", 5)
        assert "no keeper has the part of groups 0, 2" in decision.reasons[0]
        assert "cannot be decoded" in decision.reasons[0]
        assert run.decide().source == "nothing"


def test_a_start_with_fewer_groups_long_after_the_death_of_everything_finds_all_of_it():
    """Keepers died too; the new ones adopt what lies on their hosts, and spare it however old it is."""
    with Cluster(4, per_host=2, keeper_ttl_s=1800.0) as run:
        run.take(1, 2)
        run.kill_trainers()
        for group in (0, 2):
            run.kill_keeper(group)
            path, then = run.segment(group).path, time.time() - 7200
            for file in [*path.iterdir(), path]:
                os.utime(file, (then, then))
        assert run.decide().source == "nothing"
        for group in (0, 2):  # 1 and 3 do not start again
            run.start_keeper(group)
        run.resumes("memory", 2)


def test_a_restored_state_is_coded_before_the_first_commit_and_the_old_snapshot_stays_until_then():
    with Cluster(3) as run:
        run.take(1, 2)
        run.kill_trainers()
        run.lose_host(0)
        found = run.resumes("parity", 2)
        run.start_keeper(0)
        with slowed(run, 2):  # the new code comes late: what was restored from is still enough
            run.restart(found)
            run.wait()
            assert {h.start for h in run.segment(1).headers("data", 0) if h and h.step == 2} == {"", "again"}
        run.all_settled()
        run.kill_trainers()
        run.lose_host(1)  # a second host, before any commit
        run.resumes("parity", 2)


def test_status_says_what_is_coded_and_how_old_it_is_and_that_is_what_a_lost_host_leaves():
    with Cluster(3, coding_timeout_s=60.0) as run:
        run.take(1, 2)
        run.commit(3)
        run.all_settled()
        with slowed(run, 2):
            for step in range(4, 9):
                run.commit(step, settle=False)
                run.wait()
                run.events.append((0, "commit", step, {}))
            assert line_of(run) == "protected: step 3, 5 steps old, survives any 1 of hosts " + " ".join(
                f"(group {group})" for group in run.groups
            )
            assert [kind for _, kind, step, _ in run.events if step == 5 and kind != "commit"] == [
                "snapshot_skipped"
            ] * 3
            run.kill_trainers()
        run.lose_host(1)
        assert run.recover().decision.step >= 3


@pytest.mark.parametrize(("groups", "duty"), [(4, (10_000.0, 0.05)), (3, (0.7, 0.02))], ids=["frozen", "slow"])
def test_a_member_that_does_not_keep_up_does_not_keep_the_others_without_snapshots(groups, duty):
    """It is named and left out, and none of those whose parts came late, or not, because it held up the questions."""
    with Cluster(groups, coding_timeout_s=1.0) as run:
        run.take(1)
        with slowed(run, 0, *duty):
            began, step = time.monotonic(), 1
            while len(protected(run)) < 3:
                step += 1
                run.commit(step, settle=False, apart_s=0.1)
                run.wait()
                assert time.monotonic() - began < 20, "one deadline, and room for a busy machine"
            run.kill_trainers()
        [why] = [f["reason"] for g, kind, _, f in run.events if (g, kind) == (0, "snapshot_unprotected")]
        assert "group 0 did not keep up" in why
        for group in (0, groups - 1):
            run.lose_host(group)
        assert run.recover(group=1).decision.step >= protected(run)[-1]


def test_what_cannot_be_survived_is_said():
    with Cluster(2, per_host=2) as run:
        run.take(1, 2, coded=False)
        run.commit(3)
        assert "survives all trainers, NOT the loss of (group 0) (group 1)" in line_of(run)


@pytest.mark.parametrize(
    ("hosts", "parity", "exposed"),
    [
        ([1, 1, 2, 2], 1, ()),
        ([1, 1, 1, 2], 1, (0, 1, 2)),
        ([1, 1, 1, 1], 2, (0, 1, 2, 3)),
        ([1, 1, 2, 2, 3, 3, 4, 4] * 8, 2, ()),
        ([0, 0, 0], 1, ()),
        ([5], 1, (0,)),
    ],
)
def test_at_most_parity_members_of_a_parity_group_are_on_one_host(hosts, parity, exposed):
    domains = Domains(tuple(range(len(hosts))), 8, parity, tuple(hosts))
    assert sorted(member for group in domains.groups for member in group) == list(domains.members)
    for group in domains.groups:
        assert all(sum(hosts[m] == host for m in group) <= parity for host in set(hosts) - {0})
    assert domains.exposed == exposed


def test_a_group_that_dies_in_its_copy_does_not_take_the_step_before_with_it():
    """Group 1 never publishes step 3; the survivors go on, and then everything dies."""
    with Cluster(3, parity=0) as run:
        run.take(1, 2, coded=False)
        words = {g: run.copiers[g].word() for g in (0, 1, 2)}  # before the vote, so the same in all
        for group in (0, 2):  # group 1 is dead before it copied anything of step 3
            state = run.tensors[group]
            run.copiers[group].committed(3, 1, [0, 1, 2], words, lambda state=state: State(state))
        run.wait()
        decision = run.decide()
        assert (decision.source, decision.step) == ("older", 2)
        assert "step 3" in decision.reasons[0]
        # Step 4 is committed without group 1: it must go over step 3, not over step 2.
        run.commit(4, members=[0, 2])
        run.wait()
        assert {h.step for h in run.segment(0).headers("data", 0) if h} == {2, 4}
        run.resumes("memory", 4)


def test_a_healed_group_does_not_overwrite_what_the_others_would_go_back_to():
    """Everything died after step 2. Group 0 restored it from memory, group 1 healed from group 0: in the first copy
    after that, step 2 must survive on both."""
    with Cluster(2, parity=0) as run:
        run.take(1, 2, coded=False)
        for group in run.groups:
            run.copiers[group].close()
            run.start_copier(group)
        run.copiers[0].agreed = Agreed(anchor=(2, 1, ""))
        run.copiers[1].agreed = Agreed.from_json(json.loads(json.dumps(run.copiers[0].agreed.to_json())))
        for step in (3, 4):
            run.commit(step, history=2)
            run.wait()
            held = [{h.step for h in run.segment(g).headers("data", 0) if h} for g in run.groups]
            assert held == [{step - 1, step}] * 2


def test_a_member_that_is_gone_makes_the_next_snapshot_due_at_once():
    with Cluster(3, interval=5) as run:
        run.take(1, coded=False)
        for step in range(2, 8):
            run.commit(step)
        run.wait()
        wait_until(lambda: {h.step for h in run.segment(0).headers("data", 0) if h} == {1, 5})
        run.copiers.pop(2).close()
        run.commit(8, members=[0, 1])
        wait_until(lambda: {h.step for h in run.segment(0).headers("data", 0) if h} == {5, 8})


def test_a_keeper_that_is_gone_is_asked_as_often_as_there_is_time_and_named(monkeypatch, tmp_path):
    gone = peers.Place(0, "lost", "lost:1", 2, "segment", 0.0)
    monkeypatch.setattr(peers, "read_places", lambda run_dir: [gone])
    monkeypatch.setattr(peers, "reachable", lambda places, token, limit: ({}, dict.fromkeys(places, "refused")))
    monkeypatch.setattr(recovery.time, "sleep", lambda seconds: None)
    found = recovery.look(tmp_path, b"token", timedelta(seconds=30), timedelta(seconds=0.1))
    assert "the keeper of group 0 on lost does not answer: refused" in found.reasons


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("param/w", (300, 258), "param/w is float32 (300, 258) here and was float32 (300, 257)"),
        ("param/new.w", (3,), "the saved shards of param/new.w make up 0 elements of 3"),
    ],
)
def test_another_model_goes_to_disk_with_the_reason(name, shape, reason):
    with Cluster(2) as run:
        run.take(2)
        run.tensors[0] = {**run.tensors[0], name: torch.zeros(shape)}
        found = run.recover(disk_step=1)
        assert found.decision.source == "disk"
        assert reason in found.decision.reasons[0]


def test_groups_that_restore_together_begin_with_different_keepers():
    orders = [in_turn(range(32), group) for group in range(32)]
    assert all(len({order[place] for order in orders}) == 32 for place in range(32))


def test_damage_that_a_keeper_finds_is_never_coded_nor_restored():
    with Cluster(2, coding_timeout_s=0.5) as run:
        run.take(1)
        run.kill_keeper(1)
        run.commit(2, settle=False)
        run.wait()
        run.damage(1, step=2, at=100)
        run.start_keeper(1)
        wait_until(lambda: "chunks [0] do not match" in run.segment(1).read_notes(0).reason)
        wait_until(lambda: "the part of group 1" in run.segment(0).read_notes(0).reason)
        assert {h.step for g in run.groups for h in run.segment(g).headers("parity", 0) if h} == {1}
        assert_is_step(run.recover().restored, 1)
