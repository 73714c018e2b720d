"""The heal transport between real processes: what arrives is what was sent, or there is one clear error."""

import contextlib
import os
import threading
from datetime import timedelta

import pytest
import torch

from everstep.quorum import memory
from everstep.quorum.heal import Door, Fetch, HealError, HealState, Wanted
from everstep.wire.channel import Channel

TOKEN = bytes(range(32))
SOON = timedelta(seconds=60)


def fetch(address, token, step, timeout, *, history=0, whose="", **of):
    """The state of a committed step, once it is here; see `Fetch`. Raises HealError."""
    wanted = Wanted(step, history, whose)
    found = Fetch(address, wanted, token, timeout, **of)
    found.join()
    if found.error:
        raise HealError(found.error)
    return found.state()


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


def test_the_optimizer_waits_for_no_joiner_and_changes_nothing_that_it_reads(server, monkeypatch):
    """It changes every tensor while the transfer runs."""
    state, half, go_on, got = a_state(big=60_000), threading.Event(), threading.Event(), []
    state.tensors["transposed"] = torch.randn(5, 7).T
    before = HealState({name: tensor.clone() for name, tensor in state.tensors.items()}, state.meta, state.blobs)
    server.serve(1, 0, state)

    receive = Channel.receive_range

    def hold(channel, *where):
        receive(channel, *where)
        half.set()
        go_on.wait(60)

    monkeypatch.setattr(Channel, "receive_range", hold)
    joiner = threading.Thread(target=lambda: got.append(fetch(server.address, TOKEN, 1, SOON)))
    joiner.start()
    assert half.wait(60)
    server.close()
    for tensor in state.tensors.values():
        tensor.zero_()
    go_on.set()
    joiner.join()
    assert_same(got[0], before)


def test_a_host_without_memory_for_a_copy_serves_nobody(server, monkeypatch):
    monkeypatch.setattr(memory, "room_for", lambda nbytes: contextlib.nullcontext(nbytes < 1000))
    server.serve(2, 0, a_state())
    with pytest.raises(HealError, match="no memory for a copy"):
        fetch(server.address, TOKEN, 2, SOON)


@pytest.mark.parametrize(("whose", "history"), [("rank 0 of 2 in run a", 5), ("rank 1 of 2 in run a", 6)])
def test_another_rank_run_layout_or_history_is_refused(whose, history):
    source = Door("127.0.0.1", TOKEN, SOON, whose="rank 1 of 2 in run a")
    source.serve(3, 5, a_state())
    with pytest.raises(HealError, match="asked for"):
        fetch(source.address, TOKEN, 3, SOON, whose=whose, history=history)
    assert fetch(source.address, TOKEN, 3, SOON, whose="rank 1 of 2 in run a", history=5).meta["seed"] == 0
    source.shutdown()
