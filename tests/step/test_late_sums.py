"""Gradient sums on a device that works late, whose works complete late, out of order, never, or only through `wait`.

The column is the real one over a backend of its own; its control goes over real Gloo. The backend "sums" two groups of
which this is one and the other has the same gradients: everything is doubled.
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
from everstep.quorum.in_flight import InFlight
from everstep.quorum.process_group import RankColumn
from everstep.step.interfaces import SumsBroken
from everstep.step.reduction import GradientReducer
from everstep.step.streams import HostStreams
from late_device import MAIN, SUMS, LateDevice

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.3)
SIZES = [3, 500, 7, 1000]
OTHER = "reduce-scatter"


class LateWork:
    """A work of the backend; what it does on `wait` is given, and it never says that it is complete."""

    def __init__(self, wait):
        self.wait = wait

    def is_completed(self):
        return False


class LateBackend:
    """A communicator on a `LateDevice`. `waits`: what `wait` does, of the sums begun one after the other."""

    on_device = True

    def __init__(self, device, waits=()):
        self.device, self.waits, self.revoked, self.aborted = device, list(waits), "", False

    def connect(self, key):
        pass

    def allreduce(self, tensor, timeout):
        begin = self.device.record()
        with self.device.on(self.device.current() if self.on_device else "the backend's own"):
            self.device.wait(begin)
            self.device.give(lambda: tensor.mul_(2))
            ended = self.device.record().reached
        # The first one, of a column that connects, is of one number.
        wait = self.waits.pop(0) if self.waits and tensor.numel() > 1 else "prompt"
        return LateWork({"prompt": lambda: True, "blocks": ended.wait}.get(wait, wait))

    def error(self):
        return self.revoked

    def abort(self):
        self.aborted = True


@pytest.fixture
def device():
    device = LateDevice()
    yield device
    device.go_on()
    device.close()


@pytest.fixture
def column(device):
    """A column that is connected, and its backend; `again` connects it anew, with another backend."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []

    def _make(backend, *args):
        if backend == "gloo":
            return Communicator(backend, *args)
        made.append(LateBackend(device, column.waits))
        return made[-1]

    column = RankColumn(
        "nccl",
        column=0,
        host="127.0.0.1",
        connect_timeout=LONG,
        reduce_timeout=LONG,
        token=b"t" * 32,
        streams=device,
        make=_make,
    )
    column.waits = []

    def _again(*waits):
        column.waits = waits
        place = {"host": 0, "rank": 0, "peers": [column.address]}
        column.connect(key=f"key-{len(made)}", store=f"127.0.0.1:{store.port}", **place)
        return made[-1]

    column.again = _again
    yield column
    device.go_on()
    column.close()


@pytest.fixture
def reducer(device):
    reducer = GradientReducer([torch.nn.Parameter(torch.zeros(n)) for n in SIZES], 2048, device)
    # One slot tells how often each gradient is added to.
    reducer.begin_slot(last=False)
    backward(params_of(reducer), 0.0)
    reducer.end_slot()
    clear(reducer)
    return reducer


def params_of(reducer):
    return [param for bucket in reversed(reducer._buckets) for param in reversed(bucket.params)]


def clear(reducer):
    for param in params_of(reducer):
        param.grad = None


def backward(params, scale):
    for param in params:
        (param * scale).sum().backward()


def run_attempt(reducer, column, device, scale=1.0, timeout=LONG, streams=(MAIN,)):
    """One slot, whose gradients come on these streams in turn, and its sums; SumsBroken where they fail."""
    with device:
        reducer.begin(column, timeout)
        reducer.begin_slot(last=True)
        for number, param in enumerate(reversed(params_of(reducer))):
            with device.on(streams[number % len(streams)]):
                backward([param], scale)
        reducer.end_slot()
        reducer.finish()


def sums(reducer, device):
    """What the optimizer would get."""
    with device:
        reducer.assign(1.0)
    device.idle()
    return [set(param.grad.tolist()) for param in params_of(reducer)]


def within_a_minute(call):
    """A call that may hang, in a thread of its own; what it raised."""
    raised = []

    def _call():
        try:
            call()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=_call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def memory(reducer):
    return [bucket.memory.flat for bucket in reducer._buckets]


