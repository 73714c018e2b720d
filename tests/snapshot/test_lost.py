"""Buffers that vanish, and what keeper or copier cannot do: it is made good, or the run goes on without and says so."""

import os
import re

import numpy as np
import pytest

from everstep.run.events import read_events
from everstep.snapshot import peers
from everstep.snapshot.buffer import HEADER_BYTES, BufferReader
from snapshot.test_repair import SCALE, is_whole
from snapshot_cluster import Cluster, assert_is_step, file_of, in_keepers, wait_until


def goes_on(run: Cluster, *steps: int) -> None:
    """The next snapshots are taken by all groups, and the last can be restored."""
    for step in steps:
        run.commit(step, scale=SCALE)
        run.wait()
        assert [g for g, kind, at, _ in run.events if (kind, at) == ("snapshot", step)] == run.groups
    run.all_settled()
    assert_is_step(run.recover(group=1).restored, steps[-1], scale=SCALE)


def body_of(path) -> bytes:
    header = BufferReader(path).header()
    return path.read_bytes()[HEADER_BYTES : HEADER_BYTES + header.payload_bytes + 8]


@pytest.mark.parametrize("how", ["flipped", "another's", "cut short", "gone"])
def test_a_newest_snapshot_that_vanishes_is_made_anew_and_training_goes_on(how):
    with Cluster(3) as run:
        run.take(1, 2, scale=SCALE)
        path = file_of(run.segment(0), "data", 2)
        whole, payload = path.read_bytes(), body_of(path)
        if how == "flipped":
            path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
        elif how == "another's":
            path.write_bytes(file_of(run.segment(1), "data", 2).read_bytes())
        elif how == "cut short":
            path.write_bytes(whole[: len(whole) // 2])
        else:
            path.unlink()
        wait_until(lambda: (0, 0, 2) in run.told("snapshot_repaired"))
        assert is_whole(path, payload)
        assert run.told("snapshot_damaged") == []
        goes_on(run, 3, 4)


def test_a_newest_snapshot_that_vanishes_for_good_does_not_stop_those_after_it():
    with Cluster(3, parity=0) as run:
        run.take(1, 2, scale=SCALE, coded=False)
        file_of(run.segment(0), "data", 2).unlink()
        wait_until(lambda: run.told("snapshot_damaged") == [(0, 0, 2)])
        wait_until(lambda: not run.copiers[0].word().published)
        assert run.recover(group=1).decision.step == 1
        goes_on(run, 3, 4)


def test_a_newest_snapshot_whose_header_is_zeros_does_not_stop_those_after_it():
    """As when its trainer began to write there and died."""
    with Cluster(3) as run:
        run.take(1, 2, scale=SCALE)
        with file_of(run.segment(0), "data", 2).open("r+b") as file:
            file.write(bytes(4096))
        wait_until(lambda: not run.copiers[0].word().published)
        assert run.told("snapshot_damaged") == []
        goes_on(run, 3, 4)


def test_parity_whose_header_is_damaged_is_made_again(scrubbing):
    with Cluster(3) as run:
        run.take(1, scale=SCALE)
        path = file_of(run.segment(0), "parity", 1)
        whole = path.read_bytes()
        path.write_bytes(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
        wait_until(lambda: (0, 0, 1) in run.told("snapshot_repaired"))
        wait_until(lambda: run.copiers[0].word().coded)
        run.lose_host(1)
        again = run.recover(group=2)
        assert again.decision.source == "parity"
        assert_is_step(again.restored, 1, scale=SCALE)


@pytest.mark.parametrize("what", ["part", "layout", "table"])
def test_a_whole_copy_is_made_anew_out_of_another_groups(scrubbing, what):
    with Cluster(3, scope="full") as run:
        run.take(1, scale=SCALE, coded=False)
        path = file_of(run.segment(0), "data", 1)
        header, payload = BufferReader(path).header(), body_of(path)
        begin, end = header.sections.get(what, (header.payload_bytes, header.payload_bytes + 8))
        with path.open("r+b") as file:
            for at in {begin, (begin + end) // 2, end - 1}:
                file.seek(HEADER_BYTES + at)
                file.write(bytes([payload[at] ^ 16]))
        wait_until(lambda: (0, 0, 1) in run.told("snapshot_repaired"))
        assert is_whole(path, payload)
        for group in (1, 2):
            run.lose_host(group)
        assert_is_step(run.recover(group=0).restored, 1, scale=SCALE)


def test_what_is_a_groups_own_in_a_whole_copy_nobody_else_has(scrubbing):
    with Cluster(3, scope="full") as run:
        run.take(1, scale=SCALE, coded=False)
        path = file_of(run.segment(0), "data", 1)
        with path.open("r+b") as file:
            file.seek(HEADER_BYTES + BufferReader(path).header().sections["own"][0] + 20)
            file.write(b"\xff")
        wait_until(lambda: run.told("snapshot_damaged") == [(0, 0, 1)])
        [why] = [event["reason"] for event in read_events(run.run_dir) if event["kind"] == "snapshot_damaged"]
        assert re.search("do not match their checksums; what its peers hold is not what was published", why)
        assert_is_step(run.recover(group=0).restored, 1, scale=SCALE)


def test_what_a_keeper_failed_to_verify_does_not_count_as_protected(monkeypatch, tmp_path):
    """The step before was, and its keeper had said so."""
    code = """
        import everstep.snapshot.rank_watch as watch
        plain = watch.BufferReader
        def failing(path):
            reader = plain(path)
            if reader.header() and reader.header().step == 2: raise ArithmeticError('by the test')
            return reader
        if '"group": 0' in ' '.join(sys.orig_argv): watch.BufferReader = failing
    """
    in_keepers(monkeypatch, tmp_path, code)
    with Cluster(3, coding_timeout_s=1.0) as run:
        run.take(1)
        run.commit(2)
        run.wait()
        wait_until(lambda: "ArithmeticError" in run.segment(0).read_notes(0).reason)
        word = run.copiers[0].word()
        assert (word.settled, word.coded, word.published) == (True, False, False)
        wait_until(lambda: any((g, kind) == (0, "snapshot_unprotected") for g, kind, _, _ in run.events))


@pytest.mark.parametrize("shape", [{"parity": 0}, {"scope": "full"}])
def test_a_damaged_copy_is_no_anchor_though_nothing_is_coded(monkeypatch, shape):
    """Else the next snapshot would be written over the only one that can be restored."""
    with Cluster(2, **shape) as run:
        run.take(1, coded=False)
        plain = np.copyto

        def falsely(target, source):
            plain(target, source)
            target[0] ^= 1

        monkeypatch.setattr(np, "copyto", falsely)
        run.commit(2)
        run.wait()
        run.all_settled()
        assert not any(copier.word().published for copier in run.copiers.values())
        run.commit(3)
        assert {copier.agreed.anchor for copier in run.copiers.values()} == {(1, 1)}


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
        run.copiers[0].close()  # which waits for the copy
        assert run.copiers.pop(0).published == 3


def test_a_keeper_that_cannot_start_a_thread_goes_on_and_tries_again(monkeypatch, tmp_path):
    code = """
        import threading
        plain, tried = threading.Thread.start, []
        def start(self):
            if self.name == 'rank-0' and len(tried) < 3:
                tried.append(self)
                raise RuntimeError("can't start new thread")
            plain(self)
        threading.Thread.start = start
    """
    in_keepers(monkeypatch, tmp_path, code)
    with Cluster(2) as run:
        run.take(1)


def test_keepers_that_come_and_go_leave_no_connections_open_at_the_others():
    with Cluster(3) as run:
        run.take(1)
        pid = next(place.pid for place in peers.read_places(run.run_dir) if place.group == 0)
        for step in range(2, 14):
            run.kill_keeper(1)
            run.start_keeper(1)
            run.take(step)
            # As of any keeper of three, with a few to one that is just gone. One more for each life would be too many.
            assert len(os.listdir(f"/proc/{pid}/fd")) <= 10 + 4 * 2 + 6


def test_a_code_that_nobody_is_told_of_is_asked_for(monkeypatch, tmp_path):
    code = """
    import everstep.snapshot.board as board
    plain = board.Board.tell
    def tell(self, groups, message, then=None):
        if message["op"] != "code":
            plain(self, groups, message, then)
    board.Board.tell = tell
    """
    in_keepers(monkeypatch, tmp_path, code)
    with Cluster(3) as run:
        run.take(1, 2)
