"""The lighthouse's gate: groups form quorums through it, and no stranger stops, delays or ends them."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torchft.coordination import LighthouseClient

from everstep import wire
from everstep.launch.machine import free_port
from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.gate import Gate, QuorumRules
from everstep.quorum.lighthouse import serve
from everstep.quorum.membership import PURPOSE, Membership
from everstep.quorum.request import NOTHING, Request, State, encode, name_of
from everstep.run.events import read_events
from everstep.run.token import run_token
from forked import Forked

SOON = timedelta(seconds=10)
LIFE = "0123456789abcdef"
TOKEN = bytes(32)
JOIN_S = 0.5
BEATS_S = 1.0
"""Seconds in which each group has sent a heartbeat and the gate has handled it."""
FRESH = State(0, 0)


@pytest.fixture
def make():
    """Creates gates and members that find them, and ends both after the test."""
    gates, members = [], []

    def gate(groups=0, min_groups=1, heartbeat_timeout_s=2.0, join_s=JOIN_S):
        rules = QuorumRules(min_groups, join_s, heartbeat_timeout_s, groups=groups)
        gates.append(Gate(TOKEN, ("127.0.0.1", 0), rules, lambda count, last: None))
        return gates[-1]

    def member(group, at, life=LIFE, fenced=lambda: False, token=TOKEN):
        """`at`: a list with one gate, which a test may replace."""
        options = {"group": group, "life": life, "token": token, "fenced": fenced, "heartbeat_timeout_s": 2.0}
        members.append(Membership(find_lighthouse=lambda: f"http://{at[0].address}", **options))
        return members[-1]

    yield SimpleNamespace(gate=gate, member=member)
    for one in members:
        one.leave()
    for one in gates:
        one.close()


def connect(address):
    return wire.connect(address, TOKEN, SOON, purpose=PURPOSE)


def a_request(group, number=1, state=FRESH):
    return Request(group, LIFE, number, state, NOTHING, False, "", "127.0.0.1:1", ("127.0.0.1:2",))


def quorum(group, number=1):
    return {"replica": name_of(group, LIFE), "said": encode(a_request(group, number)), "timeout_s": 8.0}


def ask(member, group, number, state=FRESH):
    return [found.group for found in member.ask(a_request(group, number, state), SOON)[1]]


def all_ask(members, number, later_s=0.0):
    """Let each member ask, all but the first one `later_s` later. Return the groups of each member's quorum."""
    with ThreadPoolExecutor(len(members)) as pool:
        first = pool.submit(ask, members[0], 0, number, State(1, 1))
        time.sleep(later_s)
        rest = [pool.submit(ask, member, group, number, State(1, 1)) for group, member in enumerate(members[1:], 1)]
        return [one.result() for one in (first, *rest)]


def members_of_a_quorum(make, count, **rules):
    """Return a gate and `count` members that have been in a quorum together."""
    at = [make.gate(count, **rules)]
    members = [make.member(group, at) for group in range(count)]
    assert {len(found) for found in all_ask(members, 1)} == {count}
    return at, members


def ask_until_together(member, group, state):
    """Ask, and ask again if the quorum has an old start of a group, as groups do. Return whether that succeeded."""
    for number in range(2, 50):
        with contextlib.suppress(QuorumUnavailable):
            found = member.ask(a_request(group, number, state), SOON / 4)[1]
            if [one.name for one in found] == [name_of(0, LIFE), name_of(1, LIFE)]:
                return True
    return False