@pytest.mark.parametrize("streams", [(MAIN,), (OTHER,), (MAIN, OTHER), (OTHER, MAIN)])
def test_a_bucket_that_two_streams_fill_is_summed_after_both(device, column, reducer, streams):
    column.again()
    device.hold(MAIN, OTHER)  # the sums could overtake
    threading.Timer(0.1, device.go_on).start()
    run_attempt(reducer, column, device, streams=streams)
    assert sums(reducer, device) == [{2.0}] * len(SIZES)


def test_a_bucket_is_not_filled_again_before_the_step_has_read_it(device, column, reducer):
    column.again()
    run_attempt(reducer, column, device, 1.0)
    grads = [torch.zeros_like(param) for param in params_of(reducer)]
    device.hold(MAIN)
    with device:
        for param, grad in zip(params_of(reducer), grads, strict=True):
            param.grad = grad
        reducer.assign(1.0)  # waits on the held stream
    clear(reducer)
    attempt = threading.Thread(target=run_attempt, args=(reducer, column, device, 5.0, LONG, (OTHER,)))
    attempt.start()
    time.sleep(0.1)
    device.go_on()
    attempt.join(60)
    assert [set(grad.tolist()) for grad in grads] == [{2.0}] * len(SIZES), "the step got the next step's gradients"
    assert sums(reducer, device) == [{10.0}] * len(SIZES)


def test_who_starts_sums_never_waits_for_the_device(device, column, reducer):
    column.again("blocks", "blocks")
    device.hold(MAIN, OTHER, SUMS)
    with device:
        reducer.begin(column, LONG)
        reducer.begin_slot(last=True)
        assert within_a_minute(lambda: backward(params_of(reducer), 1.0)) is None
        backward(reversed(params_of(reducer)), 1.0)
        reducer.end_slot()
    assert threading.get_ident() not in device.blocked
    assert all(bucket.sum is not None for bucket in reducer._buckets), "nothing was started, so nothing was tested"


@pytest.mark.parametrize("waits", [("blocks",) * 9, ("prompt",) * 9, ("blocks", "prompt", "blocks")])
def test_works_that_complete_late_and_only_through_wait_are_waited_for(device, column, reducer, waits):
    column.again(*waits)
    device.hold(SUMS)
    threading.Timer(0.2, device.go_on).start()
    assert within_a_minute(lambda: run_attempt(reducer, column, device)) is None
    assert sums(reducer, device) == [{2.0}] * len(SIZES)


def test_works_of_a_backend_beside_the_streams_end_when_wait_says_so(device, column, reducer, monkeypatch):
    """Gloo sums what is on a device in threads of its own: no event on a stream tells of it."""
    monkeypatch.setattr(LateBackend, "on_device", False)
    column.again(*("blocks",) * 9)
    device.hold("the backend's own")
    threading.Timer(0.2, device.go_on).start()
    assert within_a_minute(lambda: run_attempt(reducer, column, device)) is None
    assert sums(reducer, device) == [{2.0}] * len(SIZES)


@pytest.mark.parametrize("wait", ["prompt", "blocks", threading.Event().wait])
def test_a_sum_that_never_completes_is_given_up_with_its_memory(device, column, reducer, wait):
    """Its memory stays as it is until the sum ends, however late, and is then given back."""
    column.again(wait)
    device.hold(SUMS)
    error = within_a_minute(lambda: run_attempt(reducer, column, device, timeout=SHORT))
    assert isinstance(error, SumsBroken)
    assert "did not complete within 0.3 s" in str(error)
    assert not column.connected
    given_up = [weakref.ref(flat) for _, flat in reducer._given_up]
    assert given_up
    assert not {flat.data_ptr() for _, flat in reducer._given_up} & {flat.data_ptr() for flat in memory(reducer)}
    device.go_on()
    column.again()
    clear(reducer)
    run_attempt(reducer, column, device, 3.0)
    assert sums(reducer, device) == [{6.0}] * len(SIZES)
    if wait in ("prompt", "blocks"):
        deadline = time.monotonic() + 60
        while any(ref() is not None for ref in given_up):
            assert time.monotonic() < deadline, "the memory of a sum that has ended is given back"
            reducer.begin(column, LONG)
            gc.collect()
            time.sleep(0.01)


