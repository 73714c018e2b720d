"""A group's voice when the lighthouse's host falls silent: nothing is reset, nothing is answered."""

import signal
import threading
import time

import pytest

from everstep.quorum.membership import Membership
from everstep.quorum.notes import open_note, seal_note
from quorum.test_gate import BEATS_S, LIFE, SOON, Lighthouse, asks

FOUND_S = 20.0
"""From a new lighthouse's publication to a quorum of all groups there: a second where nothing else runs. A group that
waits for the silent one waits for as long as its request lasts."""


@pytest.fixture
def lighthouses(tmp_path):
    both = [Lighthouse(tmp_path), Lighthouse(tmp_path)]
    yield both
    for one in both:
        one.process.send_signal(signal.SIGCONT)
        one.end()


def test_groups_leave_a_silent_lighthouse_for_the_one_that_is_published(lighthouses):
    """One of them waits there for a quorum; the other beats, and asks when it is done with its step."""
    old, new = lighthouses
    at = [old.address]
    members = [
        Membership(group=g, life=LIFE, token=old.token, find_lighthouse=lambda: at[0], heartbeat_timeout_s=BEATS_S)
        for g in range(2)
    ]
    time.sleep(BEATS_S)
    old.process.send_signal(signal.SIGSTOP)
    found = []
    waiting = threading.Thread(target=lambda: found.append(asks(members[0], 0, 1, 3 * SOON)), daemon=True)
    waiting.start()
    time.sleep(1.0)
    at[0], begun = new.address, time.monotonic()
    time.sleep(1.0)
    groups, _ = asks(members[1], 1, 1)
    waiting.join(60)
    assert found[0][0] == groups == [0, 1], "nobody has a quorum of its own"
    assert time.monotonic() - begun < FOUND_S
    for member in members:
        member.leave()


TOKEN, OTHER = bytes(range(32)), bytes(32)


def test_a_note_is_good_for_its_place_only():
    sealed = seal_note(TOKEN, b"5 of 2", b"state")
    assert open_note(TOKEN, b"5 of 2", sealed) == b"state"
    assert open_note(TOKEN, b"5 of 2", seal_note(TOKEN, b"5 of 2", b"")) == b""
    for token, place, note in [
        (OTHER, b"5 of 2", sealed),
        (TOKEN, b"5 of 3", sealed),
        (TOKEN, b"5 of 2", sealed[:-1]),
        (TOKEN, b"5 of 2", b"state"),
        (TOKEN, b"5 of 2", sealed[:-1] + b"x"),
        (TOKEN, b"5 of 2s", sealed.replace(b"state", b"tate")),
    ]:
        assert open_note(token, place, note) == b""
