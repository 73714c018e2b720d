"""A heal is of the state that was asked for, also when something in between answers."""

import json
from datetime import timedelta

import pytest
import torch

from everstep import wire
from everstep.quorum import heal
from everstep.quorum.heal import Door, HealError, HealState
from quorum.relay import fetch, relay

TOKEN = bytes(range(32))
SOON = timedelta(seconds=10)
RANK_1 = "rank 1 of 2 in run a"


def a_state(seed=0, rows=20_000, position=b"p0"):
    generator = torch.Generator().manual_seed(seed)
    return HealState({"weight": torch.randn(rows, 256, generator=generator)}, {"seed": seed}, {"position": position})


@pytest.fixture
def server():
    server = Door("127.0.0.1", TOKEN, SOON, whose=RANK_1)
    yield server
    server.shutdown()


@pytest.mark.parametrize(
    ("whose", "history"),
    [
        ("rank 0 of 2 in run a", 5),
        (RANK_1, 6),
    ],
)
def test_another_rank_run_layout_or_history_is_refused(server, whose, history):
    server.serve(3, 5, a_state())
    with pytest.raises(HealError, match="asked for"):
        fetch(server.address, TOKEN, 3, SOON, whose=whose, history=history)
    assert fetch(server.address, TOKEN, 3, SOON, whose=RANK_1, history=5).meta["seed"] == 0


def answering(answer):
    """A member of the run whose heal server answers anything."""

    def talk(channel):
        channel.receive_frame()
        channel.send_frame(answer)
        wire.serve_ranges(channel, wire.Pieces([memoryview(bytearray(64))]))

    return wire.Server("127.0.0.1", TOKEN, talk, SOON, purpose=heal.PURPOSE)


GOOD = {
    "step": 1,
    "history": 0,
    "whose": "",
    "tensors": [["w", "float32", [4, 4]]],
    "blobs": [],
    "meta": {},
    "size": 64,
}


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"step": None},
        {"history": 1},
        {"whose": "other"},
        {"whose": 7},
        {"tensors": None},
        {"tensors": [["w", "float32"]]},
        {"tensors": [["w", "Tensor", [4, 4]]]},
        {"tensors": [["w", "__class__", [4, 4]]]},
        {"tensors": [["w", "float32", [-4, -4]]]},
        {"tensors": [["w", "float32", [1 << 62, 1 << 62]]]},
        {"tensors": [["w", "float32", [1 << 58]]]},
        {"tensors": [["w", "float32", [4, 4]], ["w", "float32", [4, 4]]]},
        {"blobs": [["b", -1]]},
        {"blobs": {"b": 1}},
        {"meta": []},
        {"size": 63},
        {"size": "64"},
        {"extra": 1},
    ],
    ids=json.dumps,
)
def test_an_answer_that_makes_no_sense_is_a_heal_error(change):
    good = answering(GOOD)
    assert fetch(good.address, TOKEN, 1, SOON).tensors["w"].shape == (4, 4)
    good.close()
    server = answering(GOOD | change)
    with pytest.raises(HealError):
        fetch(server.address, TOKEN, 1, timedelta(seconds=2))
    server.close()


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": "join"},
        {"step": "x"},
        {"step": 1, "history": 0, "whose": None},
        {"step": 1 << 80, "history": 0, "whose": RANK_1},
        [],
    ],
    ids=str,
)
def test_a_request_that_makes_no_sense_is_refused_and_the_next_is_served(server, request_):
    server.serve(1, 0, a_state(rows=1))
    channel = wire.connect(server.address, TOKEN, SOON, purpose=heal.PURPOSE)
    with pytest.raises(wire.WireError):
        channel.ask(request_)
    channel.close()
    assert fetch(server.address, TOKEN, 1, SOON, whose=RANK_1)


def test_a_state_cannot_be_read_on_the_way():
    source = Door("127.0.0.1", TOKEN, SOON)
    state = HealState({}, {"note": "meta in the clear"}, {"blob": b"bytes in the clear" * 10})
    source.serve(1, 0, state)
    with relay(source.address) as (address, seen):
        assert fetch(address, TOKEN, 1, SOON) == state
    assert len(seen) > 300
    assert b"in the clear" not in seen
    source.shutdown()