@pytest.fixture
def lighthouse(tmp_path):
    """Starts a lighthouse process, whose quorums wait 5 s for a group that sends heartbeats but does not ask."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "everstep.quorum.lighthouse", "--bind", address, "--run-dir", tmp_path]
    process = Forked([*map(str, command), "--join-timeout-s", "5"], stdout=subprocess.PIPE)
    assert f"lighthouse on {address}" in process.stdout.readline()
    yield SimpleNamespace(address=address, token=run_token(tmp_path), run_dir=tmp_path)
    process.kill()
    process.wait()


def test_a_stranger_gets_no_answer_and_stalls_nobody(lighthouse, make):
    """Strangers: a client of torchft, a process with another run's token, and one that sends random bytes."""
    members = [make.member(group, [lighthouse], token=lighthouse.token) for group in range(3)]
    stop, refused = threading.Event(), []

    def send_as_strangers():
        while not stop.is_set():
            for name in ("stray-job_0", name_of(0, LIFE)):
                try:
                    client = LighthouseClient(f"http://{lighthouse.address}", SOON)
                    client.heartbeat(name, timeout=SOON)
                    refused.append(False)
                except Exception:  # noqa: BLE001  the Rust client's
                    refused.append(True)
            try:
                connect(lighthouse.address)
            except wire.WireError as error:
                refused.append("did not accept the run's token" in str(error))
            with contextlib.suppress(OSError), socket.create_connection(wire.parse_address(lighthouse.address)) as sock:
                sock.send(os.urandom(500))

    waits_s = []
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(ask, members, range(3), [1] * 3))  # now the gate has heard all groups
        thread = threading.Thread(target=send_as_strangers)
        thread.start()
        while len(refused) < 5:
            time.sleep(0.01)
        for number in range(2, 12):
            begun = time.monotonic()
            assert list(pool.map(ask, members, range(3), [number] * 3)) == [[0, 1, 2]] * 3
            waits_s.append(time.monotonic() - begun)
    stop.set()
    thread.join()
    assert all(refused)
    assert sorted(waits_s)[5] < 4.0, "a quorum that waited for the stranger would take 5 s"
    told = list(read_events(lighthouse.run_dir, {"stranger_refused"}))
    assert 1 <= len(told) < len(refused), "refusals are reported once a minute"
    assert "does not know the run's token" in told[0]["reason"]


def test_a_message_that_is_no_request_ends_its_own_connection(make):
    good, gate = quorum(7), make.gate()
    for message in (
        {}, {"replica": 7}, {"replica": good["replica"], "op": "kill"}, good | {"replica": name_of(8, LIFE)},
        good | {"said": "{}"}, good | {"timeout_s": -1}, good | {"more": 1},
    ):  # fmt: skip
        channel = connect(gate.address)
        with pytest.raises(wire.RefusedError, match="not understood"):
            channel.ask(message)
        channel.close()


def test_a_port_that_is_taken_and_a_directory_without_trust_are_a_sentence(make, tmp_path, capsys):
    taken = make.gate().address
    assert serve(taken, tmp_path) == 1
    assert f"lighthouse: cannot listen on {taken}" in capsys.readouterr().err
    tmp_path.chmod(0o777)
    assert serve(taken, tmp_path) == 1
    assert "chmod -R go-w" in capsys.readouterr().err


def test_a_group_that_is_too_few_is_told_so(make):
    member = make.member(0, [make.gate(min_groups=2, heartbeat_timeout_s=1.0)])
    with pytest.raises(QuorumUnavailable, match=r"^groups 0 are alive, and fault_tolerance\.min_groups is 2$"):
        member.ask(a_request(0), timedelta(seconds=2))


@pytest.mark.parametrize(("state", "why"), [
    (NOTHING, "none of the groups that make steps has asked"), (State(0, 1), "^groups 0 are alive but ask for none"),
])  # fmt: skip
def test_a_group_that_gets_no_quorum_is_told_why(make, state, why):
    """And not only that the last retry, shortly before the timeout, got no answer."""
    at = [make.gate(2)]
    members = [make.member(group, at) for group in range(2)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, members[0], 0, 1, State(0, 1))
        assert ask(members[1], 1, 1, state) == other.result() == [0, 1]
    with pytest.raises(QuorumUnavailable, match=why):
        members[1].ask(a_request(1, 2, state), timedelta(seconds=8))


def test_a_start_that_does_not_count_any_more_keeps_nobody_waiting(make):
    """A gate that hears of an old start last takes it for the one that counts, until the old start finds that it is
    fenced. Its timeout is the longest one that a config may have, which the gate must accept."""
    (at, members), fenced = members_of_a_quorum(make, 2), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        old = make.member(0, at, "old", fenced.is_set)
        waits = pool.submit(old.ask, dataclasses.replace(a_request(0), life="old"), timedelta(seconds=3e8))
        time.sleep(BEATS_S)
        assert not waits.done()
        found = [pool.submit(ask_until_together, *both, State(1, 1)) for both in zip(members, range(2), strict=True)]
        fenced.set()
        assert [one.result() for one in found] == [True, True]
        with contextlib.suppress(QuorumUnavailable):  # or it was in a quorum before it read its fence
            waits.result(timeout=1)


