"""The copier: what it copies is what was committed, and what it cannot do costs a snapshot and not the run."""

import contextlib
import json
import os
import re
import threading
import time

import numpy as np
import pytest
import torch
import xxhash

from everstep.quorum.streams import Streams
from everstep.snapshot import buffer, copier, layout
from everstep.snapshot.buffer import SnapshotError, cgroup_free_bytes
from everstep.snapshot.header import Header
from everstep.snapshot.layout import State
from everstep.snapshot.parity import Domains
from snapshot_cluster import Cluster, assert_is_step, file_of


def test_a_buffer_that_the_next_forward_changes_is_restored_as_it_was():
    with Cluster(1, parity=0) as run:
        mine = {"param/w": torch.zeros(1 << 20), "buffer/0.bn.running_mean": torch.full((1 << 18,), 1.0)}
        for step in (1, 2):
            run.copiers[0].wait()
            run.all_settled()
            for tensor in mine.values():
                tensor.fill_(step)
            run.copiers[0].committed(step, 1, [0], {0: run.copiers[0].word()}, lambda: State(mine, {"step": 0}))
            for _ in range(20):
                mine["buffer/0.bn.running_mean"].add_(1e-3)
        run.wait()
        run.tensors = {0: mine}
        restored = run.recover().restored
        views = restored.layout.views(torch.from_numpy(restored.flat))
        assert [view.unique().tolist() for view in views.values()] == [[2.0], [2.0]]


def test_a_copy_that_is_not_what_was_hashed_is_found_and_is_no_anchor(monkeypatch):
    """Else the next snapshot would be written over the only one that can be restored."""
    with Cluster(2, parity=0) as run:
        run.take(1, coded=False)
        plain = np.copyto

        def falsely(target, source):
            plain(target, source)
            target[0] ^= 1

        monkeypatch.setattr(np, "copyto", falsely)
        run.commit(2)
        run.wait()
        run.all_settled()
        assert not any(copier.word().coded for copier in run.copiers.values())
        run.commit(3)
        assert {copier.agreed.anchor for copier in run.copiers.values()} == {(1, 1, "")}
        run.wait()
        assert_is_step(run.recover().restored, 1)


def test_no_sequence_number_comes_twice_though_a_publication_was_broken_off():
    """The keeper goes by it: a snapshot with a number that it has dealt with would never be verified."""
    with Cluster(1, parity=0) as run:
        run.take(1, 2, coded=False)
        seen = max(h.sequence for h in run.segment(0).headers("data", 0) if h)
        run.copiers.pop(0).close()
        with file_of(run.segment(0), "data", 2).open("r+b") as file:
            file.write(bytes(20))
        run.start_copier(0)
        run.commit(3)
        run.wait()
        assert max(h.sequence for h in run.segment(0).headers("data", 0) if h) > seen


def test_an_error_of_any_kind_in_the_copier_costs_a_snapshot_and_not_the_run(monkeypatch):
    with Cluster(1) as run:
        run.commit(1)
        run.wait()

        def none_left(*_, **__):
            raise MemoryError

        with monkeypatch.context() as short:
            short.setattr("everstep.snapshot.copier.pack_own", none_left)
            run.commit(2)
            run.wait()
        failed = [(step, fields["reason"]) for _, kind, step, fields in run.events if kind == "snapshot_failed"]
        assert failed == [(2, "MemoryError")]
        run.commit(3)
        run.copiers.pop(0).close()  # which waits for the copy
        assert {h.step for h in run.segment(0).headers("data", 0) if h} == {1, 3}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"memory_reserve_gb": 1e6}, r"snapshots need \d+ bytes more, and there are 0 .*free"),
        ({"segment_dir": "/dev/shm/everstep-nowhere"}, r"everstep-nowhere.*snapshot.segment_dir"),
    ],
)
def test_without_room_or_permission_the_snapshot_fails_and_the_one_before_stays(changes, reason):
    with Cluster(1) as run:
        run.take(1, coded=False)
        run.copiers.pop(0).close()
        run.start_copier(0, **changes)
        run.commit(2, scale=9)
        run.wait()
        [(step, fields)] = [each for _, kind, *each in run.events if kind == "snapshot_failed"]
        assert step == 2
        assert re.search(reason, fields["reason"])
        assert_is_step(run.restore(run.decide()), 1)


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


def test_a_part_that_comes_from_a_device_is_staged_in_memory_that_need_not_be_page_locked(monkeypatch):
    """No device is here that locks pages: a state that says it is on one takes that path."""
    monkeypatch.setattr(State, "device", torch.device("meta"))
    monkeypatch.setattr(copier, "streams_of", lambda device: Streams())
    with Cluster(3) as run:
        run.take(1, 2)
        run.kill_trainers()
        run.lose_host(1)
        run.resumes("parity", 2)


def test_no_byte_is_hashed_in_the_trainers_own_thread(monkeypatch):
    """So no digest stands between a step and its vote, whatever the size of a part and wherever it comes from."""
    hashing: set[str] = set()

    def noted(plain):
        def hashes(*data):
            hashing.add(threading.current_thread().name)
            return plain(*data)

        return hashes

    monkeypatch.setattr(xxhash, "xxh3_64", noted(xxhash.xxh3_64))
    monkeypatch.setattr(layout, "chunk_digests", noted(layout.chunk_digests))
    with Cluster(1, parity=0) as run:
        run.take(1, 2, coded=False)
        assert hashing == {"snapshot-copier"}


def test_a_header_of_thousands_of_groups_is_small_and_comes_back():
    members = tuple(group for group in range(13_000) if group % 1000)
    mine = Domains(members, 8, 2, (0,) * len(members)).group_of(1)
    header = Header(
        run="0" * 16, kind="data", group=1, rank=0, ranks=8, step=1, history=1, members=members, parity=2,
        parity_group=mine, topology="t", state_bytes=64, part=(0, 0), sequence=1,
        last_section=0,
    )  # fmt: skip
    text = json.dumps(header.to_json())
    assert len(text) < 2000
    assert Header.from_json(json.loads(text)) == header


def test_the_limit_of_a_control_group_of_version_1_counts(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("12:cpu,cpuacct:/x\n5:memory:/slurm/job\n0::/unrelated\n")
    for name, limit, used, cache, shmem in (
        ("memory", (1 << 63) - 4096, 5, 0, 0),
        ("memory/slurm", 9 << 30, 1 << 30, 0, 0),
        ("memory/slurm/job", 700 << 20, 300 << 20, 150 << 20, 50 << 20),
    ):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "memory.limit_in_bytes").write_text(str(limit))
        (tmp_path / name / "memory.usage_in_bytes").write_text(str(used))
        (tmp_path / name / "memory.stat").write_text(f"cache 1\ntotal_cache {cache}\ntotal_shmem {shmem}\n")
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
