"""Members of a process group detect at once that one of them died or left."""

import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest

from everstep import wire
from everstep.launch.machine import free_port
from everstep.quorum import watch
from everstep.quorum.reachability import Reachability
from everstep.quorum.watch import PeerLost, PeerWatch
from watched import until

KEY = b"k" * 32
SOON_S, TOKEN, SILENCE = 60.0, bytes(range(32)), timedelta(seconds=6)
LONGEST = timedelta(seconds=3e8)
"""The longest timeout that a config may have, which the kernel has to accept."""


@pytest.fixture
def members():
    """Two watches in this process, and a queue for each one's announced losses."""
    losses = [queue.Queue() for _ in range(2)]
    return [PeerWatch("127.0.0.1", one.put, TOKEN, LONGEST) for one in losses], losses


@pytest.mark.parametrize("seen_first", ["by the watch", "in a sum"])
def test_a_killed_process_is_noticed_within_the_grace_time(monkeypatch, seen_first):
    if seen_first == "in a sum":
        monkeypatch.setattr(PeerWatch, "_look", lambda self, ready: time.sleep(0.01))
    code = (
        "import sys; from datetime import timedelta; from everstep.quorum.watch import PeerWatch\n"
        "watch = PeerWatch('127.0.0.1', print, bytes(range(32)), timedelta(seconds=6))\n"
        "print(watch.address, flush=True); sys.stdin.readline()\n"
    )
    peer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    losses = queue.Queue()
    mine = PeerWatch("127.0.0.1", losses.put, TOKEN, SILENCE)
    try:
        address = peer.stdout.readline().strip()
        mine.begin(KEY, {1: address}, timedelta(seconds=60))
        killed = time.monotonic()
        monkeypatch.delattr(threading.Thread, "start")  # the machine may have no process free just now
        os.kill(peer.pid, signal.SIGKILL)
        if seen_first == "in a sum":
            peer.wait()
            mine.end(KEY)
        else:
            assert losses.get(timeout=SOON_S) == KEY
            assert time.monotonic() - killed < watch.GRACE_S + 10.0
        assert mine.died == {address}
    finally:
        peer.kill()
        peer.wait()


def test_a_member_that_gave_up_left_or_was_cut_off_has_not_died(members):
    watches, losses = members

    def cut(channel, key):
        with channel.sock as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    between = wire.Door("127.0.0.1", TOKEN, cut, purpose=watch.PURPOSE)
    for mine, peer in (watches, watches[::-1]):
        mine.begin(KEY, {0: peer.address}, timedelta(seconds=60))
    watches[0].end(KEY)
    assert losses[1].get(timeout=SOON_S) == KEY
    assert not watches[1].died
    for key, address in ((KEY[1:] + b"0", watches[0].address), (KEY[1:] + b"1", between.address)):
        watches[0].end(key)
        watches[1].begin(key, {0: address}, timedelta(seconds=60))
        assert losses[1].get(timeout=SOON_S) == key
        assert not watches[1].died
    between.close()


def test_a_peer_that_is_not_there_is_named(members):
    watches, nobody = members[0], f"127.0.0.1:{free_port()}"
    with pytest.raises(PeerLost, match=nobody) as lost:
        watches[0].begin(KEY, {5: watches[1].address, 7: nobody}, timedelta(seconds=1))
    assert lost.value.places == {7}


def test_a_peer_that_answers_but_could_not_be_connected_for_days_is_still_tried():
    peers = Reachability(TOKEN, timedelta(seconds=1))
    peers._failures["127.0.0.1:1"] = 2000
    peers.note_failed(["127.0.0.1:1"])
    assert peers.unreachable() == {"127.0.0.1:1"}


def test_connections_of_process_groups_that_came_to_nothing_are_given_back(members):
    """Connections of members that connected and left before this rank knew of the process group."""
    watches, process = members[0], psutil.Process()
    before = process.num_fds()
    for number in range(50):
        key = bytes([number]) * 32
        watches[1].begin(key, {0: watches[0].address}, timedelta(seconds=60))
        watches[1].end(key)
    until(lambda: process.num_fds() <= before, "the descriptors to be given back")
