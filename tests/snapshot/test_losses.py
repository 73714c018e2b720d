"""What can be restored after processes and hosts die: real keepers, real segments, real deaths."""

import itertools
import os
import signal
import threading
import time

import pytest

from chain import Chain
from everstep.report.protection import Protection
from everstep.snapshot import peers
from everstep.snapshot.parity import Domains
from everstep.snapshot.restore import nearest_first
from snapshot_cluster import Cluster, slowed, wait_until


def protected(run: Cluster) -> list[int]:
    """Return the steps that group 0 has reported as protected."""
    return [step for group, kind, step, _ in run.events if (group, kind) == (0, "snapshot_protected")]


@pytest.mark.parametrize(("groups", "per_host", "parity", "lost"), [(2, 1, 1, [0]), (3, 1, 2, [0, 1]), (6, 2, 1, [0])])
def test_as_many_lost_hosts_as_there_is_parity_cost_nothing(groups, per_host, parity, lost):
    with Cluster(groups, per_host, parity=parity) as run:
        run.take(1, 2)
        headers = [run.segment(g).headers("data", 0)[1] for g in run.groups]
        assert max(h.part[1] - h.part[0] for h in headers) <= headers[0].state_bytes / groups + 64, "each copies a part"
        assert len({place.pid for place in peers.read_records(run.run_dir)}) == groups // per_host
        assert {f["exposed"] == [] for _, kind, _, f in run.events if kind == "snapshot_protected"} == {True}
        run.kill_trainers()
        for group in run.groups:
            run.resumes("memory", 2, group=group)
        for group in lost:
            run.lose_host(group)
        gone = tuple(group for group in run.groups if run.host_of(group) in lost)
        assert run.resumes("parity", 2, group=groups - 1).restored.decoded == gone


def test_a_start_with_fewer_groups_long_after_the_death_of_everything_finds_all_of_it():
    """The keepers died too. New ones adopt what is on their hosts, and do not remove it however old it is. That a group
    was once on another's host must not hide that host's new keeper, even if its clock was fast."""
    with Cluster(4, per_host=2, keeper_ttl_s=1800.0) as run:
        run.take(1, 2)
        killed = peers.read_records(run.run_dir, 2)[0]
        run.kill_trainers()
        for group in (0, 2):
            run.kill_keeper(group)
            path, then = run.segment(group).path, time.time() - 7200
            for file in [*path.iterdir(), path]:
                os.utime(file, (then, then))
        assert run.decide().source == "nothing"
        for group in (0, 2):  # 1 and 3 do not start again
            run.start_keeper(group)
        late = vars(killed) | {"group": 1, "started_at": time.time() + 9}
        peers.write_record(run.run_dir, peers.KeeperRecord(**late))
        run.resumes("memory", 2)


def test_what_a_group_that_left_holds_stays_until_the_others_hold_newer_snapshots(monkeypatch):
    with Cluster(4, per_host=2, keeper_ttl_s=10.0) as run:
        place, it, now = run.start_keeper(1), run.segment(1), time.time_ns
        run.take(1, 2)
        it.beside(7).claim(0)  # of a group that died here
        run.copiers.pop(1).close()
        it.leave(0)
        run.start_keeper(1)
        assert not it.columns("left"), "it has come back"
        it.leave(0)
        for step in (3, 4):
            time.sleep(1.0)
            run.resumes("memory", step - 1)
            run.take(step, members=[0, 2, 3])
        wait_until(lambda: not list(it.path.glob("group-1.*")))
        wait_until(lambda: not [fd for fd in os.scandir(f"/proc/{place.pid}/fd") if "group-1." in os.readlink(fd)])
        run.start_copier(1)
        run.copiers[1].agreed = run.copiers[0].agreed
        monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)  # the clock was set back meanwhile
        run.take(5, 6)
        run.kill_trainers()
        for group in run.groups:
            run.segment(group).leave(0)
        time.sleep(1.0)
        run.resumes("memory", 6)
        wait_until(lambda: not it.path.exists())


def test_a_restored_state_is_coded_before_the_first_commit_and_the_old_snapshot_stays_until_then():
    with Cluster(3) as run:
        run.take(1, 2)
        run.kill_trainers()
        run.lose_host(0)
        found = run.resumes("parity", 2)
        run.start_keeper(0)
        with slowed(run, 2):  # the new parity comes late, so the restored snapshot must stay
            run.restart(found)
            run.wait()
            assert {h.start for h in run.segment(1).headers("data", 0) if h and h.step == 2} == {"", "again"}
        run.all_settled()
        run.kill_trainers()
        run.lose_host(1)  # a second host, before any commit
        run.resumes("parity", 2)


def test_a_coded_snapshot_outlives_the_restore_of_a_newer_one_that_was_given_up():
    with Cluster(3, coding_timeout_s=1.0) as run:
        run.take(1, 2)
        with slowed(run, 0):
            run.commit(3, settle=False)
            run.wait()
            run.kill_trainers()
            for group in (1, 2):
                wait_until(lambda group=group: run.segment(group).read_notes(0).settled)
        found = run.resumes("memory", 3)
        with slowed(run, 0):  # so that nothing new is coded
            run.restart(found)
            run.wait()
            run.kill_trainers()
            run.lose_host(1)
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
            told, hosts = Protection(), " ".join(f"(group {group})" for group in run.groups)
            for group, kind, step, fields in run.events:
                told.take({"kind": kind, "group": group, "rank": 0, "step": step, **fields})
            assert told.line() == f"protected: step 3, 5 steps old, survives any 1 of hosts {hosts}"
            of_step = [kind for _, kind, step, _ in run.events if step == 5 and kind != "commit"]
            assert of_step == ["snapshot_skipped"] * 3
            run.kill_trainers()
        run.lose_host(1)
        assert run.recover().decision.step >= 3


