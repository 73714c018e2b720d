"""The heal transport between real processes: what arrives is what was sent, or there is one clear error."""

import multiprocessing
import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from everstep import wire
from everstep.quorum import memory
from everstep.quorum.heal import Door, HealError, HealState, _StateBytes
from everstep.step.streams import HostStreams
from quorum.relay import fetch, relay

TOKEN = bytes(range(32))
SOON = timedelta(seconds=10)


def a_state(seed: int = 0, big: int = 1000) -> HealState:
    generator = torch.Generator().manual_seed(seed)
    return HealState(
        tensors={
            "layers.0.weight": torch.randn(37, 53, generator=generator),
            "layers.0.bias": torch.randn(53, generator=generator).to(torch.bfloat16),
            "big": torch.randn(big, 256, generator=generator),
            "step": torch.tensor(float(seed)),
            "mask": torch.rand(11, generator=generator) > 0.5,
            "counts": torch.randint(0, 9, (3, 5), generator=generator),
            "nothing": torch.empty(0, 4),
        },
        meta={"lr": 3e-4, "names": ["a", "b"], "seed": seed},
        blobs={"rng": os.urandom(5056), "empty": b""},
    )


def assert_same(got: HealState, sent: HealState) -> None:
    assert list(got.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name
    assert got.meta == sent.meta
    assert got.blobs == sent.blobs


@pytest.fixture
def server():
    server = Door("127.0.0.1", TOKEN, SOON)
    yield server
    server.shutdown()


def test_concurrent_joiners_all_receive_it(server):
    state, got = a_state(big=20_000), []
    server.serve(3, 0, state)
    joiners = [threading.Thread(target=lambda: got.append(fetch(server.address, TOKEN, 3, SOON))) for _ in range(5)]
    for joiner in joiners:
        joiner.start()
    for joiner in joiners:
        joiner.join()
    assert len(got) == 5
    for one in got:
        assert_same(one, state)


def test_a_joiner_that_asks_early_waits_for_the_step(server):
    got = []
    joiner = threading.Thread(target=lambda: got.append(fetch(server.address, TOKEN, 8, SOON)))
    server.serve(7, 0, a_state(7))
    joiner.start()
    time.sleep(0.05)  # lets the request arrive first; the assertion holds in either order
    server.serve(8, 0, a_state(8))
    joiner.join()
    assert got[0].meta["seed"] == 8


def test_a_step_that_is_over_is_refused(server):
    server.serve(4, 0, a_state())
    server.serve(5, 0, a_state())
    with pytest.raises(HealError, match="step 4 is over here: step 5"):
        fetch(server.address, TOKEN, 4, SOON)


def test_a_step_that_never_comes_is_refused_with_the_last_one(server):
    server.serve(4, 0, a_state())
    with pytest.raises(HealError, match=r"step 6 was not opened here within .* the last was 4"):
        fetch(server.address, TOKEN, 6, timedelta(seconds=0.3))


def test_after_the_release_nobody_is_let_in(server):
    server.serve(4, 0, a_state())
    server.close()
    with pytest.raises(HealError, match="its optimizer step has begun"):
        fetch(server.address, TOKEN, 4, SOON)


@pytest.mark.parametrize("at", [150, 400, 3_000, 700_000])
def test_a_flipped_byte_is_noticed_wherever_it_is(server, at):
    """In a message or in a chunk, of tensors or of their headers."""

    def flip(data, total):
        if total <= at < total + len(data):
            data = bytearray(data)
            data[at - total] ^= 0x10
        return data

    server.serve(1, 0, a_state())
    with relay(server.address, flip) as (address, _), pytest.raises(HealError):
        fetch(address, TOKEN, 1, timedelta(seconds=2), connections=1)


def _source(pipe, big):
    server = Door("127.0.0.1", TOKEN, SOON)
    server.serve(1, 0, a_state(big=big))
    pipe.send(server.address)
    signal.pause()


@pytest.fixture
def source_process():
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_source, args=(theirs, 100_000))
    process.start()
    yield process, ours.recv()
    process.kill()
    process.join()


def test_a_source_killed_during_the_transfer_is_one_error(source_process):
    process, address = source_process

    def kill_halfway(data, total):
        if total > 20_000_000:
            os.kill(process.pid, signal.SIGKILL)  # more than once does no harm: it is not reaped before the end
        return data

    with (
        relay(address, kill_halfway) as (through, _),
        pytest.raises(HealError, match=r"closed the connection|broke"),
    ):
        fetch(through, TOKEN, 1, SOON)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