@pytest.mark.parametrize("dies", [True, False])
def test_a_quorum_waits_for_a_group_that_hangs_until_the_join_timeout_and_not_for_a_dead_one(make, dies):
    _, members = members_of_a_quorum(make, 3, join_s=2.5)
    time.sleep(BEATS_S)
    if dies:
        members[2].leave()
    begun = time.monotonic()
    assert all_ask(members[:2], 2, JOIN_S / 2) == [[0, 1]] * 2
    assert (time.monotonic() - begun < 2.5) == dies


def slow_client(monkeypatch, heartbeat_s):
    """Let each heartbeat that a gate sends its lighthouse last `heartbeat_s`. In the returned dict a test sets how long
    the next heartbeat ("heartbeat"), each quorum ("quorum"), and the way of a group's next request last, in seconds."""
    late = {}

    class Slow:
        def __init__(self, *words):
            self.client = LighthouseClient(*words)

        def heartbeat(self, *words, **more):
            time.sleep(late.pop("heartbeat", heartbeat_s))
            self.client.heartbeat(*words, **more)

        def quorum(self, *words, **more):
            time.sleep(late.pop(more["replica_id"], 0.0))
            found = self.client.quorum(*words, **more)
            time.sleep(late.get("quorum", 0.0))
            return found

    monkeypatch.setattr("everstep.quorum.gate.LighthouseClient", Slow)
    return late


def test_a_group_that_asked_once_in_vain_makes_the_others_ask_once(make):
    at, members = members_of_a_quorum(make, 3)
    with pytest.raises(QuorumUnavailable):
        make.member(3, at).ask(a_request(3, state=NOTHING), timedelta(seconds=1))
    time.sleep(BEATS_S)
    assert all(member.wanted for member in members)
    assert all_ask(members, 2) == [[0, 1, 2]] * 3
    time.sleep(BEATS_S)
    assert not any(member.wanted for member in members)


def test_a_gate_that_stands_still_as_soon_as_somebody_asks_believes_no_quorum_of_that_one(make, monkeypatch):
    late = slow_client(monkeypatch, 0.0)
    _, members = members_of_a_quorum(make, 3)
    time.sleep(BEATS_S)
    assert all_ask(members, 2) == [[0, 1, 2]] * 3
    time.sleep(0.3)  # the lighthouse takes all groups for alive for another 0.3 s
    late |= {"heartbeat": 0.3, "quorum": 0.1}
    assert all_ask(members, 3, JOIN_S - 0.1) == [[0, 1, 2]] * 3


def test_a_quorum_is_believed_as_long_as_nobody_can_have_been_taken_for_dead(make, monkeypatch):
    """A round of heartbeats to all groups takes longer than the interval between rounds, as with hundreds of groups.
    One of four tries has to succeed, as a busy machine may be even later."""
    late, waits_s = slow_client(monkeypatch, 0.09), [1.0]
    _, members = members_of_a_quorum(make, 3)
    late["quorum"] = 0.18
    while len(waits_s) <= 4 and min(waits_s) > 0.75:
        time.sleep(BEATS_S)
        begun = time.monotonic()
        all_ask(members, 1 + len(waits_s))
        waits_s.append(time.monotonic() - begun)
    assert min(waits_s) < 0.75, "a quorum that is not believed is asked for again, which takes longer"


def test_a_gate_that_stood_still_until_groups_closed_their_connections_waits_for_all_of_them(make):
    at, members = members_of_a_quorum(make, 2)
    for member in members:
        member.leave()
    time.sleep(1.1)  # more than half the heartbeat timeout, and less than all of it
    assert all_ask([make.member(group, at) for group in range(2)], 2, JOIN_S / 2) == [[0, 1]] * 2


def test_a_group_that_waits_for_a_quorum_is_in_it_though_its_heartbeats_connect_anew(make):
    at = [make.gate(2)]
    beats, waits, member = connect(at[0].address), connect(at[0].address), make.member(1, at)
    beats.ask({"replica": name_of(0, LIFE)})
    time.sleep(BEATS_S)
    waits.send_frame(quorum(0))
    beats.ask({"replica": name_of(0, LIFE)})
    beats.close()
    time.sleep(BEATS_S)
    assert ask(member, 1, 1) == [0, 1]


