"""Strangers that connect to the lighthouse as fast as they can, and send what they can, keep no group out."""

import contextlib
import os
import socket
import threading
import time

import psutil
import pytest

from everstep import wire
from everstep.quorum.membership import PURPOSE
from everstep.step.quorum import name_of
from quorum.test_gate import LIFE, SOON, Lighthouse, asks

GROWTH_BYTES = 150 << 20
CONNECTIONS = 4


def noise(number):
    return os.urandom(1 << 16)


def pings(number):
    """HTTP/2, as torchft's own lighthouse would answer it."""
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\x08\6\0\0\0\0\0" * 100


def proofs(number):
    """As long as a member's answer, and wrong: each costs the gate a code."""
    return bytes([2]) + os.urandom(96)


def nothing(number):
    return b""


def drips(number):
    time.sleep(0.02)
    return b"\2"


def flood(port, make, over, sent):
    """Again and again, on a new connection whenever the gate has enough of the old one."""
    while not over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.settimeout(0.2)
            for number in range(1 if make is nothing else 1000):
                sock.sendall(make(number))
                sent.append(1)
                if over.is_set():
                    break


@pytest.fixture(scope="module")
def lighthouse(tmp_path_factory):
    one = Lighthouse(tmp_path_factory.mktemp("run"))
    yield one
    one.end()


@pytest.mark.parametrize("make", [noise, pings, proofs, nothing, drips], ids=lambda make: make.__name__)
def test_a_flood_keeps_no_group_out(lighthouse, make):
    member = lighthouse.member(0)
    process = psutil.Process(lighthouse.process.pid)
    asks(member, 0, 1)
    before, over, sent = process.memory_info().rss, threading.Event(), []
    threads = [
        threading.Thread(target=flood, args=(lighthouse.port, make, over, sent), daemon=True)
        for _ in range(CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    try:
        while len(sent) < 20:
            time.sleep(0.01)
        for number in range(2, 8):
            assert asks(member, 0, number, SOON * 3)[0] == [0]
        channel = wire.connect(f"127.0.0.1:{lighthouse.port}", lighthouse.token, SOON * 3, purpose=PURPOSE)
        assert channel.ask({"op": "beat", "replica": name_of(0, LIFE)}) == {}
        channel.close()
    finally:
        over.set()
        for thread in threads:
            thread.join()
        member.leave()
    assert lighthouse.process.poll() is None
    assert process.memory_info().rss - before < GROWTH_BYTES
