"""What snapshots promise, each where it was broken once: what is protected, what survives, and who is waited for."""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from everstep.report.protection import Protection
from everstep.run.token import own_token
from everstep.snapshot import copier, keepers, layout, peers
from everstep.snapshot.layout import State
from everstep.snapshot.parity import Domains
from everstep.snapshot.restore import PARALLEL, in_turn
from everstep.step.streams import HostStreams
from snapshot_cluster import TIMEOUT, Cluster, wait_until


def line_of(run: Cluster) -> str:
    """What `everstep status` says of the run."""
    found = Protection()
    for group, kind, step, fields in run.events:
        found.take({"kind": kind, "group": group, "rank": 0, "step": step, **fields})
    return found.line()


def protected(run: Cluster) -> list[int]:
    """Steps that a group has said are protected."""
    return [step for group, kind, step, _ in run.events if (group, kind) == (0, "snapshot_protected")]


@contextlib.contextmanager
def slowed(run: Cluster, group: int, stopped_s: float = 10_000.0, running_s: float = 0.05):
    """The group's keeper stands still, most of the time or all of it."""
    pid = next(place.pid for place in peers.read_places(run.run_dir) if place.group == group)
    over = threading.Event()

    def duty() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(stopped_s)
            os.kill(pid, signal.SIGCONT)
            over.wait(running_s)

    thread = threading.Thread(target=duty)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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


def test_what_is_left_where_one_member_is_frozen_is_coded_without_it_and_it_is_named():
    with Cluster(4, parity=2, coding_timeout_s=1.0) as run:
        run.take(1)
        with slowed(run, 3):
            began, step = time.monotonic(), 1
            while len(protected(run)) < 3:
                step += 1
                run.commit(step, settle=False)
                run.wait()
                time.sleep(0.02)
            assert time.monotonic() - began < 15, "one deadline, and room for a busy machine"
            [why] = [f["reason"] for g, kind, _, f in run.events if (g, kind) == (0, "snapshot_unprotected")]
            assert "group 3 did not keep up" in why
            run.kill_trainers()
        coded = protected(run)[-1]
        for group in (0, 3):
            run.lose_host(group)
        assert run.recover(group=1).decision.step >= coded


def test_one_slow_keeper_does_not_keep_the_others_without_snapshots():
    with Cluster(3, coding_timeout_s=1.0) as run:
        run.take(1)
        with slowed(run, 2, 0.7, 0.02):
            began, step = time.monotonic(), 1
            while len(protected(run)) < 6:
                step += 1
                run.commit(step, settle=False, scale=20)
                run.wait()
                time.sleep(0.05)
                assert time.monotonic() - began < 20


@pytest.mark.parametrize(("groups", "per_host"), [(4, 2), (6, 2), (6, 3)])
def test_a_host_with_several_groups_is_survived(groups, per_host):
    with Cluster(groups, per_host) as run:
        run.take(1, 2)
        assert len({place.pid for place in peers.read_places(run.run_dir)}) == groups // per_host
        assert {f["exposed"] == [] for _, kind, _, f in run.events if kind == "snapshot_protected"} == {True}
        run.kill_trainers()
        run.lose_host(0)
        assert run.resumes("parity", 2, group=groups - 1).restored.decoded == tuple(range(per_host))


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


def test_a_start_with_fewer_groups_finds_what_the_others_left_on_its_hosts():
    with Cluster(4, per_host=2) as run:
        run.take(1, 2)
        run.kill_trainers()
        for group in (0, 2):
            run.kill_keeper(group)
        for group in (0, 2):  # 1 and 3 do not start again
            run.start_keeper(group)
        run.resumes("memory", 2)


def test_a_start_long_after_the_death_of_everything_spares_its_own_snapshots():
    with Cluster(2, keeper_ttl_s=1800.0) as run:
        run.take(1, 2)
        run.kill_trainers()
        for group in run.groups:
            run.kill_keeper(group)
        then = time.time() - 7200
        for group in run.groups:
            path = run.segment(group).path
            for file in [*path.iterdir(), path]:
                os.utime(file, (then, then))
        for group in run.groups:
            run.start_keeper(group)
        run.resumes("memory", 2)