def test_a_stopped_source_is_one_error_after_the_timeout(source_process):
    process, address = source_process
    stopped = threading.Event()

    def stop_halfway(data, total):
        if total > 20_000_000 and not stopped.is_set():
            os.kill(process.pid, signal.SIGSTOP)
            stopped.set()
        return data

    with (
        relay(address, stop_halfway) as (through, _),
        pytest.raises(HealError, match="was silent for 1 s"),
    ):
        fetch(through, TOKEN, 1, timedelta(seconds=1))


class SlowReader:
    """A joiner held up after its first bytes until told to go on."""

    def __init__(self, address: str) -> None:
        self.go_on, self.started = threading.Event(), threading.Event()
        self.outcome: HealState | HealError | None = None
        self._through = relay(address, self._hold)
        self.address, _ = self._through.__enter__()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.started.wait(10)

    def _hold(self, data, total):
        if total > 1_000_000:
            self.started.set()
            self.go_on.wait(10)
        return data

    def _run(self):
        try:
            self.outcome = fetch(self.address, TOKEN, 1, SOON, connections=1)
        except HealError as error:
            self.outcome = error

    def end(self):
        self.go_on.set()
        self._thread.join()
        self._through.__exit__(None, None, None)
        return self.outcome


def test_a_joiner_that_is_not_done_reads_on_from_a_copy_and_nobody_waits_for_it(server):
    """The optimizer changes every tensor while the transfer runs."""
    state = a_state(big=60_000)
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    server.serve(1, 0, state)
    reader = SlowReader(server.address)
    began = time.monotonic()
    server.close()
    assert time.monotonic() - began < 1, "the release waited for the joiner"
    for tensor in state.tensors.values():
        tensor.zero_()
    got = reader.end()
    assert isinstance(got, HealState), got
    assert_same(got, HealState(tensors=before, meta=state.meta, blobs=state.blobs))


def test_without_memory_for_a_copy_a_slow_joiner_is_cut_and_gets_no_state(server, monkeypatch):
    server.serve(1, 0, a_state(big=60_000))
    reader = SlowReader(server.address)
    monkeypatch.setattr(memory, "FACTOR", 1e12)
    server.close()
    assert re.search("closed the connection|broke", str(reader.end()))


def test_a_tensor_that_is_not_contiguous_is_refused_at_the_source(server):
    with pytest.raises(HealError, match="'w' is not contiguous"):
        server.serve(1, 0, HealState(tensors={"w": torch.zeros(4, 5).T}))


def test_nobody_reads_in_place_while_the_copy_is_made():
    """Its memory may change as soon as the copy is there, and the reader would still be at it."""
    state, order, go_on = _StateBytes(HealState(tensors={"w": torch.ones(8)})), [], threading.Event()

    class Parts(list):
        def __iter__(self):
            yield from super().__iter__()
            go_on.wait(10)
            order.append("copied")

    staged = state._staged
    state._parts, state._staged = Parts(state._parts), lambda pieces: order.append("read") or staged(pieces)
    copying = threading.Thread(target=state.detach)
    copying.start()
    until(lambda: state._detaching)
    reading = threading.Thread(target=lambda: state.views(0, 32))
    reading.start()
    until(lambda: order or state._lock._waiters)
    go_on.set()
    for thread in (copying, reading):
        thread.join()
    assert order == ["copied", "read"]


def test_what_lies_on_a_device_is_copied_through_the_buffer_that_it_is_served_from():
    """With memory of the host in its place. Its size is no multiple of a chunk's."""
    tensor = torch.arange(700_000, dtype=torch.float32)
    state = _StateBytes(HealState(tensors={"w": tensor}, blobs={"b": b"blob"}))
    state._device = torch.device("meta")
    state._own.buffer, state._own.streams = torch.empty(wire.CHUNK_BYTES, dtype=torch.uint8), HostStreams()
    state.detach()
    (copy,) = state._parts
    assert bytes(copy) == tensor.numpy().tobytes() + b"blob"
    tensor.zero_()
    assert bytes(state.views(4, 4)[0]) == torch.tensor([1.0]).numpy().tobytes()


def until(holds):
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
