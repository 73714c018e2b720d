"""A peer without the token is refused and costs almost nothing. A peer with it is admitted, whatever others do."""

import contextlib
import os
import resource
import socket
import threading
import time
from datetime import timedelta

import psutil
import pytest

from everstep import wire
from everstep.wire import door

TOKEN = bytes(range(32))
SOON = timedelta(seconds=10)


def echo(channel):
    while True:
        channel.send_frame(channel.receive_frame())


@pytest.fixture
def server():
    server = wire.Server("127.0.0.1", TOKEN, echo, SOON)
    yield server
    server.close()


def answers(address, **kwargs):
    channel = wire.connect(address, TOKEN, SOON, **kwargs)
    try:
        return channel.ask({"a": 1}) == {"a": 1}
    finally:
        channel.close()


def test_a_thousand_strangers_keep_no_member_out_and_few_descriptors(server):
    process = psutil.Process()
    before, threads = process.num_fds(), threading.active_count()
    crowd = [socket.create_connection(wire.parse_address(server.address), 5) for _ in range(1000)]
    assert answers(server.address)
    assert process.num_fds() - before - len(crowd) <= 133
    assert threading.active_count() <= threads + 1
    for one in crowd:
        one.close()


def test_a_server_raises_its_limit_of_descriptors():
    """A trainer needs two for each other group, and those of its connections for sums."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, before[1]))
    server = wire.Server("127.0.0.1", TOKEN, echo, SOON)
    try:
        members = [wire.connect(server.address, TOKEN, SOON) for _ in range(50)]
        assert all(member.ask({"a": 1}) == {"a": 1} for member in members)
    finally:
        server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_handshake_has_one_deadline_however_busily_a_stranger_sends(server, monkeypatch):
    monkeypatch.setattr(door, "HANDSHAKE_TIMEOUT", timedelta(seconds=0.5))
    stranger = socket.create_connection(wire.parse_address(server.address))
    stranger.settimeout(0.1)
    begin = time.monotonic()
    with contextlib.suppress(OSError):
        while time.monotonic() - begin < 60:
            stranger.send(b"x")
            with contextlib.suppress(TimeoutError):
                if stranger.recv(100) == b"":
                    break
    assert time.monotonic() - begin < 30
    stranger.close()


@pytest.mark.parametrize("greeting", [b"", door.MAGIC + bytes(32)], ids=["at once", "after it has greeted"])
def test_a_listener_that_drips_does_not_hold_a_member_and_is_not_said_to_refuse(monkeypatch, greeting):
    monkeypatch.setattr(door, "HANDSHAKE_TIMEOUT", timedelta(seconds=0.5))
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def drip():
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            peer.send(greeting)
            while not over.wait(0.1):
                peer.send(door.MAGIC[:1])

    threading.Thread(target=drip, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(wire.WireError, match="took too long"):  # a busy keeper must not seem to refuse the token
        wire.connect(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, 6 * SOON)
    assert time.monotonic() - begin < 30
    over.set()
    listener.close()


def test_a_server_of_one_service_refuses_a_connection_for_another():
    server = wire.Server("127.0.0.1", TOKEN, echo, SOON, purpose="keeper")
    with pytest.raises(wire.WireError, match="did not accept the run's token"):
        answers(server.address, purpose="heal")
    assert answers(server.address, purpose="keeper")
    server.close()


def test_a_wrong_address_is_refused():
    for address in ("", ":1", "h:", "h:x", "h:65536", "h:²", "h:-1", "a b:1", "a\x1b[m:1", "x" * 300 + ":1", "[::1:1"):
        with pytest.raises(wire.WireError, match="not an address"):
            wire.parse_address(address)