def test_a_pipe_where_a_buffer_belongs_does_not_hold_up_a_trainer():
    with Cluster(2) as run:
        run.take(1, 2)
        path = run.segment(1).file("data", 0, 1)
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        began = time.monotonic()
        run.commit(3, settle=False)
        run.wait()
        assert time.monotonic() - began < 10
        run.kill_trainers()


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


def test_a_part_that_comes_from_a_device_is_staged_in_memory_that_need_not_be_page_locked(monkeypatch):
    """No device is here that locks pages: a state that says it is on one takes that path."""
    monkeypatch.setattr(State, "device", torch.device("meta"))
    monkeypatch.setattr(copier, "streams_of", lambda device: HostStreams())
    with Cluster(3) as run:
        run.take(1, 2)
        run.kill_trainers()
        run.lose_host(1)
        run.resumes("parity", 2)


def test_a_copied_run_directory_is_another_run(tmp_path):
    token = own_token(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    other = own_token(tmp_path / "two")
    assert other != token
    assert (own_token(tmp_path / "one"), own_token(tmp_path / "two")) == (token, other)
    (tmp_path / "one").rename(tmp_path / "moved")
    assert own_token(tmp_path / "moved") == token, "it is the same run in another place"


def test_a_copy_of_a_run_has_keepers_and_snapshots_of_its_own():
    with Cluster(2) as run:
        own_token(run.run_dir)  # as `everstep run` does
        run.take(1, 2)
        copy = run.home / "copy"
        shutil.copytree(run.run_dir, copy)
        own_token(copy)
        assert peers.read_places(copy) == []
        place = keepers.start_keeper(copy, 0, "127.0.0.1", run.settings_of(0))
        assert place.segment != str(run.segment(0).path)
        held, _ = peers.reachable([place], run.token, TIMEOUT)
        assert not held, "it does not know the original's token"
        assert keepers.end_keepers(copy) == []
        wait_until(lambda: not Path(place.segment).exists())
        run.kill_trainers()
        run.resumes("memory", 2)


def longest_restore(groups: int, order, parallel: int = PARALLEL) -> float:
    """When the last of the groups has all other groups' parts, all of which start at once: in units of the time that a
    network card takes to receive or send one part. Each divides what it can among the transfers that it has."""
    left = [[other for other in order(range(groups), group) if other != group] for group in range(groups)]
    active: dict[tuple[int, int], float] = {}

    def begin(group: int) -> None:
        while left[group] and sum(of == group for of, _ in active) < parallel:
            active[group, left[group].pop(0)] = 1.0

    for group in range(groups):
        begin(group)
    now = 0.0
    while active:
        receiving = Counter(group for group, _ in active)
        sending = Counter(holder for _, holder in active)
        rate = {edge: min(1 / receiving[edge[0]], 1 / sending[edge[1]]) for edge in active}
        step = min(active[edge] / rate[edge] for edge in active)
        now += step
        active = {edge: rest for edge in active if (rest := active[edge] - rate[edge] * step) > 1e-9}
        for group in range(groups):
            begin(group)
    return now


def test_groups_that_restore_together_do_not_queue_for_the_same_keepers():
    """A group needs 31 parts of others: no order takes less than 31 units."""
    assert longest_restore(32, in_turn) <= 1.2 * 31
    assert longest_restore(16, lambda groups, first: sorted(groups)) > 1.5 * 15, "which the model can tell"


def test_no_byte_is_hashed_in_the_trainers_own_thread(monkeypatch):
    """So no digest stands between a step and its vote, whatever the size of a part and wherever it comes from."""
    hashing: set[str] = set()

    def noted(plain):
        def hashes(*data):
            hashing.add(threading.current_thread().name)
            return plain(*data)

        return hashes

    monkeypatch.setattr(layout, "xxhash", SimpleNamespace(xxh3_64=noted(layout.xxhash.xxh3_64)))
    monkeypatch.setattr(layout, "chunk_digests", noted(layout.chunk_digests))
    with Cluster(1, parity=0) as run:
        run.take(1, 2, coded=False)
        assert hashing == {"snapshot-copier"}