@pytest.mark.parametrize(("groups", "duty"), [(4, (10_000.0, 0.05)), (3, (3.0, 0.02))], ids=["frozen", "slow"])
def test_a_member_that_does_not_keep_up_does_not_keep_the_others_without_snapshots(groups, duty):
    """The slow member is blamed and left out, not a member whose part came late or not at all because of it."""
    with Cluster(groups, coding_timeout_s=4.0) as run:
        run.take(1)
        with slowed(run, 0, *duty):
            began, step = time.monotonic(), 1
            while len(protected(run)) < 3:
                step += 1
                run.commit(step, settle=False, apart_s=0.1)
                run.wait()
                assert time.monotonic() - began < 60, "one deadline, and room for a busy machine"
            run.kill_trainers()
        [why] = [f["reason"] for g, kind, _, f in run.events if (g, kind) == (0, "snapshot_unprotected")]
        assert "group 0 did not keep up" in why
        assert "the keeper of group 0 did not take it up" in why or duty[0] < 10
        for group in (0, groups - 1):
            run.lose_host(group)
        assert run.recover(group=1).decision.step >= protected(run)[-1]


def test_all_parts_of_a_snapshot_on_a_host_share_one_deadline():
    with Cluster(4, per_host=2, coding_timeout_s=4.0) as run:
        run.take(1)
        with slowed(run, 2):
            began = time.monotonic()
            run.commit(2, settle=False, apart_s=0.5)
            run.wait()
            wait_until(lambda: all(run.copiers[group].status().settled for group in (0, 1)))
            assert time.monotonic() - began < 7


def test_a_member_that_is_slow_in_the_middle_of_its_part_does_not_break_the_others_connections():
    """The other members wait for it until the coding deadline, even if restores have a much shorter timeout."""
    with Cluster(3, coding_timeout_s=60.0, transfer_timeout_s=0.5) as run:
        run.take(1, scale=200)
        with slowed(run, 2, 1.0, 0.05):
            run.commit(2, scale=200)
            run.all_settled()
        run.settled(2)


def test_a_start_waits_for_keepers_that_stand_still_if_only_they_hold_what_was_protected():
    with Cluster(2, coding_timeout_s=1.0) as run:
        run.take(1, 2)
        run.copiers.pop(1).close()
        for step in (3, 4):
            run.commit(step, members=[0])
        assert protected(run)[-1] == 3
        run.kill_trainers()
        [pid] = [place.pid for place in peers.read_records(run.run_dir) if place.group == 0]
        os.kill(pid, signal.SIGSTOP)
        goes_on = threading.Timer(4.0, os.kill, (pid, signal.SIGCONT))
        goes_on.start()
        assert run.recover(group=1, patience_s=10).decision.step == 4
        goes_on.join()
        run.lose_host(0)
        assert run.recover(group=1).decision.step == 2


@pytest.mark.parametrize("parity", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("hosts", [
    [1, 2, 3, 4], [1, 1, 2, 2], [1, 1, 2, 2, 3, 3, 4, 4] * 2, [1, 1, 2], [1, 1, 1, 2], [1, 2, 2, 3, 3, 3], [5],
    [1, 1, 1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7],
])  # fmt: skip
def test_as_many_hosts_as_status_says_may_be_lost_and_not_one_more(hosts, size, parity):
    """No parity group has more members on one host than it has parity, except on exposed hosts."""
    domains = Domains(tuple(range(len(hosts))), size, parity, tuple(hosts))
    assert sorted(member for group in domains.groups for member in group) == list(domains.members)
    exposed = {hosts[member] for member in domains.exposed}
    for group in domains.groups:
        assert all(sum(hosts[m] == host for m in group) <= parity for host in set(hosts) - exposed)
    safe = set(hosts) - exposed

    def outlives(count: int) -> bool:
        return all(
            sum(hosts[member] in lost for member in group) <= domains.rows(group)
            for lost in itertools.combinations(safe, count)
            for group in domains.groups
        )

    assert domains.survives == max(count for count in range(len(safe) + 1) if outlives(count))
    if len(set(hosts)) == len(hosts):
        assert domains.survives == min(parity, len(hosts) - 1)


@pytest.mark.parametrize(("hosts", "parity", "exposed"), [
    ([1, 1, 2, 2], 1, ()), ([1, 1, 1, 2], 1, (0, 1, 2)), ([1, 1, 1, 1], 2, (0, 1, 2, 3)), ([0, 0, 0], 1, ()),
    ([1, 1, 2, 2, 3, 3, 4, 4] * 8, 2, ()), ([5], 1, (0,)),
])  # fmt: skip
def test_only_members_for_whom_there_are_too_few_hosts_are_exposed(hosts, parity, exposed):
    assert Domains(tuple(range(len(hosts))), 8, parity, tuple(hosts)).exposed == exposed


def test_groups_that_restore_together_begin_with_different_keepers():
    orders = [nearest_first(range(32), group) for group in range(32)]
    assert all(len({order[place] for order in orders}) == 32 for place in range(32))


@pytest.mark.parametrize(("seed", "deaths"), [
    (0, 5), *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in range(1, 11))])  # fmt: skip
@pytest.mark.timeout(3600)
def test_death_after_death_nothing_that_was_said_to_be_protected_is_lost(seed, deaths):
    chain = Chain(seed)
    chain.run(deaths)
    assert sum(chain.lost.values()) == deaths
