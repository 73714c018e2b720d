"""Where snapshots broke once: every reproduction of the faults that were shown, and what happens now."""

import contextlib
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from everstep.snapshot import buffer, keepers, parity, peers, restore
from everstep.snapshot.buffer import SnapshotError, cgroup_free_bytes
from everstep.snapshot.header import Header
from everstep.snapshot.layout import Layout, State
from everstep.snapshot.parity import Domains
from snapshot_cluster import TIMEOUT, Cluster, assert_is_step, file_of, in_keepers, is_zombie, wait_until


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory that is handed out full of what somebody else left in it."""
    plain = parity.aligned_bytes

    def poisoned(length: int) -> np.ndarray:
        array = plain(length)
        array[:] = 0xA5
        return array

    monkeypatch.setattr(parity, "aligned_bytes", poisoned)


@pytest.mark.parametrize("which", ["another group's", "parity", "swapped"])
def test_a_file_that_lies_where_another_belongs_is_never_restored(which):
    with Cluster(3) as run:
        run.take(1, 2, scale=2)
        segments = [run.segment(group) for group in run.groups]
        mine, theirs = (file_of(segments[g], "data", 2) for g in (0, 1))
        if which == "another group's":
            shutil.copy(theirs, mine)
        elif which == "parity":
            shutil.copy(file_of(segments[0], "parity", 2), mine)
        else:
            kept = mine.read_bytes()
            shutil.copy(theirs, mine)
            theirs.write_bytes(kept)
        for group in run.groups:
            found = run.recover(group=group)
            step = 1 if which == "swapped" else 2
            assert (found.decision.source, found.decision.step) == ("older" if which == "swapped" else "parity", step)
            assert_is_step(found.restored, step, scale=2)


def test_a_gap_between_parts_is_an_error_and_no_memory(monkeypatch):
    with Cluster(2, parity=0) as run:
        run.commit(1)
        run.wait()
        decision = run.decide()
        column = decision.columns[0]
        lone = {0: column.data[0]}
        broken = restore.Column(column.identity, lone, (), ())
        with pytest.raises(restore.RestoreError, match="are in no part"):
            restore.restore_rank(broken, 0, 0, run.token, TIMEOUT)


def test_a_buffer_that_the_next_forward_changes_is_restored_as_it_was():
    with Cluster(3) as run:
        tensors = {
            g: {"param/w": torch.zeros(1 << 20), "buffer/0.bn.running_mean": torch.full((1 << 18,), 1.0)}
            for g in run.groups
        }
        for step in (1, 2):
            for group in run.groups:
                run.copiers[group].wait()
            run.all_settled()
            words = {g: c.word() for g, c in run.copiers.items()}
            for group, mine in tensors.items():
                for tensor in mine.values():
                    tensor.fill_(step)
                run.copiers[group].committed(step, 1, run.groups, words, lambda mine=mine: State(mine, {"step": 0}))
            for _ in range(20):
                for mine in tensors.values():
                    mine["buffer/0.bn.running_mean"].add_(1e-3)
        run.wait()
        run.tensors = tensors
        restored = run.recover().restored
        views = Layout.from_json(restored.layout).views(torch.from_numpy(restored.flat))
        assert [view.unique().tolist() for view in views.values()] == [[2.0], [2.0]]


def test_a_tensor_that_is_changed_during_the_copy_is_found_and_never_restored(monkeypatch):
    with Cluster(1, parity=0) as run:
        run.commit(1)
        run.wait()
        plain, done = np.copyto, []

        def late(target, source):
            if not done:
                done.append(run.tensors[0]["param/w"].add_(1.0))
            plain(target, source)

        monkeypatch.setattr(np, "copyto", late)
        run.commit(2)
        run.wait()
        assert done
        assert_is_step(run.recover().restored, 1)


def frozen(run: Cluster, group: int) -> int:
    pid = next(place.pid for place in peers.read_places(run.run_dir) if place.group == group)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_what_a_watch_cannot_do_does_not_end_it(monkeypatch, tmp_path):
    in_keepers(monkeypatch, tmp_path, "import everstep.snapshot.parity as p\np.combine = lambda *a: 1 / 0")
    with Cluster(3, coding_timeout_s=2.0) as run:
        for step in (1, 2):
            run.commit(step)
            run.wait()
        wait_until(lambda: run.segment(0).read_notes(0).reason != "")
        assert "ZeroDivisionError" in run.segment(0).read_notes(0).reason
        reasons = [f["reason"] for g, kind, _, f in run.events if kind == "snapshot_unprotected" and g == 0]
        assert any("ZeroDivisionError" in reason for reason in reasons)
        # The watch lives: what comes next is verified as well.
        wait_until(lambda: {h.header.step for h in run.held() if h.header.group == 0 and h.sound} == {1, 2})


def test_a_header_of_thousands_of_groups_is_small_and_comes_back():
    members = tuple(group for group in range(13_000) if group % 1000)
    mine = Domains(members, 8, 2, (0,) * len(members)).group_of(1)
    header = Header(
        run="0" * 16, kind="data", group=1, rank=0, ranks=8, step=1, history=1, members=members, parity=2,
        parity_group=mine, topology="t", state_bytes=64, part=(0, 0), sequence=1, taken_at=1.0,
        sections={"part": (0, 0), "own": (0, 0), "layout": (0, 0)},
    )  # fmt: skip
    text = json.dumps(header.to_json())
    assert len(text) < 2000
    assert Header.from_json(json.loads(text)) == header


def test_mute_keepers_are_waited_for_together_and_not_one_after_the_other(tmp_path):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        places = [peers.Place(g, f"h{g}", address, 1, "", 1.0) for g in range(6)]
        began = time.monotonic()
        held, silent = peers.reachable(places, b"x" * 32, TIMEOUT, 1.0)
        assert (held, len(silent)) == ({}, 6)
        assert time.monotonic() - began < 3


def test_connections_and_files_of_a_keeper_stay_few_step_after_step():
    with Cluster(8) as run:
        pids = [place.pid for place in peers.read_places(run.run_dir)]
        for step in range(1, 13):
            run.take(step)
        # Standard streams, lock, bell, listener, parity files; of the connections of a coding none stays.
        wait_until(lambda: max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids) <= 13)


def test_a_keeper_without_descriptors_to_spare_goes_on_and_codes_again_when_it_has_some():
    with Cluster(3, coding_timeout_s=2.0) as run:
        run.take(1)
        pids = [place.pid for place in peers.read_places(run.run_dir)]
        before = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (4, before[0][1]))
        for step in (2, 3):  # nothing can be opened, not even a header
            run.commit(step, settle=False)
            run.wait()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert all(psutil.pid_exists(pid) and not is_zombie(pid) for pid in pids)
            time.sleep(0.1)
        log = (run.run_dir / "logs" / "keeper-0.log").read_text()
        assert "Too many open files" in log
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        run.all_settled()
        step = 4
        while not all(run.copiers[g].word().coded for g in run.groups):
            run.commit(step)
            run.wait()
            run.all_settled()
            step += 1
        run.lose_host(2)
        found = run.recover(group=1)
        assert found.decision.source == "parity"
        assert_is_step(found.restored, found.decision.step)


@pytest.mark.parametrize("parities", [0, 1, 2])
def test_memory_is_what_the_docs_say_it_is(parities):
    with Cluster(4, parity=parities) as run:
        run.take(1, 2, 3, 4, scale=40, coded=parities > 0)
        for group in run.groups:
            segment = run.segment(group)
            size = max(header.payload_bytes for header in segment.headers("data", 0) if header)
            taken = sum(path.stat().st_size for kind in ("data", "parity") for path in segment.files(kind, 0)
                        if path.exists())  # fmt: skip
            formula = 2 * size * (1 + parities / (4 - parities))
            assert formula < taken < formula + 4 * (1 << 20) + 4 * (200 << 10)  # a chunk and a header each


def test_keepers_of_a_run_whose_directory_is_deleted_end_and_leave_nothing(monkeypatch, tmp_path):
    code = """
        import threading, time
        def soon():
            main = sys.modules['__main__']
            while not hasattr(main, 'GONE_S'): time.sleep(0.01)
            main.GONE_S = 0.5
        threading.Thread(target=soon, daemon=True).start()
    """
    in_keepers(monkeypatch, tmp_path, code)
    with Cluster(2) as run:
        run.commit(1)
        run.wait()
        pids = [place.pid for place in peers.read_places(run.run_dir)]
        shutil.rmtree(run.run_dir)
        wait_until(lambda: all(not psutil.pid_exists(pid) or is_zombie(pid) for pid in pids), 60)
        assert not any(run.segment(group).path.exists() for group in run.groups)


def test_an_orderly_end_in_the_middle_of_coding_leaves_nothing():
    for trial in range(2):
        with Cluster(3) as run:
            run.commit(1, scale=60)
            run.wait()
            time.sleep(0.05 * trial)
            pids = [place.pid for place in peers.read_places(run.run_dir)]
            run.kill_trainers()
            assert keepers.end_keepers(run.run_dir) == []
            wait_until(lambda: all(not psutil.pid_exists(p) or is_zombie(p) for p in pids))  # noqa: B023
            assert not any(run.segment(g).path.exists() for g in run.groups)


def test_what_no_run_owns_is_swept_and_what_one_owns_is_not():
    with Cluster(2) as run, Cluster(1) as gone:
        run.commit(1)
        gone.commit(1)
        for site in (run, gone):
            site.kill_trainers()
        run.kill_keeper(1)
        gone.kill_keeper(0)
        mine = run.segment(1).path
        moved = mine.parent / gone.segment(0).path.name
        shutil.move(gone.segment(0).path, moved)
        shutil.rmtree(gone.run_dir)
        assert keepers.sweep(run.segment(0).path.parent) == [], "it has a keeper"
        said = keepers.sweep(mine.parent)
        assert len(said) == 2
        assert all(line.endswith("kept, its run may go on") for line in said), "a trainer has touched them just now"
        then = time.time() - 120
        for path in [*moved.iterdir(), moved]:
            os.utime(path, (then, then))
        said = keepers.sweep(mine.parent)
        assert any(f"{moved}: " in line and line.endswith("removed") for line in said)
        assert (moved.exists(), mine.exists()) == (False, True)
        keepers.sweep(mine.parent, spared_s=0.0)
        assert not mine.exists()
        assert run.segment(0).path.exists()
        assert run.decide().reasons, "and the living keeper still answers"


def test_the_next_keeper_on_the_host_removes_what_nobody_has_touched_for_long():
    with Cluster(1) as run, Cluster(1) as gone:
        gone.commit(1)
        gone.wait()
        gone.copiers.pop(0).close()
        gone.kill_keeper(0)
        moved = run.segment(0).path.parent / gone.segment(0).path.name
        shutil.move(gone.segment(0).path, moved)
        then = time.time() - 2 * run.settings.keeper_ttl_s
        for path in [*moved.iterdir(), moved]:
            os.utime(path, (then, then))
        run.kill_keeper(0)
        run.start_keeper(0)
        wait_until(lambda: not moved.exists())
        assert run.segment(0).path.exists()


def cgroup_v1(folder: Path, limit: int, used: int, cache: int, shmem: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    (folder / "memory.usage_in_bytes").write_text(str(used))
    (folder / "memory.stat").write_text(f"cache 1\ntotal_cache {cache}\ntotal_shmem {shmem}\n")


def test_the_limit_of_a_control_group_of_version_1_counts(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("12:cpu,cpuacct:/x\n5:memory:/slurm/job\n0::/unrelated\n")
    cgroup_v1(tmp_path / "memory", (1 << 63) - 4096, 5, 0, 0)
    cgroup_v1(tmp_path / "memory/slurm", 9 << 30, 1 << 30, 0, 0)
    cgroup_v1(tmp_path / "memory/slurm/job", 700 << 20, 300 << 20, 150 << 20, 50 << 20)
    assert cgroup_free_bytes(proc, tmp_path) == (700 - 300 + 100) << 20


def test_ranks_that_take_memory_at_the_same_moment_leave_the_reserve(tmp_path, monkeypatch):
    """What each has taken the others see before they take more."""
    taken, step = [0], 1 << 20
    monkeypatch.setattr(buffer, "STEP_BYTES", step)
    monkeypatch.setattr(buffer, "cgroup_free_bytes", lambda: 40 * step - taken[0])
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, at, size: taken.__setitem__(0, taken[0] + size))
    monkeypatch.setattr(os, "ftruncate", lambda fd, size: None)
    files = [(tmp_path / str(rank)).open("wb") for rank in range(3)]
    plain = buffer.check_room

    def beside_the_others(directory, needed, reserve) -> None:
        """One takes a step while another is at its own."""
        plain(directory, needed, reserve)
        if files:
            file = files.pop()
            with contextlib.suppress(SnapshotError):
                buffer.allocate(file.fileno(), tmp_path / "other", 20 * step, 8 * step)

    monkeypatch.setattr(buffer, "check_room", beside_the_others)
    with (tmp_path / "first").open("wb") as file, pytest.raises(SnapshotError, match="left under the memory limit"):
        buffer.allocate(file.fileno(), tmp_path / "first", 20 * step, 8 * step)
    assert taken[0] <= (40 - 8 + 3) * step
