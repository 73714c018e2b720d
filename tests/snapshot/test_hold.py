"""A step that is being written to disk stays in memory until it has been read."""

import time

import pytest

from everstep import wire
from everstep.snapshot import copier, peers
from everstep.snapshot.peers import Held, wanted
from snapshot_cluster import TIMEOUT, Cluster, assert_is_step, wait_until


def steps_of(run: Cluster) -> list[set[int]]:
    return [{h.step for h in run.segment(g).headers("data", 0) if h} for g in run.groups]


def buffers_of(run: Cluster, step: int) -> list[Held]:
    return [held for held in run.held() if (held.header.kind, held.header.step) == ("data", step)]


def test_a_held_step_stays_while_training_goes_on_and_is_given_up_afterwards():
    with Cluster(2, parity=0) as run:
        run.commit(1)
        run.wait()
        decision = run.decide()
        with peers.Hold(buffers_of(run, 1), run.token, TIMEOUT):
            for step in (2, 3, 4):
                run.commit(step)
            run.wait()
            assert steps_of(run) == [{1, 2}, {1, 2}]
            assert_is_step(run.restore(decision), 1)
            skipped = [(step, fields["reason"]) for _, kind, step, fields in run.events if kind == "snapshot_skipped"]
            assert {step for step, _ in skipped} == {3, 4}
            assert all("is being read in group" in reason for _, reason in skipped)
        wait_until(lambda: all(run.segment(g).read_notes(0).holding == -1 for g in run.groups))
        run.commit(5)
        run.wait()
        assert steps_of(run) == [{2, 5}, {2, 5}]


def test_a_hold_ends_with_who_has_it():
    with Cluster(1) as run:
        run.commit(1)
        run.wait()
        [held] = buffers_of(run, 1)
        channel = wire.connect(held.address, run.token, TIMEOUT)
        channel.ask({"op": "hold", **wanted("data", 0, 0, held.header.identity)})
        assert run.segment(0).read_notes(0).holding != -1
        channel.close()
        wait_until(lambda: run.segment(0).read_notes(0).holding == -1)


def test_a_step_that_is_gone_cannot_be_held():
    with Cluster(1) as run:
        run.commit(1)
        run.wait()
        gone = buffers_of(run, 1)
        for step in (2, 3):
            run.commit(step)
            run.wait()
        with (
            pytest.raises(wire.RefusedError, match="step 1 of rank 0 is not held here"),
            peers.Hold(gone, run.token, TIMEOUT),
        ):
            pass


def keep(run: Cluster, step: int) -> None:
    """A commit of which a checkpoint is to be written."""
    run.commit(step, keep=True)


def test_a_step_to_be_written_is_taken_whatever_the_interval_and_waits_for_its_reader():
    with Cluster(2, parity=0, interval=2) as run:
        run.commit(2)
        keep(run, 3)
        run.commit(4)
        run.commit(6)
        run.wait()
        assert steps_of(run) == [{3, 4}, {3, 4}], "it waits for its reader"
        assert run.decide().step == 4
        with peers.Hold(buffers_of(run, 3), run.token, TIMEOUT):
            pass
        wait_until(lambda: all(run.segment(g).read_notes(0).holding == -1 for g in run.groups))
        run.commit(8)
        run.wait()
        assert steps_of(run) == [{4, 8}, {4, 8}], "and no longer"


def test_a_reader_that_does_not_come_is_not_waited_for_for_long(monkeypatch):
    monkeypatch.setattr(copier, "KEEP_S", 0.2)
    with Cluster(1) as run:
        keep(run, 1)
        run.commit(2)
        run.wait()
        time.sleep(0.3)
        run.commit(3)
        run.wait()
        assert steps_of(run) == [{2, 3}]
