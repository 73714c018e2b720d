"""Gradient sums over a backend whose works complete late, never, or only through `wait`.

The column is the real one over a backend of its own, whose sums double what they are given; its control goes over real
Gloo. The order of work on a device is tested on one (`tests/device`).
"""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from everstep.quorum.communicator import Communicator
from everstep.quorum.errors import SumsBroken
from everstep.quorum.in_flight import Line
from everstep.quorum.process_group import Place, RankColumn
from everstep.quorum.streams import Streams
from everstep.step.reduction import GradientReducer

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.3)
SIZES = [3, 500, 7, 1000]


class LateWork:
    """Of a sum: carried out in `wait`, once the backend lets it."""

    def __init__(self, tensor, may_end, raises):
        self.tensor, self.may_end, self.raises = tensor, may_end, raises

    def wait(self):
        if self.raises:
            raise RuntimeError("the communicator was aborted")
        self.may_end.wait(60)
        self.tensor.mul_(2)


class LateBackend:
    """A communicator. `go_on` is set while its sums may end; with `raises` they fail at once."""

    on_device = True

    def __init__(self):
        self.go_on, self.raises, self.revoked, self.aborted = threading.Event(), False, "", False
        self.go_on.set()

    def connect(self, key):
        pass

    def allreduce(self, tensor, timeout):
        return LateWork(tensor, self.go_on, self.raises)

    def error(self):
        return self.revoked

    def abort(self):
        self.aborted = True


@pytest.fixture
def column():
    """A column that is connected; `backend` is its newest, and `again` connects it anew, with another one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made, sizes = [], []

    def make(backend, board, rank, size, timeout):
        sizes.append((backend, size))
        if backend == "gloo":
            return Communicator(backend, board, rank, size, timeout)
        made.append(LateBackend())
        return made[-1]

    waits = {"connect_timeout": LONG, "reduce_timeout": LONG}
    column = RankColumn("nccl", column=0, host="127.0.0.1", **waits, token=b"t" * 32, make=make)

    def again():
        column.connect(Place(f"key-{len(made)}", f"127.0.0.1:{store.port}", 0, 0, (column.address,)))
        return made[-1]

    column.again, column.sizes, column.store = again, sizes, f"127.0.0.1:{store.port}"
    yield column
    for backend in made:
        backend.go_on.set()
    column.close()


@pytest.fixture
def reducer():
    reducer = GradientReducer([torch.nn.Parameter(torch.zeros(n)) for n in SIZES], 2048)
    # One slot tells how often each gradient is added to.
    reducer.begin_slot(last=False)
    backward(reducer, 0.0)
    reducer.end_slot()
    clear(reducer)
    return reducer


def params_of(reducer):
    return [param for bucket in reversed(reducer._buckets) for param in reversed(bucket.params)]


def clear(reducer):
    for param in params_of(reducer):
        param.grad = None


def backward(reducer, scale):
    for param in reversed(params_of(reducer)):
        (param * scale).sum().backward()


def begin(reducer, column, scale=1.0, timeout=LONG):
    """An attempt's only slot, whose sums have begun."""
    reducer.begin(column, timeout)
    reducer.begin_slot(last=True)
    backward(reducer, scale)
    reducer.end_slot()


def sums(reducer):
    """What the optimizer would get."""
    reducer.assign(1.0)
    return [set(param.grad.tolist()) for param in params_of(reducer)]


def test_a_sum_that_never_completes_is_given_up_with_its_memory(column, reducer):
    """Its memory stays as it is until the sum ends, however late, and is then given back."""
    backend = column.again()
    backend.go_on.clear()
    begin(reducer, column, timeout=SHORT)  # who starts a sum does not wait for it
    assert all(bucket.sum is not None for bucket in reducer._buckets)
    with pytest.raises(SumsBroken, match=r"did not complete within 0.3 s"):
        reducer.finish()
    assert not column.connected
    given_up = [weakref.ref(flat) for _, flat in reducer._given_up]
    fresh = {bucket.memory.flat.data_ptr() for bucket in reducer._buckets}
    assert given_up
    assert not {flat.data_ptr() for _, flat in reducer._given_up} & fresh
    column.again()
    clear(reducer)
    begin(reducer, column, 3.0)
    reducer.finish()
    backend.go_on.set()
    assert sums(reducer) == [{6.0}] * len(SIZES), "the late sum wrote into memory that is in use again"
    deadline = time.monotonic() + 60
    while any(ref() is not None for ref in given_up):
        assert time.monotonic() < deadline, "the memory of a sum that has ended is given back"
        reducer.begin(column, LONG)
        gc.collect()
        time.sleep(0.01)


def test_a_sum_that_fails_says_why(column, reducer):
    column.again().raises = True
    begin(reducer, column)
    with pytest.raises(SumsBroken, match="was aborted"):
        reducer.finish()


def test_a_sum_that_ended_on_a_revoked_communicator_is_not_believed(column, reducer):
    column.again().revoked = "revoked: TIMEOUT"
    begin(reducer, column)
    with pytest.raises(SumsBroken, match="revoked: TIMEOUT"):
        reducer.finish()
    assert not column.connected


def test_a_loss_breaks_what_waits_at_once_and_is_not_taken_for_the_end_of_a_sum(column, reducer):
    """The abort ends the sum, which then looks as after any other."""
    backend = column.again()
    backend.go_on.clear()
    backend.abort = backend.go_on.set
    begin(reducer, column, timeout=60 * LONG)
    threading.Timer(0.2, lambda: column._on_loss(column._key)).start()
    with pytest.raises(SumsBroken, match="lost"):
        reducer.finish()
    assert backend.go_on.is_set()


def test_control_goes_over_gloo_whatever_the_gradients_do(column):
    column.again().go_on.clear()
    column.start(torch.ones(3), LONG)
    assert column.gather([4, 5]) == [[4, 5]]
    assert column.gather_bytes(b"note") == [b"note"]


def test_a_sum_has_its_whole_timeout_from_the_end_of_the_one_before():
    """Buckets queue behind each other: a later one may have been asked for long before it can begin."""
    backend = LateBackend()
    line, one = Line(backend, Streams()), torch.zeros(1)
    line.finish(line.start(one, LONG))
    backend.go_on.clear()
    second = line.start(one, LONG)
    second.began -= 10 * LONG.total_seconds()
    threading.Timer(0.1, backend.go_on.set).start()
    line.finish(second)
    line.end()


def test_what_a_backend_loads_first_is_loaded_before_others_wait(column):
    """By a sum of its own, of one member, which is over when the column connects."""
    column.warm(column.store, LONG)
    assert column.sizes == [("nccl", 1)]
    assert not column.connected
    column.again()
    assert column.connected