def test_a_sum_that_fails_while_its_kernel_runs_on_writes_into_nobodys_memory(device, column, reducer):
    """An abort makes `wait` raise; the kernel ends later, and writes until then."""

    def _aborted():
        raise RuntimeError("the communicator was aborted")

    column.again(_aborted)
    device.hold(SUMS)
    error = within_a_minute(lambda: run_attempt(reducer, column, device, timeout=SHORT))
    assert isinstance(error, SumsBroken)
    held = [one for one, _ in reducer._given_up]
    assert held
    assert not any(one.ended for one in held), "a kernel that still runs was taken to have ended"
    with device:
        reducer.begin(column, LONG)
    assert [one for one, _ in reducer._given_up] == held, "memory was given back before the kernel ended"
    fresh = [flat.data_ptr() for flat in memory(reducer)]
    before = [flat.clone() for flat in memory(reducer)]
    device.go_on()
    device.idle()
    assert fresh == [flat.data_ptr() for flat in memory(reducer)]
    for was, flat in zip(before, memory(reducer), strict=True):
        assert torch.equal(was.view(torch.int32), flat.view(torch.int32)), (
            "the aborted kernel wrote into memory that is in use again"
        )


def test_a_sum_that_ended_on_a_revoked_communicator_is_not_believed(device, column, reducer):
    column.again().revoked = "revoked: TIMEOUT"
    with pytest.raises(SumsBroken, match="revoked: TIMEOUT"):
        run_attempt(reducer, column, device)
    assert not column.connected


def test_a_loss_breaks_what_waits_for_the_device_at_once(device, column, reducer):
    backend = column.again("blocks")
    device.hold(SUMS)
    threading.Timer(0.2, lambda: column._on_loss(column._key)).start()
    error = within_a_minute(lambda: run_attempt(reducer, column, device, timeout=60 * LONG))
    assert isinstance(error, SumsBroken)
    assert "lost" in str(error)
    assert backend.aborted


def test_a_sum_that_an_abort_ended_is_not_taken_for_complete(device, column):
    """The abort ends the kernel, and the event behind it looks as after any other."""
    backend, raised = column.again(), []
    device.hold(SUMS)
    one = column.start(torch.ones(3), LONG)
    waits = threading.Thread(target=lambda: raised.append(within_a_minute(lambda: column.finish(one))))

    def _abort():
        device.go_on()
        waits.join(60)

    backend.abort = _abort
    waits.start()
    column._on_loss(column._key)
    waits.join(60)
    assert isinstance(raised[0], SumsBroken)


def test_control_goes_over_gloo_whatever_the_gradients_do(device, column):
    column.again()
    device.hold(SUMS, MAIN)
    column.start(torch.ones(3), LONG)
    assert column.gather([4, 5]) == [[4, 5]]
    assert column.gather_bytes(b"note") == [b"note"]


def test_a_sum_has_its_whole_timeout_from_the_end_of_the_one_before():
    """Buckets queue behind each other: a later one may have been asked for long before it can begin."""
    in_flight, done = InFlight(HostStreams(), lambda: ""), threading.Event()
    first = in_flight.add(LateWork(lambda: True), None, LONG)
    in_flight.finish(first)
    second = in_flight.add(LateWork(done.wait), None, LONG)
    second.began -= 10 * LONG.total_seconds()
    threading.Timer(0.1, done.set).start()
    in_flight.finish(second)
    in_flight.end()


def test_what_a_backend_loads_first_is_loaded_before_others_wait(device, column):
    """By a sum of its own, of one member, which is over when the column connects."""
    sizes, make = [], column._make
    column._make = lambda backend, store, rank, size, timeout: (
        sizes.append((backend, size)) or make(backend, store, rank, size, timeout)
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    column.warm(f"127.0.0.1:{store.port}", LONG)
    assert sizes == [("nccl", 1)]
    assert not column.connected
    column.again()
    assert column.connected
