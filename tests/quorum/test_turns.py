"""Who comes back while the others make a step that is longer than the join timeout leaves none of them out; and groups
that make step after step hear that somebody waits for them."""

import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from everstep import wire
from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.gate import Gate, Rules
from everstep.quorum.membership import PURPOSE, Membership
from everstep.quorum.request import NOTHING, State, name_of
from quorum.test_gate import LIFE, SOON, a_request, quorum

TOKEN = bytes(32)
JOIN_S = 0.5
BEATS_S = 1.0
"""In which each group has beaten, and the gate looked."""


def a_gate(groups, port=0):
    return Gate(TOKEN, ("127.0.0.1", port), Rules(1, JOIN_S, 2.0, groups=groups), lambda count, last: None)


def a_member(group, at, life=LIFE, fenced=lambda: False):
    """`at`: a list of one gate, which may become another one."""
    return Membership(
        group=group,
        life=life,
        token=TOKEN,
        find_lighthouse=lambda: f"http://{at[0].address}",
        fenced=fenced,
        heartbeat_timeout_s=2.0,
    )


def connected(gate):
    return wire.connect(gate.address, TOKEN, SOON, purpose=PURPOSE)


def asks(member, group, number, state):
    return [found.group for found in member.ask(a_request(group, number, state), SOON)[1]]


def asks_until_together(member, group, state):
    """As groups do: who meets a start that is gone asks again."""
    end, number = time.monotonic() + 2 * SOON.total_seconds(), 1
    while time.monotonic() < end:
        number += 1
        with contextlib.suppress(QuorumUnavailable):
            found = member.ask(a_request(group, number, state), SOON / 4)[1]
            if [one.name for one in found] == [name_of(0, LIFE), name_of(1, LIFE)]:
                return True
    return False


def test_who_waits_in_vain_is_told_why():
    """And not that the lighthouse was silent when it was asked again for the last moments."""
    at = [a_gate(2)]
    members = [a_member(group, at) for group in range(2)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(asks, members[0], 0, 1, State(0, 1))
        assert asks(members[1], 1, 1, NOTHING) == other.result() == [0, 1]
    with pytest.raises(QuorumUnavailable, match="none of the groups that make a step has asked"):
        members[1].ask(a_request(1, 2, NOTHING), timedelta(seconds=8))
    for member in members:
        member.leave()
    at[0].close()


def test_the_longest_timeout_that_a_config_may_have_is_none_that_the_gate_refuses():
    at = [a_gate(1)]
    member = a_member(0, at)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(member.ask, a_request(0), timedelta(seconds=3e8))
        try:
            assert found.result(timeout=SOON.total_seconds())[1] == [a_request(0)]
        finally:
            member.leave()
    at[0].close()


def test_a_start_that_does_not_count_any_more_keeps_nobody_waiting():
    """A gate that hears of it after the one that counts takes it for that one; the others wait for who makes steps."""
    at, fenced = [a_gate(2)], threading.Event()
    members = [a_member(group, at) for group in range(2)]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(asks, member, group, 1, State(0, 1)) for group, member in enumerate(members)]
        assert [one.result() for one in found] == [[0, 1]] * 2
        old = a_member(0, at, "old", fenced.is_set)
        waits = pool.submit(old.ask, dataclasses.replace(a_request(0), life="old"), timedelta(seconds=60))
        time.sleep(BEATS_S)
        found = [pool.submit(asks_until_together, *both, State(0, 1)) for both in zip(members, range(2), strict=True)]
        fenced.set()
        assert [one.result() for one in found] == [True, True]
        with contextlib.suppress(QuorumUnavailable):  # or it was in a quorum before it looked at its fence
            waits.result(timeout=1)
    for member in members:
        member.leave()
    at[0].close()


def test_who_dies_while_nobody_asks_is_not_waited_for_by_those_who_ask_next():
    at = [a_gate(3)]
    members = [a_member(group, at) for group in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(asks, member, group, 1, State(1, 1)) for group, member in enumerate(members)]
        assert [one.result() for one in found] == [[0, 1, 2]] * 3
        time.sleep(BEATS_S)
        members[2].leave()
        begun = time.monotonic()
        found = [pool.submit(asks, member, group, 2, State(1, 1)) for group, member in enumerate(members[:2])]
        assert [one.result() for one in found] == [[0, 1]] * 2
        assert time.monotonic() - begun < BEATS_S / 5
    for member in members[:2]:
        member.leave()
    at[0].close()


def test_a_request_is_answered_if_an_earlier_one_of_its_group_holds_its_place_at_the_lighthouse():
    """The group has hung up on that, as the gate was silent for longer than a heartbeat timeout."""
    gate = Gate(TOKEN, ("127.0.0.1", 0), Rules(1, JOIN_S, 1.0), lambda count, last: None)
    beats, old, one, new = ([connected(gate) for _ in range(2)], *(connected(gate) for _ in range(3)))
    stop = threading.Event()

    def beat(seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until and not stop.wait(0.1):
            for group, channel in enumerate(beats):
                channel.ask({"replica": name_of(group, LIFE)})

    beat(0.3)
    old.send_frame(quorum(0))
    beat(2.0)
    time.sleep(1.2)  # nobody is heard, and all may be new when they are
    old.cut()
    beating = threading.Thread(target=beat, args=(20.0,))
    beating.start()
    one.send_frame(quorum(1))
    time.sleep(0.15)  # it looks again before the other one
    new.send_frame(quorum(0, 2))
    new.set_timeout(timedelta(seconds=5))
    assert new.receive_frame() == one.receive_frame()
    stop.set()
    beating.join()
    gate.close()


def test_groups_that_make_steps_apart_hear_of_each_other():
    """Each has a quorum of its own, as after a cut between them; then they beat at the same gate."""
    places = [[a_gate(1)], [a_gate(1)]]
    members = [a_member(group, at) for group, at in enumerate(places)]
    for group, member in enumerate(members):
        assert asks(member, group, 1, State(1, 1)) == [group]
    places[0][0].close()
    places[0][0] = places[1][0]
    time.sleep(2 * BEATS_S)
    assert [member.wanted for member in members] == [True, True]
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(asks, members[0], 0, 2, State(1, 1))
        time.sleep(JOIN_S)
        assert asks(members[1], 1, 2, State(1, 1)) == waits.result() == [0, 1]
    time.sleep(2 * BEATS_S)
    assert [member.wanted for member in members] == [False, False]
    for member in members:
        member.leave()
    places[1][0].close()
