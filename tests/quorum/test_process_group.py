"""Process groups between real members, and with a member that connects only halfway."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from everstep.quorum.communicator import Communicator
from everstep.quorum.errors import SumsBroken
from everstep.quorum.in_flight import SumQueue
from everstep.quorum.notes import open_note, seal_note
from everstep.quorum.process_group import Place, RankColumn, connect_store
from everstep.quorum.streams import Streams
from everstep.quorum.watch import PeerWatch
from watched import until

HOST, TOKEN = "127.0.0.1", bytes(range(32))
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=2)


@pytest.fixture(scope="module")
def board():
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def crosses(request):
    def _make(connect_timeout=LONG, backend="gloo", make=Communicator):
        cross = RankColumn(backend, column=0, make=make, host=HOST, connect_timeout=connect_timeout, token=TOKEN)
        request.addfinalizer(cross.abort)
        return cross

    return _make


def place(board, key, members, rank=0):
    return Place(key, f"{HOST}:{board.port}", 0, rank, tuple(member.address for member in members))


def assert_they_add(board, key, *members):
    tensors = [torch.full((3,), 10.0**rank) for rank in range(len(members))]

    def _add(rank):
        members[rank].connect(place(board, key, members, rank))
        return members[rank].total(tensors[rank], LONG)

    with ThreadPoolExecutor(len(members)) as pool:
        sums = list(pool.map(_add, range(len(members))))
    assert all(total.tolist() == [sum(10.0**rank for rank in range(len(members)))] * 3 for total in sums)


def test_a_connection_that_never_ends_is_left_behind_and_broken_if_it_ends(board, crosses, monkeypatch):
    cross, go_on, broken = crosses(timedelta(seconds=2)), threading.Event(), []
    # Connected beforehand, as that may take longer than the column's timeout.
    cross._stores[f"{HOST}:{board.port}"] = connect_store(f"{HOST}:{board.port}", LONG)

    class Stuck(Communicator):
        def connect(self, key):
            go_on.wait()

        def abort(self):
            super().abort()
            broken.append(go_on.is_set())

    monkeypatch.setattr(cross, "_make", Stuck)
    peer = PeerWatch(HOST, lambda _: None, TOKEN, LONG)
    with pytest.raises(SumsBroken, match="no answer in time"):
        cross.connect(place(board, "stuck", [cross, peer]))
    monkeypatch.setattr(cross, "_make", Communicator)
    monkeypatch.setattr(cross, "_connect_timeout", LONG)
    assert_they_add(board, "after-stuck", cross, crosses())
    assert broken == [False], "the connection is broken when its thread is abandoned"
    go_on.set()
    until(lambda: broken == [False, True], "the connection that was completed too late to be broken")


def test_a_member_that_does_not_come_is_not_waited_for_as_long_as_a_backend_that_loads(board, crosses):
    column = crosses(SHORT, "nccl", lambda backend, *more: Communicator("gloo", *more))
    column.warm(f"{HOST}:{board.port}", LONG)
    peer = PeerWatch(HOST, lambda _: None, TOKEN, LONG)
    with pytest.raises(SumsBroken, match="DistStoreError"):
        column.connect(place(board, "one comes", [column, peer]))


def test_a_column_that_gives_up_ends_the_sums_of_all_and_frees_what_they_ran_on(board, crosses):
    """Also the sums of members that are not its neighbours, and before any timeout."""
    columns = [crosses() for _ in range(4)]
    assert_they_add(board, "all-four", *columns)
    pending = [column.start(torch.ones(1 << 16), 30 * LONG) for column in columns[:3]]
    begin = time.monotonic()
    columns[3].abort()
    for column, one in zip(columns, pending, strict=False):
        with pytest.raises(SumsBroken):
            column.finish(one)
    until(lambda: all(one.ended for one in pending), "the sums that can never complete to end")
    assert time.monotonic() - begin < LONG.total_seconds()
    assert_they_add(board, "again", *columns)


def test_a_flipped_bit_in_a_notes_length_damages_that_note_only(board, crosses, monkeypatch):
    column, flips = crosses(), torch.tensor([1 << 46, *[0] * 63])
    column.connect(place(board, "flip", [column]))
    monkeypatch.setattr(column, "total", lambda values, timeout: values ^ flips)
    assert column.gather(b"note", LONG) == [b""]


def test_a_note_is_good_for_its_place_only():
    sealed = seal_note(TOKEN, b"5 of 2", b"state")
    assert open_note(TOKEN, b"5 of 2", sealed) == b"state"
    assert open_note(TOKEN, b"5 of 2", seal_note(TOKEN, b"5 of 2", b"")) == b""
    for token, place, note in [
        (bytes(32), b"5 of 2", sealed), (TOKEN, b"5 of 3", sealed), (TOKEN, b"5 of 2", sealed[:-1]),
        (TOKEN, b"5 of 2", b"state"), (TOKEN, b"5 of 2", sealed[:-1] + b"x"),
        (TOKEN, b"5 of 2s", sealed.replace(b"state", b"tate")),
    ]:  # fmt: skip
        assert open_note(token, place, note) == b""


class Works:
    """A communicator whose sums complete at once."""

    on_device = False

    def __init__(self, begins=lambda: None, error=lambda: ""):
        self._begins, self.error = begins, error

    def allreduce(self, tensor, timeout):
        self._begins()
        return SimpleNamespace(wait=lambda: None)

    def abort(self):
        pass


def test_a_sum_that_is_begun_while_the_group_is_broken_ends():
    queue = SumQueue(Works(lambda: queue.end()), Streams())
    one = queue.start(torch.ones(1), LONG)
    with pytest.raises(SumsBroken, match="lost"):
        queue.finish(one)
    until(lambda: one.ended, "the sum to end, or its memory would be kept for as long as the process lives")


def test_a_backend_that_cannot_say_whether_it_failed_has_failed():
    def error():
        raise RuntimeError("no such communicator")

    queue = SumQueue(Works(error=error), Streams())
    for _ in range(2):
        with pytest.raises(SumsBroken, match="no such communicator"):
            queue.finish(queue.start(torch.ones(1), LONG))
