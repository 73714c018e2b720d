"""The gate of the lighthouse: groups of the run form quorums through it, and nobody else stops, stalls or ends them."""

import contextlib
import http.client
import os
import random
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

from everstep.launch.probe import answers
from everstep.quorum.gate import replica_of
from everstep.quorum.identity import replica_id
from everstep.quorum.lighthouse import main
from everstep.quorum.membership import Membership
from everstep.run.events import read_events
from everstep.run.token import run_token
from everstep.step.quorum import NO_STATE, Request

SOON = timedelta(seconds=10)
LIFE = "0123456789abcdef"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Lighthouse:
    def __init__(self, run_dir, min_groups=1):
        self.run_dir, self.port = run_dir, free_port()
        self.address, self.token = f"http://127.0.0.1:{self.port}", run_token(run_dir)
        command = [sys.executable, "-m", "everstep.quorum.lighthouse", "--bind", f"127.0.0.1:{self.port}"]
        command += ["--run-dir", str(run_dir), "--min-groups", str(min_groups), "--join-timeout-s", "5"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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


def test_a_stranger_gets_no_answer_and_stalls_nobody(lighthouse):
    members = [lighthouse.member(group) for group in range(3)]
    time.sleep(0.5)
    alone = rounds(members, 10, 101)
    client, stop, refused = LighthouseClient(lighthouse.address, SOON), threading.Event(), []

    def pose():
        ids = ["stray-job_0", replica_id(bytes(32), 0, LIFE), f"000000:{LIFE}", "x" * 5000, ""]
        while not stop.is_set():
            for name in ids:
                with contextlib.suppress(RuntimeError):
                    client.heartbeat(name, timeout=SOON)
                    refused.append(False)
                try:
                    client.quorum(replica_id=name, timeout=SOON, store_address="s", step=10**6, world_size=1, data=None)
                except Exception as error:  # noqa: BLE001  the Rust client's
                    refused.append("of another run" in str(error))

    thread = threading.Thread(target=pose)
    thread.start()
    while len(refused) < 5:
        time.sleep(0.01)
    among = rounds(members, 10, 111)
    stop.set()
    thread.join()
    assert all(refused)
    assert sorted(among)[5] < sorted(alone)[5] + 0.2, "a quorum that waits for the stranger takes 5 s"
    (told,) = read_events(lighthouse.run_dir, {"stranger_refused"})
    assert "stray-job_0" in told["reason"]
    for member in members:
        member.leave()


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


def test_a_port_that_is_taken_and_a_directory_without_trust_are_a_sentence(lighthouse, tmp_path):
    words = ["--bind", f"127.0.0.1:{lighthouse.port}", "--run-dir", str(tmp_path)]
    with pytest.raises(SystemExit, match=f"^lighthouse: cannot listen on 127.0.0.1:{lighthouse.port}"):
        main(words)
    tmp_path.chmod(0o777)
    with pytest.raises(SystemExit, match="chmod go-w"):
        main(words)


def heartbeat(name):
    return b"\x0a" + bytes([len(name)]) + name


def quorum(name, rest=b""):
    member = heartbeat(name) + b"\x1a\x01s\x20\x03" + rest
    return b"\x0a" + bytes([len(member)]) + member


def test_the_id_that_counts_is_the_one_that_is_read():
    assert replica_of("Heartbeat", heartbeat(b"abc")) == "abc"
    assert replica_of("Quorum", quorum(b"abc")) == "abc"
    for method, message in (
        ("Heartbeat", heartbeat(b"abc") + heartbeat(b"evil")),
        ("Quorum", quorum(b"abc", heartbeat(b"evil"))),
        ("Quorum", quorum(b"abc") + quorum(b"evil")),
        ("Heartbeat", b"\x1a\x01s" + heartbeat(b"abc")),
        ("Heartbeat", b""),
        ("Heartbeat", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        ("Heartbeat", b"\x0a\x09abc"),
        ("Heartbeat", heartbeat(b"\xff\xfe")),
        ("Heartbeat", heartbeat(b"abc") + b"\x8a\x00\x04evil"),
    ):
        with pytest.raises(ValueError):  # noqa: PT011  whichever it is
            replica_of(method, message)


def test_damaged_requests_are_refused_or_name_an_id():
    chance = random.Random(1)
    for _ in range(5000):
        message = bytearray(chance.choice([quorum(b"abc" * 9), heartbeat(b"abc" * 9)]))
        for _ in range(chance.randrange(1, 4)):
            message[chance.randrange(len(message))] = chance.randrange(256)
        with contextlib.suppress(ValueError):
            replica_of(chance.choice(["Quorum", "Heartbeat"]), bytes(message[: chance.randrange(len(message) + 1)]))
