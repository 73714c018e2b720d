"""What rots in a keeper's memory after it was verified is made anew out of parity, and the run says so."""

import contextlib
import os
import re
import signal
import time

import pytest

from everstep.run.events import read_events
from everstep.snapshot.board import Channels
from everstep.snapshot.buffer import HEADER_BYTES, BufferReader, BufferWriter, SnapshotError, chunk_digests
from everstep.snapshot.repair import RepairError, _exchange, repair
from everstep.snapshot.segment import Segment
from snapshot.test_faults import frozen
from snapshot.test_publication import header_of
from snapshot_cluster import TIMEOUT, Cluster, assert_is_step, file_of, wait_until

SCALE = 8
"""Of the state: parts of several MiB in their checksums' chunks, in 3 groups."""


def rot(run: Cluster, group: int, step: int, *places: float) -> tuple:
    """Flip a bit of a part at each of these places, from 0, its first byte, to 1, its table's last. Returns the file,
    and the payload and table that were in it."""
    segment = run.segment(group)
    path = file_of(segment, "data", step)
    whole = path.read_bytes()
    reader = BufferReader(path)
    header = reader.header()
    chunks = len(reader.table(header))
    last = header.payload_bytes + 8 * chunks - 1
    with path.open("r+b") as file:
        for place in places:
            at = HEADER_BYTES + round(place * last)
            file.seek(at)
            file.write(bytes([whole[at] ^ 8]))
    return path, whole[HEADER_BYTES : HEADER_BYTES + last + 1]


def is_whole(path, payload: bytes) -> bool:
    """The file holds that payload and its table again."""
    body = path.read_bytes()
    reader = BufferReader(path)
    return body[HEADER_BYTES : HEADER_BYTES + len(payload)] == payload and reader.damage(reader.header()) is None


@pytest.mark.parametrize("places", [(0.3,), (0.0, 0.5, 0.9), (1.0,)], ids=["one chunk", "everywhere", "the table"])
def test_a_part_that_rots_is_made_anew_and_training_goes_on_with_it(scrubbing, places):
    with Cluster(3) as run:
        run.take(1, 2, scale=SCALE)
        mine = {name: tensor.clone() for name, tensor in run.tensors[0].items()}
        path, whole = rot(run, 0, 2, *places)
        wait_until(lambda: (0, 0, 2) in run.told("snapshot_repaired"))
        assert is_whole(path, whole)
        assert run.told("snapshot_damaged") == []
        assert not (path.parent / "rank-0.rebuilt").exists()
        assert all(tensor.equal(mine[name]) for name, tensor in run.tensors[0].items())
        run.lose_host(1)
        run.resumes("parity", 2, group=2, scale=SCALE)


def test_what_the_trainer_publishes_after_an_exchange_is_what_is_restored(scrubbing):
    """Its mapping is of the file that was exchanged, and large enough."""
    with Cluster(3) as run:
        run.take(32, 33, scale=SCALE)
        for step in (32, 33):
            rot(run, 0, step, 0.4)
        wait_until(lambda: {(0, 0, 32), (0, 0, 33)} <= set(run.told("snapshot_repaired")))
        large = [h.payload_bytes for h in run.segment(0).headers("data", 0) if h]
        run.take(34, 35, scale=SCALE)
        held = [h for h in run.segment(0).headers("data", 0) if h]
        assert {header.step for header in held} == {34, 35}
        assert all(header.payload_bytes <= before for header, before in zip(held, large, strict=True))
        run.resumes("memory", 35, group=1, scale=SCALE)


def test_two_parts_that_rot_at_once_are_made_anew_with_two_rows_of_parity(scrubbing):
    with Cluster(4, parity=2) as run:
        run.take(1, scale=SCALE)
        kept = [rot(run, group, 1, 0.2) for group in (0, 2)]
        wait_until(lambda: set(run.told("snapshot_repaired")) == {(0, 0, 1), (2, 0, 1)})
        assert all(is_whole(path, whole) for path, whole in kept)


