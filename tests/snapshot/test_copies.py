"""The copier copies what was committed, and if it cannot, only the snapshot is lost and not the run."""

import os
import re
import threading
import time

import numpy as np
import pytest
import torch

from everstep.quorum.streams import Streams
from everstep.snapshot import copier
from everstep.snapshot.layout import State
from snapshot_cluster import Cluster, assert_is_step, slowed, wait_until


@pytest.mark.parametrize("parity", [0, 1])
def test_a_copy_that_is_not_what_was_hashed_is_found_and_is_no_anchor(monkeypatch, parity):
    """Else the next snapshot overwrites the only one that can be restored. Keepers find the damage."""
    with Cluster(2, parity=parity) as run:
        run.take(1, coded=False)
        plain = np.copyto

        def falsely(target, source):
            plain(target, source)
            target[0] ^= 1

        monkeypatch.setattr(np, "copyto", falsely)
        run.commit(2)
        run.wait()
        run.all_settled()
        assert not any(copier.status().coded for copier in run.copiers.values())
        run.commit(3)
        assert {copier.agreed.anchor for copier in run.copiers.values()} == {(1, 1, "")}
        run.wait()
        found = run.recover()
        assert found.restored is not None, found.decision
        assert_is_step(found.restored, 1)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"memory_reserve_gb": 1e6}, r"snapshots need \d+ bytes more, and there are 0 .*free"),
    ({"segment_dir": "/dev/shm/everstep-nowhere"}, r"everstep-nowhere.*snapshot.segment_dir"),
])  # fmt: skip
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
        path = run.segment(1).files("data", 0)[1]
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        began = time.monotonic()
        run.commit(3, settle=False)
        run.wait()
        assert time.monotonic() - began < 60
        run.kill_trainers()


def test_a_part_that_comes_from_a_device_is_staged_in_memory_that_need_not_be_page_locked(monkeypatch):
    """There is no such device here, so the state only claims to be on one, which is enough to take that path."""
    monkeypatch.setattr(State, "device", torch.device("meta"))
    monkeypatch.setattr(copier, "streams_of", lambda device: Streams())
    with Cluster(3) as run:
        run.take(1, 2)
        run.kill_trainers()
        run.lose_host(1)
        run.resumes("parity", 2)


def test_a_snapshot_that_is_published_while_its_group_speaks_is_not_given_up(monkeypatch):
    """Its outcome is not known yet, so the group must not say that it is settled and not coded."""
    with Cluster(1, parity=0) as run:
        run.take(1, coded=False)
        it, goes_on = run.copiers[0], threading.Event()
        publish, plain = it._take, copier.Copier.idle
        monkeypatch.setattr(it, "_take", lambda job: (goes_on.wait(), publish(job)))

        def is_idle(self: copier.Copier) -> bool:
            """Have the snapshot published just before the answer."""
            goes_on.set()
            wait_until(lambda: plain.fget(self))
            return plain.fget(self)

        with slowed(run, 0):
            run.commit(2)
            monkeypatch.setattr(copier.Copier, "idle", property(is_idle))
            assert not it.status().settled
        monkeypatch.setattr(copier.Copier, "idle", plain)
