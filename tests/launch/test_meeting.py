"""How the agents of a group meet, and what a worker learns of its place in the group."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from everstep.launch import meeting
from everstep.launch.meeting import Meeting
from everstep.launch.rounds import Alone, AskedToStop, NodeLost, Round
from everstep.run.directory import LaunchError
from forked import Forked, ran

SCRIPT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_a_worker_finds_what_torchrun_would_have_set(tmp_path):
    """Whatever this version of torchrun sets."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH")}
    options = ["--standalone", "--nproc-per-node", "1"]
    done = ran([sys.executable, "-m", "torch.distributed.run", *options, str(script)], env=environment)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for_the_agent = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    of_its_own = {"TORCHELASTIC_ERROR_FILE"}
    ours = Round("run", "127.0.0.1", 1, 0, [1], None).environment(0, "role", 0)
    assert theirs.keys() - environment.keys() - for_the_agent == ours.keys() | of_its_own
    alike = ours.keys() - {
        "MASTER_ADDR",
        "MASTER_PORT",
        "ROLE_NAME",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_MAX_RESTARTS",
    }
    assert {name: theirs[name] for name in alike} == {name: ours[name] for name in alike}


def test_ranks_are_counted_over_nodes_of_any_size():
    place = Round("run", "n0", 29500, 1, [2, 3, 1], None)
    assert list(place.ranks) == [2, 3, 4]
    said = place.environment(3, "group-0", 5)
    assert (said["RANK"], said["LOCAL_RANK"], said["LOCAL_WORLD_SIZE"], said["WORLD_SIZE"]) == ("3", "1", "3", "6")
    assert (said["GROUP_RANK"], said["GROUP_WORLD_SIZE"], said["TORCHELASTIC_RESTART_COUNT"]) == ("1", "3", "5")


FIRST_NODE = """
import signal, sys, time
from pathlib import Path
from everstep.launch.meeting import Meeting
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
first = Meeting(Path(sys.argv[1]), "7.0", 2, 0, 1, "127.0.0.1", lambda: bool(asked))
first.next_round()
while True:
    first.beat() if asked else first.is_awaited()
    time.sleep(0.05)
"""


def of_two(folder, node_rank, stopping=lambda: False):
    return Meeting(folder / "rendezvous.json", "7.0", 2, node_rank, 1, "127.0.0.1", stopping)


@pytest.fixture
def first(tmp_path):
    """The agent of a first node, which watches."""
    process = Forked([sys.executable, "-c", FIRST_NODE, str(tmp_path / "rendezvous.json")])
    yield process
    process.kill()
    process.wait()


def test_a_first_node_that_is_stopped_is_not_waited_for_for_ever(first, tmp_path, monkeypatch):
    """Its kernel takes what is sent to it, and nobody answers."""
    monkeypatch.setattr(meeting, "PEER_SILENCE_S", 1.0)
    second = of_two(tmp_path, 1)
    second.next_round()
    assert not second.is_awaited()
    os.kill(first.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(NodeLost, match="node 0 of this group has been silent"):
        second.is_awaited()
    assert time.monotonic() - begun < 5.0


def test_a_node_that_stops_is_not_missed_by_one_that_was_not_asked_yet(first, tmp_path, monkeypatch):
    """Its workers make their last step, which may take a while."""
    monkeypatch.setattr(meeting, "PEER_SILENCE_S", 1.5)
    second = of_two(tmp_path, 1)
    second.next_round()
    first.send_signal(signal.SIGTERM)
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        assert not second.is_awaited()
        time.sleep(0.05)


def test_who_is_asked_to_stop_does_not_wait_for_a_first_node_that_is_stopped(first, tmp_path):
    asked = threading.Event()
    second = of_two(tmp_path, 1, asked.is_set)
    second.next_round()
    os.kill(first.pid, signal.SIGSTOP)
    threading.Timer(0.5, asked.set).start()
    begun = time.monotonic()
    assert not second.is_awaited()
    assert not second.all_ended()
    with pytest.raises(AskedToStop):
        second.next_round()
    assert time.monotonic() - begun < 5.0


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_told_with_the_flag(host):
    with pytest.raises(LaunchError, match=rf"{host}: this machine cannot listen there: .* --host"):
        Alone("7.0", host, 1).next_round()


def test_a_node_does_not_come_twice(first, tmp_path):
    of_two(tmp_path, 1).next_round()
    with pytest.raises(RuntimeError, match=r"an agent of node 1 has been .* higher --restart"):
        of_two(tmp_path, 1).next_round()


@pytest.mark.parametrize(("alone", "missing"), [(0, 1), (1, 0)])
def test_a_node_that_never_comes_is_not_waited_for_for_ever(tmp_path, monkeypatch, alone, missing):
    monkeypatch.setattr(meeting, "ARRIVAL_S", 1.0)
    with pytest.raises(NodeLost, match=f"node {missing} of this group has not come within 1 s"):
        of_two(tmp_path, alone).next_round()
