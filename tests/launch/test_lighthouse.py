"""The lighthouse of a run on a cluster: it is published, and of two the newer one counts."""

import contextlib
import os
import signal
import socket
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from everstep.config.sections import FaultTolerance
from everstep.launch import lighthouse
from everstep.launch.lighthouse_job import LINGER_S, is_over
from everstep.launch.prepare import Prepared
from everstep.run.address import publish_address, published_address
from everstep.run.beats import BeatFile, beat_path
from everstep.run.directory import End, LaunchError, groups_file, over_file, prepared_file, stop_file
from everstep.run.events import read_events
from everstep.run.files import write_json
from forked import Forked
from launched import DEADLINE_S, alive, environment, until


@pytest.fixture
def start(tmp_path, request):
    config = tmp_path / "run" / "config.toml"
    config.parent.mkdir()
    config.write_text("")
    settled = Prepared(2, 1, seed=0, steps=1, identity="", fault_tolerance=FaultTolerance(enable=True))
    write_json(prepared_file(config.parent), asdict(settled))
    command = [sys.executable, "-m", "everstep.cli", "lighthouse", str(config), "--run-dir", str(tmp_path / "run")]

    def _start():
        process = Forked([*command, "--host", "127.0.0.1"], env=environment())
        request.addfinalizer(lambda: (process.kill(), process.wait()))
        return process

    return _start


def test_a_lighthouse_of_a_stopped_run_says_why_it_ends(start, tmp_path, capfd):
    stop_file(tmp_path / "run").parent.mkdir(exist_ok=True)
    stop_file(tmp_path / "run").touch()
    assert start().wait(DEADLINE_S) == 0
    assert f"{stop_file(tmp_path / 'run')} exists" in capfd.readouterr().out


def test_of_two_lighthouses_of_a_run_the_older_one_ends(start, tmp_path):
    """A batch system may start a second one on another node while the first is still up."""
    run_dir = tmp_path / "run"
    older = start()
    first = started(run_dir, 1)[-1]
    start()
    second = started(run_dir, 2)[-1]
    assert older.wait(DEADLINE_S) == 0
    assert not alive(first["pid"])
    assert published_address(run_dir) == second["address"]


def test_a_lighthouse_whose_port_was_taken_meanwhile_moves_to_another_and_is_not_superseded(start, tmp_path):
    launcher, before = start(), started(tmp_path / "run", 1)[-1]

    def take():
        with contextlib.suppress(OSError):  # it has not quite ended
            return socket.create_server(("127.0.0.1", int(before["address"].rpartition(":")[2])))

    launcher.send_signal(signal.SIGSTOP)
    os.kill(before["pid"], signal.SIGKILL)
    with until(take, "its port"):
        launcher.send_signal(signal.SIGCONT)
        after = started(tmp_path / "run", 2)[-1]
    assert before["address"] != after["address"] == published_address(tmp_path / "run")
    assert launcher.poll() is None


def test_a_lighthouse_that_cannot_start_is_tried_less_and_less_often(tmp_path, monkeypatch):
    """Its host may have lost its address. It is given up only if it has never served."""
    (tmp_path / "state").mkdir()
    now = 0.0
    monkeypatch.setattr(lighthouse, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(lighthouse, "free_port", Mock(side_effect=[7, *[LaunchError("no such address")] * 99]))
    children = Mock(looked_mono=0.0, awake_mono=0.0, **{"start.return_value": Mock(alive=False)})
    one = lighthouse.Lighthouse(tmp_path, "127.0.0.1", FaultTolerance(enable=True), children, Mock())
    one.published = "http://127.0.0.1:7"

    def keep():
        nonlocal now
        for _ in range(300):
            now += 0.2
            one.keep()

    keep()
    assert 60 / lighthouse.LONGEST_PAUSE_S <= children.start.call_count < 20
    one.published = ""
    one._failures = 0
    with pytest.raises(LaunchError, match=r"does not start on 127\.0\.0\.1:7"):
        keep()


@pytest.mark.parametrize(("status", "over"), [("done", True), ("failed", False)])
def test_a_lighthouse_stays_for_groups_that_are_to_be_started_again(tmp_path, monkeypatch, status, over):
    """At a time limit such groups are away for longer than LINGER_S, even if another group has been given up."""
    with monkeypatch.context() as earlier:
        now = time.monotonic()
        earlier.setattr(time, "monotonic", lambda: now - 2 * LINGER_S)
        BeatFile(beat_path(tmp_path, 0, 0)).beat("done")
    write_json(over_file(tmp_path, 1), asdict(End(status, "")))
    write_json(groups_file(tmp_path), {"groups": 2})
    assert is_over(tmp_path) == over


def started(run_dir, number):
    """Wait for `number` starts of a lighthouse, and return their events."""
    kinds = {"lighthouse_started"}
    return until(lambda: (found := [*read_events(run_dir, kinds)])[number - 1 :] and found, "a lighthouse")


def test_an_agent_without_an_address_says_so_takes_the_published_one_and_obeys_the_stop_file(agent, tmp_path):
    one = agent("--training.steps", "1000000", published=False)
    until(lambda: "waiting for a lighthouse's address in" in one.console(), "it to be said")
    assert one.events("workers_started") == []
    publish_address(tmp_path / "run", "http://127.0.0.1:1")
    one.wait_for("commit")
    stop_file(tmp_path / "run").touch()
    assert (one.process.wait(DEADLINE_S), one.events("agent_ended")[-1]["status"]) == (0, "stopped")
    late = agent("--training.steps", "1000000", published=False)
    assert late.process.wait(DEADLINE_S) == 0
    assert f"stopped: {stop_file(tmp_path / 'run')} exists" in late.console()
