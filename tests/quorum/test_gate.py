"""The gate of the lighthouse: groups of the run form quorums through it, and nobody else stops, stalls or ends them."""

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

import pytest
from torchft.coordination import LighthouseClient

from everstep import wire
from everstep.launch.machine import free_port
from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.lighthouse import main
from everstep.quorum.membership import PURPOSE, Membership
from everstep.quorum.request import NOTHING, Request, State, encode, name_of
from everstep.run.events import read_events
from everstep.run.token import run_token
from forked import Forked

SOON = timedelta(seconds=10)
LIFE = "0123456789abcdef"
BEATS_S = 1.0
"""The lighthouse's heartbeat timeout."""


class Lighthouse:
    def __init__(self, run_dir, min_groups=1, more=()):
        self.run_dir, self.port = run_dir, free_port()
        self.address, self.token = f"http://127.0.0.1:{self.port}", run_token(run_dir)
        command = [sys.executable, "-m", "everstep.quorum.lighthouse", "--bind", f"127.0.0.1:{self.port}"]
        command += ["--run-dir", str(run_dir), "--min-groups", str(min_groups), "--join-timeout-s", "5"]
        command += ["--heartbeat-timeout-s", str(BEATS_S), *more]
        self.process = Forked(command, stdout=subprocess.PIPE)
        self.said = self.process.stdout.readline()

    def member(self, group, token=None, life=LIFE):
        return Membership(
            group=group,
            life=life,
            token=token or self.token,
            find_lighthouse=lambda: self.address,
            heartbeat_timeout_s=BEATS_S,
        )

    def connect(self):
        return wire.connect(f"127.0.0.1:{self.port}", self.token, SOON, purpose=PURPOSE)

    def ask(self, group, number=1, unreached=()):
        """A group's request for a quorum; the channel on which it will be answered."""
        channel = self.connect()
        channel.send_frame(quorum(group, number, unreached))
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


def a_request(group, number=1, state=State(0, 0)):  # noqa: B008
    return Request(group, LIFE, number, state, NOTHING, False, "", "127.0.0.1:1", ("127.0.0.1:2",))


def quorum(group, number=1, unreached=()):
    said = encode(dataclasses.replace(a_request(group, number), unreached=unreached))
    return {"replica": name_of(group, LIFE), "said": said, "timeout_s": 8.0}


def asks(member, group, number, timeout=SOON):
    begin = time.monotonic()
    groups = [found.group for found in member.ask(a_request(group, number), timeout)[1]]
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


def test_a_stranger_gets_no_answer_and_stalls_nobody(lighthouse):
    """One that speaks as torchft's clients do, one that has another run's token, one that sends anything."""
    members = [lighthouse.member(group) for group in range(3)]
    time.sleep(0.5)
    alone = rounds(members, 10, 101)
    stop, refused = threading.Event(), []

    def pose():
        while not stop.is_set():
            for name in ("stray-job_0", name_of(0, LIFE)):
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


def test_what_is_no_request_of_a_group_ends_its_own_connection(lighthouse):
    good = quorum(7)
    for message in (
        {},
        {"replica": 7},
        {"replica": good["replica"], "op": "kill"},
        good | {"replica": name_of(8, LIFE)},
        good | {"said": "{}"},
        good | {"timeout_s": -1},
        good | {"more": 1},
    ):
        channel = lighthouse.connect()
        with pytest.raises(wire.RefusedError, match="not understood"):
            channel.ask(message)
        channel.close()


def test_a_port_that_is_taken_and_a_directory_without_trust_are_a_sentence(lighthouse, tmp_path, capsys):
    words = ["--bind", f"127.0.0.1:{lighthouse.port}", "--run-dir", str(tmp_path)]
    assert main(words) == 1
    assert f"lighthouse: cannot listen on 127.0.0.1:{lighthouse.port}" in capsys.readouterr().err
    tmp_path.chmod(0o777)
    assert main(words) == 1
    assert "chmod go-w" in capsys.readouterr().err


def test_a_group_that_is_too_few_is_told_so(tmp_path):
    lighthouse = Lighthouse(tmp_path, min_groups=2)
    member = lighthouse.member(0)
    try:
        with pytest.raises(QuorumUnavailable, match=r"^groups 0 are heard, and fault_tolerance\.min_groups is 2$"):
            member.ask(a_request(0), timedelta(seconds=2))
    finally:
        member.leave()
        lighthouse.end()
