"""What arrives is what was sent, in its place, or there is a WireError; whatever a relay does to it."""

import os
import random
import socket
from datetime import timedelta
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from damage import damaged
from everstep import wire
from everstep.wire import sealing
from everstep.wire.channel import CHUNK_BYTES, PIECE_BYTES, Channel, serve_ranges
from everstep.wire.sealing import Sealer, Suite

SOON, TIMEOUT = timedelta(seconds=0.5), timedelta(seconds=30)
SUITES = list(Suite)
MESSAGES = [{"op": "read", "offset": 0, "length": 10}, {"refuse": None}, {"text": "x" * 50}]
PAYLOAD = bytes(range(200))


class Line:
    """One direction of a session: what is sent stays in `record`, what is fed is received."""

    def __init__(self, suite, key=b"k" * 32, other_key=b"o" * 32):
        self._near, self._far = socket.socketpair()
        self._back, self._there = socket.socketpair()
        self.sender = Channel(_named(self._near), "sender", SOON, outgoing=Sealer(key, suite))
        incoming = Sealer(key, suite)
        outgoing = Sealer(other_key, suite)
        self.receiver = Channel(_named(self._there), "receiver", SOON, outgoing=outgoing, incoming=incoming)

    def recorded(self):
        self._near.shutdown(socket.SHUT_WR)
        data = bytearray()
        while piece := self._far.recv(1 << 16):
            data += piece
        return bytes(data)

    def feed(self, data):
        self._back.sendall(data)
        self._back.shutdown(socket.SHUT_WR)

    def close(self):
        self.sender.close()
        self.receiver.close()
        for sock in (self._near, self._far, self._back, self._there):
            sock.close()


class _Local(socket.socket):
    def setsockopt(self, level, *rest):
        if level != socket.IPPROTO_TCP:  # a socket pair has no TCP
            super().setsockopt(level, *rest)


def _named(sock):
    return _Local(fileno=os.dup(sock.fileno()))


def a_transfer(suite):
    line = Line(suite)
    for message in MESSAGES:
        line.sender.send_frame(message)
    line.sender.send_range(wire.Pieces([memoryview(PAYLOAD)]), 0, len(PAYLOAD))
    data = line.recorded()
    line.close()
    return data


def received(suite, data, key=b"k" * 32):
    """What the other side takes from these bytes, up to what it refuses."""
    line, taken = Line(suite, key), []
    line.feed(data)
    sink = bytearray(len(PAYLOAD))
    try:
        for _ in MESSAGES:
            taken.append(line.receiver.receive_frame())
        line.receiver.receive_range(wire.Pieces([memoryview(sink)]), 0, len(PAYLOAD))
        taken.append(bytes(sink))
    except wire.WireError:
        taken.append(None)
    finally:
        line.close()
    return taken


def splits(data):
    """The records, as a relay sees where each ends."""
    out, at = [], 0
    while at < len(data):
        size = 13 + int.from_bytes(data[at + 9 : at + 13], "little") + sealing.TAG_BYTES
        out.append(data[at : at + size])
        at += size
    return out


@pytest.mark.parametrize("suite", SUITES)
def test_a_transfer_arrives(suite):
    data = a_transfer(suite)
    assert received(suite, data) == [*MESSAGES, PAYLOAD]
    assert (PAYLOAD in data) == (b"offset" in data) == (suite != Suite.GCM)


@pytest.mark.parametrize("encrypt", [False, True])
def test_records_of_many_pieces_arrive(encrypt):
    """Parts that begin and end anywhere in the pieces by which records are sealed and sent."""
    data = random.Random(1).randbytes(3 * CHUNK_BYTES + 12_345)
    cuts = [0, 1, 1000, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7, CHUNK_BYTES + 1, len(data)]
    parts = wire.Pieces([memoryview(data)[a:b] for a, b in pairwise(cuts)])
    server = wire.Server("127.0.0.1", b"t" * 32, lambda c: serve_ranges(c, parts), TIMEOUT, encrypt=encrypt)
    arrived = bytearray(len(data))
    channels = [wire.connect(server.address, b"t" * 32, TIMEOUT, encrypt=None) for _ in range(2)]
    wire.pull(channels, wire.Pieces([memoryview(arrived)[:5], memoryview(arrived)[5:]]))
    for channel in channels:
        channel.close()
    server.shut()
    assert arrived == data


@pytest.mark.parametrize("suite", SUITES)
def test_a_message_is_sealed_as_the_standard_says(suite):
    key, body = b"k" * 32, [b"first ", b"", PAYLOAD]
    sealer, whole = Sealer(key, suite), b"".join(body)
    for number in range(3):
        message = sealer.seal(b"head")
        sent = b"".join(bytes(view) for piece in body for view in message.update([memoryview(piece)]))
        secret, open_to_all = (whole, b"head") if suite == Suite.GCM else (b"", b"head" + whole)
        told = AESGCM(key[:16]).encrypt(number.to_bytes(8, "little") + bytes(4), secret, open_to_all)
        assert (sent, message.tag()) == (told[:-16] or whole, told[-16:])


@pytest.mark.parametrize("suite", SUITES)
def test_records_out_of_place_are_refused(suite):
    records = splits(a_transfer(suite))
    assert len(records) == 5
    whole = [*MESSAGES, PAYLOAD]
    for other in (
        [records[1], *records[1:]],  # another in its place
        [records[0], *records],  # repeated
        records[1:],  # left out
        [records[0], records[2], records[1], *records[3:]],  # exchanged
    ):
        taken = received(suite, b"".join(other))
        assert taken[-1] is None
        assert taken[:-1] == whole[: len(taken) - 1]
    assert received(suite, b"".join(records), key=b"o" * 32) == [None], "of the other direction, or another channel"


def fuzz(rounds, seed):
    chance = random.Random(seed)
    transfers = {suite: a_transfer(suite) for suite in SUITES}
    whole = [*MESSAGES, PAYLOAD]
    refused = 0
    for _ in range(rounds):
        suite = chance.choice(SUITES)
        data = damaged(transfers[suite], chance)
        taken = received(suite, data)
        good = taken[:-1] if taken[-1] is None else taken
        assert good == whole[: len(good)], "something else was believed"
        refused += taken[-1] is None
    return refused


def test_damaged_records_are_never_believed_and_never_crash():
    assert fuzz(2000, 1) > 1900


@pytest.mark.slow
def test_many_damaged_records_are_never_believed_and_never_crash():
    assert fuzz(50_000, 2) > 47_000
