"""A run directory that others wrote to makes an injector do nothing of theirs."""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace

import psutil
import pytest

from everstep.chaos.cluster import find_target
from everstep.chaos.kinds import own_segments
from everstep.chaos.signals import Receivers
from everstep.chaos.target import LocalTarget, _keeps
from everstep.chaos.view import Proc, View
from everstep.run import typed
from everstep.run.directory import RunDir, holder_of
from everstep.run.events import EventLog
from everstep.run.token import UnsafeError, run_token
from everstep.run.typed import UnfitError
from everstep.snapshot.peers import Place
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id


def test_a_directory_that_others_can_write_to_is_no_run(tmp_path):
    EventLog(tmp_path, None, None, "supervisor").close()
    (tmp_path / "config.toml").write_text("")
    tmp_path.chmod(0o777)
    with pytest.raises(UnsafeError, match="chmod go-w"):
        find_target(tmp_path)


def test_only_this_runs_arenas_are_removed(tmp_path):
    """`kill-host` removed whatever folder a keeper's file named."""
    token = run_token(tmp_path)
    apart = Snapshot(failure_domain="group", segment_dir=str(tmp_path))
    mine = Segment.of(apart, run_id(token), 0)
    mine.create()
    other = tmp_path / "precious"
    other.mkdir()
    link = Segment.of(replace(apart, segment_dir=str(tmp_path / "links")), run_id(token), 2)
    link.root.mkdir()
    link.path.symlink_to(other)
    places = [
        Place(0, "h", "h:1", 77, str(mine.path), 0.0),
        Place(1, "h", "h:1", 77, str(other), 0.0),
        Place(1, "h", "h:1", 77, str(mine.path), 0.0),
        Place(0, "h", "h:1", 77, str(tmp_path / "x" / ".." / mine.path.name), 0.0),
        Place(2, "h", "h:1", 77, str(link.path), 0.0),
    ]
    assert [segment.path for segment in own_segments(tmp_path, places)] == [mine.path]


def test_a_keeper_of_another_run_is_not_ours(tmp_path):
    def words(run_dir):
        return ["python", "-m", "everstep.snapshot.keeper", json.dumps({"run_dir": str(run_dir), "group": 0})]

    assert _keeps(words(tmp_path), tmp_path)
    for other in (tmp_path.with_name(tmp_path.name + "2"), tmp_path.parent, tmp_path / "sub"):
        assert not _keeps(words(other), tmp_path)
    assert not _keeps(["vim", "everstep.snapshot.keeper", str(tmp_path)], tmp_path)
    assert not _keeps([*words(tmp_path)[:3], "[" * 9999], tmp_path)


def test_the_launcher_is_who_holds_the_lock(tmp_path, victim):
    """Not whoever the file names, nor one that has it open besides."""
    assert holder_of(tmp_path) is None
    reader = subprocess.Popen(
        ["tail", "-f", str(tmp_path / ".lock")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    (tmp_path / ".lock").write_text(f"{reader.pid}\n")
    reader.kill()
    reader.wait()
    reader = subprocess.Popen(["tail", "-f", str(tmp_path / ".lock")], stdout=subprocess.DEVNULL)
    (tmp_path / ".lock").write_text(f"{reader.pid}\n")
    deadline = time.monotonic() + 10
    while not psutil.Process(reader.pid).open_files() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert holder_of(tmp_path) is None
    run = RunDir(tmp_path)
    run.lock()
    assert holder_of(tmp_path)[0] == os.getpid()
    assert LocalTarget(View(tmp_path)).signal([Proc(victim.pid, time.time(), "worker", 0)], signal.SIGTERM) == [
        victim.pid
    ]
    (tmp_path / ".lock").write_text(f"{reader.pid}\n")
    assert holder_of(tmp_path) is None
    run.unlock()
    reader.kill()
    reader.wait()


def test_what_is_signalled_is_told_by_type_only():
    sound = {"procs": [[7, 0.0]], "job": 3, "node": "n1"}
    assert typed.parse(Receivers, sound).node == "n1"
    for change in (
        {"procs": [[1, 0.0]]},
        {"procs": [[-1, 0.0]]},
        {"procs": [["7", 0.0]]},
        {"procs": [[True, 0.0]]},
        {"procs": {}},
        {"job": "1; touch x"},
        {"node": "x; touch y"},
        {"node": "-x"},
    ):
        with pytest.raises(UnfitError):
            typed.parse(Receivers, sound | change)
