"""Members of a quorum notice at once when one of them ends or gives up."""

import os
import queue
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from everstep.quorum import watch
from everstep.quorum.watch import KEY_BYTES, PeerLost, PeerWatch

KEY, OTHER_KEY = b"k" * KEY_BYTES, b"o" * KEY_BYTES
SOON_S, TOKEN = 5.0, bytes(range(32))


@pytest.fixture
def members():
    """Three watches in this process, with queues of the losses they announce."""
    losses = [queue.Queue() for _ in range(3)]
    watches = [PeerWatch("127.0.0.1", losses[i].put, TOKEN) for i in range(3)]
    yield watches, losses
    for peer in watches:
        peer.close()


def watch_each_other(watches, key=KEY):
    for mine in watches:
        mine.begin(key, [peer.address for peer in watches if peer is not mine], timedelta(seconds=5))


def test_one_that_gives_up_is_noticed_by_all_others(members):
    watches, losses = members
    watch_each_other(watches)
    watches[0].end(KEY)
    assert losses[1].get(timeout=SOON_S) == losses[2].get(timeout=SOON_S) == KEY
    assert losses[0].empty(), "it knows itself"


def test_each_loss_is_announced_once_and_for_its_own_process_group_only(members):
    watches, losses = members
    watch_each_other(watches)
    watch_each_other(watches[:2], OTHER_KEY)
    watches[2].end(KEY)
    assert losses[0].get(timeout=SOON_S) == losses[1].get(timeout=SOON_S) == KEY
    time.sleep(4 * watch.GRACE_S)
    assert losses[0].empty()
    assert losses[1].empty()


def test_a_killed_process_is_noticed_within_the_grace_time():
    code = (
        "import sys, time\n"
        "from datetime import timedelta\n"
        "from everstep.quorum.watch import PeerWatch\n"
        "watch = PeerWatch('127.0.0.1', print, bytes(range(32)))\n"
        "print(watch.address, flush=True)\n"
        "sys.stdin.readline()\n"
        "time.sleep(60)\n"
    )
    peer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    losses = queue.Queue()
    mine = PeerWatch("127.0.0.1", losses.put, TOKEN)
    try:
        mine.begin(KEY, [peer.stdout.readline().strip()], timedelta(seconds=5))
        killed = time.monotonic()
        os.kill(peer.pid, signal.SIGKILL)
        assert losses.get(timeout=SOON_S) == KEY
        assert time.monotonic() - killed < watch.GRACE_S + 1.0
    finally:
        peer.kill()
        peer.wait()
        mine.close()


def test_a_peer_that_is_not_there_is_named(members):
    watches, _ = members
    watches[2].close()
    with pytest.raises(PeerLost, match=watches[2].address):
        watches[0].begin(KEY, [watches[2].address], timedelta(seconds=1))


def test_who_comes_late_to_a_broken_process_group_learns_it(members):
    watches, losses = members
    watches[0].end(KEY)
    watches[1].begin(KEY, [watches[0].address], timedelta(seconds=5))
    assert losses[1].get(timeout=SOON_S) == KEY
