"""Whatever a relay does to a transfer, the receiver gets the bytes that were sent, in order, or a WireError."""

import os
import random
import socket
from datetime import timedelta

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from damage import damaged
from everstep import wire
from everstep.wire.channel import Channel
from everstep.wire.sealing import TAG_BYTES, Sealer

SOON, TIMEOUT = timedelta(seconds=0.5), timedelta(seconds=30)
MESSAGES = [{"op": "read", "offset": 0, "length": 10}, {"refuse": None}, {"text": "x" * 50}]
PAYLOAD = bytes(range(200))
WHOLE = [*MESSAGES, PAYLOAD]
KEY, OTHER = b"k" * 32, b"o" * 32


class _Local(socket.socket):
    def setsockopt(self, level, *rest):
        if level != socket.IPPROTO_TCP:  # a socket pair has no TCP
            super().setsockopt(level, *rest)


def a_pair(key, other=OTHER):
    """Return a channel that seals with `key` and opens with `other`, and the socket at the other end."""
    near, far = socket.socketpair()
    channel = Channel(_Local(fileno=os.dup(near.fileno())), "peer", SOON)
    channel.seal(Sealer(key), Sealer(other))
    near.close()
    return channel, far


def a_transfer():
    channel, far = a_pair(KEY)
    for message in MESSAGES:
        channel.send_frame(message)
    channel.send_range(wire.Pieces([memoryview(PAYLOAD)]), 0, len(PAYLOAD))
    channel.close()
    with far, far.makefile("rb") as sent:
        return sent.read()


def received(data, key=KEY):
    """Return what a receiver accepts of these bytes, up to None for the first refusal."""
    channel, far = a_pair(OTHER, key)
    far.sendall(data)
    far.close()
    taken, sink = [], bytearray(len(PAYLOAD))
    try:
        for _ in MESSAGES:
            taken.append(channel.receive_frame())
        channel.receive_range(wire.Pieces([memoryview(sink)]), 0, len(PAYLOAD))
        taken.append(bytes(sink))
    except wire.WireError:
        taken.append(None)
    channel.close()
    return taken


def records(data):
    """Split a transfer into its records, whose ends a relay can see."""
    out, at = [], 0
    while at < len(data):
        size = 13 + int.from_bytes(data[at + 9 : at + 13], "little") + TAG_BYTES
        out.append(data[at : at + size])
        at += size
    return out


def test_a_transfer_arrives_and_cannot_be_read_on_the_way():
    data = a_transfer()
    assert received(data) == WHOLE
    assert PAYLOAD not in data
    assert b"offset" not in data


def test_records_are_sealed_with_their_number():
    sealer, body = Sealer(KEY), [b"first ", b"", PAYLOAD]
    for number in range(3):
        nonce = number.to_bytes(8, "little") + bytes(4)
        sealed = AESGCM(KEY[:16]).encrypt(nonce, b"".join(body), b"head")
        assert sealer.seal(b"head", [memoryview(part) for part in body]) == b"head" + sealed


def test_records_out_of_place_are_refused():
    there = records(a_transfer())
    assert len(there) == 4
    for other in (
        [there[1], *there[1:]],  # another in its place
        [there[0], *there],  # repeated
        there[1:],  # left out
        [there[0], there[2], there[1], *there[3:]],  # exchanged
    ):
        taken = received(b"".join(other))
        assert taken[-1] is None
        assert taken[:-1] == WHOLE[: len(taken) - 1]
    assert received(b"".join(there), key=OTHER) == [None], "of the other direction, or another channel"


@pytest.mark.parametrize("rounds", [1000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_records_are_never_believed_and_never_crash(rounds):
    chance, data, refused = random.Random(rounds), a_transfer(), 0
    for _ in range(rounds):
        taken = received(damaged(data, chance))
        good = taken[:-1] if taken[-1] is None else taken
        assert good == WHOLE[: len(good)], "something else was believed"
        refused += taken[-1] is None
    assert refused > 0.94 * rounds
