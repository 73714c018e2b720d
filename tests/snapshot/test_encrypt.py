"""What keepers send can be read by whoever is on the way, or not (fault_tolerance.encrypt): the keeper decides."""

import contextlib
import dataclasses
import socket
import threading

import pytest

from everstep import wire
from everstep.snapshot import keepers, peers
from snapshot_cluster import TIMEOUT, Cluster


class Relay:
    """Between a client and a keeper: keeps all that passes. `change` alters what the keeper says first."""

    def __init__(self, address, change=lambda data: data):
        self._to, self._change = wire.parse_address(address), change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.create_connection(self._to)
                threading.Thread(target=self._pass, args=(near, far, lambda data: data), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, self._change), daemon=True).start()

    def _pass(self, source, target, change):
        first = True
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                data, first = change(data) if first else data, False
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def payload(run, address):
    """The bytes of group 0's buffer, as they are read through `address`."""
    place = dataclasses.replace(peers.read_places(run.run_dir)[0], address=address)
    found, _ = peers.reachable([place], run.token, TIMEOUT)
    held = next(one for one in found[place] if one.header.kind == "data")
    channel = peers.connect(address, run.token, TIMEOUT)
    with contextlib.closing(channel):
        peers.open_buffer(channel, held.header)
        sink = bytearray(64 << 10)
        channel.ask_range(0, len(sink))
        channel.receive_range(wire.Pieces([memoryview(sink)]), 0, len(sink))
    return bytes(sink)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_keeper_sends_what_only_members_can_read_if_it_was_told_to(encrypt):
    with Cluster(1) as run:
        run.kill_keeper(0)
        place = keepers.start_keeper(run.run_dir, 0, "127.0.0.1", run.settings_of(0), encrypt=encrypt)
        run.commit(7, settle=False)
        run.wait()
        relay = Relay(place.address)
        data = payload(run, relay.address)
        assert len(set(data)) > 100
        assert (data[1000:1100] in relay.seen) == (b"identity" in relay.seen) == (not encrypt)
        if encrypt:
            with pytest.raises(wire.WireError, match="no protection of messages in common"):
                wire.connect(place.address, run.token, TIMEOUT)


def test_a_relay_cannot_talk_a_member_out_of_encryption():
    """The server says what it takes; that is part of what both sides prove."""
    token = bytes(range(32))
    server = wire.Server("127.0.0.1", token, lambda channel: channel.send_frame({}), TIMEOUT, encrypt=True)
    offer = len(wire.MAGIC)  # where the server's suites stand
    for offered in range(8):
        relay = Relay(server.address, lambda data, offered=offered: data[:offer] + bytes([offered]) + data[offer + 1 :])
        if offered == 4:  # as the server said it
            wire.connect(relay.address, token, TIMEOUT, encrypt=None).close()
            continue
        with pytest.raises(wire.WireError, match=r"did not accept|in common"):
            wire.connect(relay.address, token, TIMEOUT, encrypt=None)
    server.close()