def test_a_group_that_makes_the_newest_steps_is_waited_for_while_its_heartbeats_connect_anew(make):
    """Another group, which missed these steps, asks meanwhile."""
    at = [make.gate(1)]
    member = make.member(0, at)
    assert ask(member, 0, 1, State(9, 1)) == [0]
    beats, waits = connect(at[0].address), connect(at[0].address)
    beats.ask({"replica": name_of(1, LIFE), "makes": 40 * "9"})
    beats.close()
    time.sleep(0.5)
    with ThreadPoolExecutor(1) as pool:
        asks = pool.submit(ask, member, 0, 2, State(9, 1))
        time.sleep(0.2)
        waits.send_frame(quorum(1))
        assert asks.result() == [0, 1]


def test_a_request_that_came_too_late_for_a_quorum_leaves_nobody_out_of_the_next(make, monkeypatch):
    """It waits at the lighthouse until then, longer than the join timeout."""
    late = slow_client(monkeypatch, 0.0)
    at, members = members_of_a_quorum(make, 3)
    late[name_of(3, LIFE)] = JOIN_S
    with ThreadPoolExecutor(1) as pool:
        joins = pool.submit(ask, make.member(3, at), 3, 1)
        time.sleep(BEATS_S)
        assert all(member.wanted for member in members)
        assert all_ask(members, 2) == [[0, 1, 2]] * 3
        time.sleep(3 * JOIN_S)
        assert [*all_ask(members, 3, JOIN_S / 2), joins.result()] == [[0, 1, 2, 3]] * 4


def test_requests_that_come_together_do_not_wake_each_other(make, monkeypatch):
    looked, look = [], Gate._stood_still
    slow_client(monkeypatch, 0.005)
    _, members = members_of_a_quorum(make, 60)
    time.sleep(BEATS_S)
    monkeypatch.setattr(Gate, "_stood_still", lambda gate: looked.append(gate) or look(gate))
    assert {len(found) for found in all_ask(members, 2)} == {60}
    assert len(looked) < 10 * len(members)


def test_a_request_is_answered_if_an_earlier_one_of_its_group_is_at_the_lighthouse(make, monkeypatch):
    """The group has opened another connection, as the gate did not answer. The quorum forms of the earlier one."""
    late = slow_client(monkeypatch, 0.0)
    gate = make.gate(groups=2)
    old, one, new = (connect(gate.address) for _ in range(3))
    for group, channel in enumerate((old, one)):
        channel.ask({"replica": name_of(group, LIFE)})
    time.sleep(JOIN_S)  # half a heartbeat timeout without a message would make the gate start over
    old.send_frame(quorum(0))
    time.sleep(JOIN_S / 5)
    late[name_of(0, LIFE)] = JOIN_S
    new.send_frame(quorum(0, 2))
    time.sleep(JOIN_S / 5)
    one.send_frame(quorum(1))
    new.set_timeout(timedelta(seconds=5))
    assert new.receive_frame() == one.receive_frame()


@pytest.mark.parametrize(("is_new", "steps"), [(False, 1), (True, 1), (True, 0)])
def test_groups_that_make_steps_apart_hear_of_each_other(make, is_new, steps):
    """Each of two groups is alone in a quorum, as after a network split. Then both send heartbeats to the same gate,
    and the one that missed the newest steps, or only the newest quorum, waits for the other one."""
    places = [[make.gate(1)], [make.gate(1)]]
    members = [make.member(group, at) for group, at in enumerate(places)]
    for group, member in enumerate(members):
        assert ask(member, group, 1 + group, State(9 + steps * group, 1)) == [group]
    places[0][0].close()
    places[0][0] = places[1][0] = make.gate(2) if is_new else places[1][0]
    time.sleep(2 * BEATS_S)
    assert [member.wanted for member in members] == [True, True]
    with ThreadPoolExecutor(2) as pool:
        wait = [pool.submit(ask, members[0], 0, 2, State(9, 1))]
        wait.append(pool.submit(ask, make.member(2, places[0]), 2, 1, NOTHING))
        time.sleep(3 * JOIN_S)
        assert [ask(members[1], 1, 3, State(9 + steps, 1)), *(one.result() for one in wait)] == [[0, 1, 2]] * 3
    time.sleep(2 * BEATS_S)
    assert [member.wanted for member in members] == [False, False]