def test_what_parity_cannot_give_back_stays_as_it_is_and_the_run_says_why(scrubbing):
    with Cluster(3) as run:
        run.take(1, 2, scale=SCALE)
        pids = [frozen(run, group) for group in (0, 1)]  # until both have rotted
        path, _ = [rot(run, group, 2, 0.2) for group in (0, 1)][-1]
        rotten = path.read_bytes()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: set(run.told("snapshot_damaged")) == {(0, 0, 2), (1, 0, 2)})
        reasons = [e["reason"] for e in read_events(run.run_dir) if e["kind"] == "snapshot_damaged"]
        assert all(re.search("do not match their checksums; .*(are left|is not what was)", why) for why in reasons)
        wait_until(lambda: all(not run.segment(g).read_notes(0).sound for g in (0, 1)))
        assert path.read_bytes() == rotten
        run.resumes("older", 1, group=2, scale=SCALE)
        assert len(run.told("snapshot_damaged")) == 2
        assert run.told("snapshot_repaired") == []


def test_what_is_decoded_out_of_rotten_parity_does_not_take_a_parts_place():
    with Cluster(2) as run:
        run.take(1, scale=SCALE)
        other = next(p for p in run.segment(1).files("parity", 0) if p.exists() and BufferReader(p).header())
        body = other.read_bytes()
        with other.open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(bytes(byte ^ 255 for byte in body[HEADER_BYTES : HEADER_BYTES + (64 << 10)]))
        path, _ = rot(run, 0, 1, 0.01)
        rotten = path.read_bytes()
        channels = Channels(run.run_dir, run.token, TIMEOUT)
        with contextlib.closing(channels), pytest.raises(RepairError, match="is not what was published"):
            repair(run.segment(0), path, BufferReader(path).header(), channels, 0, lambda: None)
        assert path.read_bytes() == rotten
        assert not (path.parent / "rank-0.rebuilt").exists()


@pytest.fixture
def segment(tmp_path):
    made = Segment(tmp_path, "r", 0)
    made.create()
    return made


def published(path, step: int):
    writer = BufferWriter(path)
    writer.reserve(1000)
    writer.begin()
    writer.payload(1000)[:] = bytes([step]) * 1000
    header = writer.publish(header_of(step, 1000), chunk_digests(writer.payload(1000), 1000))
    writer.release()
    return header


def test_a_buffer_is_not_exchanged_while_its_trainer_writes_nor_after_it_has(segment):
    path, fresh = segment.file("data", 0, 0), segment.path / "rank-0.rebuilt"
    header, made = published(path, 1), published(fresh, 1)
    assert header == made
    with segment.writing(0, wait_s=0.0), pytest.raises(SnapshotError, match="held by another process"):
        _exchange(segment, header, fresh, path)
    newer = published(path, 2)
    with pytest.raises(RepairError, match="has been written meanwhile"):
        _exchange(segment, header, fresh, path)
    assert BufferReader(path).header() == newer
    _exchange(segment, newer, fresh, path)
    assert BufferReader(path).header() == header


def test_a_keeper_that_stands_still_in_an_exchange_costs_a_snapshot_and_not_the_run():
    with Cluster(2) as run:
        run.take(1, scale=SCALE)
        began = time.monotonic()
        with contextlib.ExitStack() as stopped:
            stopped.enter_context(run.segment(0).writing(0, wait_s=0.0))
            run.commit(2, scale=SCALE)
            run.wait()
        assert time.monotonic() - began < 60
        failed = [(g, step, f["reason"]) for g, kind, step, f in run.events if kind == "snapshot_failed"]
        assert [(g, step) for g, step, _ in failed] == [(0, 2)]
        assert "is held by another process" in failed[0][2]
        again = run.recover()
        assert again.decision.step == 1
        assert_is_step(again.restored, 1, scale=SCALE)
