"""The gate of the lighthouse: groups of the run form quorums through it, and nobody else stops, stalls or ends them."""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torchft.coordination import LighthouseClient

from everstep import wire
from everstep.launch.probe import answers
from everstep.quorum.gate import PURPOSE
from everstep.quorum.identity import replica_id
from everstep.quorum.lighthouse import main
from everstep.quorum.membership import Membership
from everstep.run.events import read_events
from everstep.run.token import run_token
from everstep.step.quorum import NO_STATE, Request
from forked import Forked

SOON = timedelta(seconds=10)
LIFE = "0123456789abcdef"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Lighthouse:
    def __init__(self, run_dir, min_groups=1, more=()):
        self.run_dir, self.port = run_dir, free_port()
        self.address, self.token = f"http://127.0.0.1:{self.port}", run_token(run_dir)
        command = [sys.executable, "-m", "everstep.quorum.lighthouse", "--bind", f"127.0.0.1:{self.port}"]
        command += ["--run-dir", str(run_dir), "--min-groups", str(min_groups), "--join-timeout-s", "5", *more]
        self.process = Forked(command, stdout=subprocess.PIPE)
        self.said = self.process.stdout.readline()

    def member(self, group, token=None):
        member = Membership(
            group=group,
            life=LIFE,
            token=token or self.token,
            find_lighthouse=lambda: self.address,
            connect_timeout=SOON,
        )
        member.follow()
        return member

    def connect(self):
        return wire.connect(f"127.0.0.1:{self.port}", self.token, SOON, purpose=PURPOSE)

    def ask(self, replica, said="x"):
        """A replica's request for a quorum; the channel on which it will be answered."""
        channel = self.connect()
        channel.send_frame(
            {"op": "quorum", "replica": replica, "store": "s", "step": 0, "timeout_s": 8.0, "data": {"said": said}}
        )
        return channel

    def end(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def lighthouse(tmp_path_factory):
    one = Lighthouse(tmp_path_factory.mktemp("run"))
    assert "lighthouse on 127.0.0.1" in one.said
    yield one
    one.end()


def asks(member, group, number, timeout=SOON):
    request = Request(group, LIFE, number, 0, 0, False, NO_STATE, 0, False, "", "127.0.0.1:1", ("127.0.0.1:2",))
    begin = time.monotonic()
    groups = [found.group for found in member.ask(request, timeout)[1]]
    return groups, time.monotonic() - begin


def rounds(members, count, first):
    """Quorums of several groups at once; the longest wait of each round."""
    waits = []
    for number in range(first, first + count):
        with ThreadPoolExecutor(len(members)) as pool:
            results = list(pool.map(asks, members, range(len(members)), [number] * len(members)))
        assert [groups for groups, _ in results] == [[*range(len(members))]] * len(members)
        waits.append(max(wait for _, wait in results))
    return waits


def test_groups_of_the_run_form_quorums(lighthouse):
    members = [lighthouse.member(group) for group in range(3)]
    time.sleep(0.5)  # all of them have beaten
    rounds(members, 5, 1)
    for member in members:
        member.leave()


def test_members_are_told_what_was_said_in_the_request_that_counts(tmp_path):
    """A group asks again while it still waits: torchft's lighthouse keeps one of its requests."""
    one = Lighthouse(tmp_path, min_groups=2)
    replicas = [replica_id(one.token, group, LIFE) for group in range(2)]

    waiting = [one.ask(replicas[0], "first"), one.ask(replicas[0], "second"), one.ask(replicas[1], "other")]
    answered = [channel.receive_frame() for channel in waiting]
    members = [answer["members"] for answer in answered if "members" in answer]  # one that came too late has none
    assert members[0] in ([[replicas[0], {"said": s}], [replicas[1], {"said": "other"}]] for s in ("first", "second"))
    assert len(members) >= 2
    assert members == members[:1] * len(members)
    for channel in waiting:
        channel.close()
    one.end()


def test_a_stranger_gets_no_answer_and_stalls_nobody(lighthouse):
    """One that speaks as torchft's clients do, one that has another run's token, one that sends anything."""
    members = [lighthouse.member(group) for group in range(3)]
    time.sleep(0.5)
    alone = rounds(members, 10, 101)
    stop, refused = threading.Event(), []

    def pose():
        while not stop.is_set():
            for name in ("stray-job_0", replica_id(bytes(32), 0, LIFE)):
                try:
                    client = LighthouseClient(lighthouse.address, SOON)
                    client.heartbeat(name, timeout=SOON)
                    refused.append(False)
                except Exception:  # noqa: BLE001  the Rust client's
                    refused.append(True)
            try:
                wire.connect(f"127.0.0.1:{lighthouse.port}", bytes(32), SOON, purpose=PURPOSE)
            except wire.WireError as error:
                refused.append("did not accept the run's token" in str(error))
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", lighthouse.port), 5) as sock:
                sock.send(os.urandom(500))

    thread = threading.Thread(target=pose)
    thread.start()
    while len(refused) < 5:
        time.sleep(0.01)
    among = rounds(members, 10, 111)
    stop.set()
    thread.join()
    assert all(refused)
    assert sorted(among)[5] < sorted(alone)[5] + 4.0, "a quorum that waits for the stranger takes 5 s"
    told = list(read_events(lighthouse.run_dir, {"stranger_refused"}))
    assert 1 <= len(told) < len(refused), "it is told once a minute"
    assert "does not know the run's token" in told[0]["reason"]
    for member in members:
        member.leave()


def test_who_has_the_token_can_speak_for_replicas_of_the_run_only(lighthouse):
    """And what is no request ends its own connection."""
    good = replica_id(lighthouse.token, 7, LIFE)
    quorum = {"op": "quorum", "replica": good, "store": "s", "step": 0, "timeout_s": 1.0, "data": {}}
    for message, why in (
        ({"op": "beat", "replica": "stray-job_0"}, "of another run"),
        ({"op": "beat", "replica": replica_id(bytes(32), 7, LIFE)}, "of another run"),
        ({"op": "beat"}, "of another run"),
        ({"op": "kill", "replica": good}, "not understood"),
        (quorum | {"step": "1"}, "not understood"),
        (quorum | {"step": 1 << 70}, "not understood"),
        (quorum | {"timeout_s": -1}, "not understood"),
        (quorum | {"data": {"a": 1}}, "not understood"),
        (quorum | {"more": 1}, "not understood"),
    ):
        channel = lighthouse.connect()
        with pytest.raises(wire.RefusedError, match=why):
            channel.ask(message)
        channel.close()


def test_with_encrypt_what_is_said_cannot_be_read(tmp_path):
    one = Lighthouse(tmp_path, more=["--encrypt"])
    member = one.member(0)
    assert asks(member, 0, 1)[0] == [0]
    with pytest.raises(wire.WireError, match="encrypt must be the same"):
        one.connect()
    member.leave()
    one.end()


def test_nobody_reaches_what_ends_a_group(lighthouse):
    """torchft's own page and its kill endpoint, through the gate and behind it."""
    victim = replica_id(lighthouse.token, 0, LIFE)
    for method, path in (("GET", "/"), ("GET", "/status"), ("POST", f"/replica/{victim}/kill")):
        connection = http.client.HTTPConnection("127.0.0.1", lighthouse.port, timeout=5)
        connection.request(method, path)
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse()
        connection.close()
    listening = {
        place.laddr.port
        for place in psutil.Process(lighthouse.process.pid).net_connections("tcp")
        if place.status == psutil.CONN_LISTEN
    }
    (inner,) = listening - {lighthouse.port}
    with pytest.raises(OSError, match="timed out"):
        socket.create_connection(("127.0.0.1", inner), timeout=1)


def test_a_thousand_connections_keep_no_group_out(lighthouse):
    crowd = [socket.create_connection(("127.0.0.1", lighthouse.port), 5) for _ in range(1000)]
    for number, one in enumerate(crowd):
        with contextlib.suppress(OSError):
            one.send([b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"][number % 4])
    member = lighthouse.member(5)
    assert asks(member, 5, 1)[0] == [5]
    assert answers(lighthouse.address)
    member.leave()
    for one in crowd:
        one.close()
    assert lighthouse.process.poll() is None


def test_one_that_does_not_answer_is_found_out(tmp_path):
    one = Lighthouse(tmp_path)
    assert answers(one.address)
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(10) == 0
    assert not answers(one.address)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.MonkeyPatch.context() as patch:
        patch.setattr("everstep.launch.probe.PROBE_TIMEOUT_S", 0.3)
        assert not answers(f"http://127.0.0.1:{mute.getsockname()[1]}")


def test_a_port_that_is_taken_and_a_directory_without_trust_are_a_sentence(lighthouse, tmp_path, capsys):
    words = ["--bind", f"127.0.0.1:{lighthouse.port}", "--run-dir", str(tmp_path)]
    assert main(words) == 1
    assert f"lighthouse: cannot listen on 127.0.0.1:{lighthouse.port}" in capsys.readouterr().err
    tmp_path.chmod(0o777)
    assert main(words) == 1
    assert "chmod go-w" in capsys.readouterr().err


def test_one_that_died_while_it_waited_for_its_turn_is_in_no_quorum(tmp_path):
    """Nor is a quorum refused because of it."""
    one = Lighthouse(tmp_path)
    replicas = [replica_id(one.token, group, LIFE) for group in range(2)]

    first = one.ask(replicas[0])
    first.receive_frame()
    dying = one.ask(replicas[1])
    time.sleep(0.5)
    dying.close()
    again = one.ask(replicas[0])
    assert [replica for replica, _ in again.receive_frame()["members"]] == replicas[:1]
    for channel in (first, again):
        channel.close()
    one.end()


def test_nobody_is_put_into_a_quorum_with_one_that_died_while_it_waited(tmp_path):
    """Its heart has beaten a moment ago: without the gate the others would try to connect to it."""
    one = Lighthouse(tmp_path, min_groups=2)
    replicas = [replica_id(one.token, group, LIFE) for group in range(3)]

    beating = [one.connect() for _ in replicas]
    for channel, replica in zip(beating, replicas, strict=True):
        channel.send_frame({"op": "beat", "replica": replica})
        channel.receive_frame()
    dying, first = one.ask(replicas[2]), one.ask(replicas[0])
    time.sleep(0.3)
    dying.close()
    second = one.ask(replicas[1])
    assert [channel.receive_frame() for channel in (first, second)] == [
        {"failed": "1 of 3 members ended while they waited"}
    ] * 2
    again = [one.ask(replica) for replica in replicas[:2]]
    members = [channel.receive_frame()["members"] for channel in again]
    assert [[replica for replica, _ in said] for said in members] == [replicas[:2]] * 2
    for channel in (*beating, first, second, *again):
        channel.close()
    one.end()
