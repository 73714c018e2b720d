"""A run directory that others wrote to makes an injector do nothing of theirs."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from everstep.chaos import signals
from everstep.chaos.find import find_target
from everstep.chaos.guard import end_leftovers
from everstep.chaos.storage import FILLER, own_segments
from everstep.chaos.target import LocalTarget, _keeps
from everstep.chaos.undo import Undo
from everstep.chaos.view import Proc, View
from everstep.run.directory import LaunchError, RunDir, holder_of
from everstep.run.events import EventLog, read_events
from everstep.run.files import read_json, write_json
from everstep.run.token import run_token
from everstep.run.typed import UnfitError
from everstep.snapshot.peers import Place
from everstep.snapshot.segment import Segment, run_id


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)


def plant(run_dir, undo, name="guard-1.jsonl", mode=0o600):
    journal = run_dir / "state" / "chaos" / name
    journal.parent.mkdir(parents=True, exist_ok=True)
    held = {"fault": "x", "target_group": None, "lasts_s": 1.0, "undo": undo}
    journal.write_text(json.dumps({"number": 0, "held": held}) + "\n")
    journal.chmod(mode)
    return journal


def ended(run_dir):
    events = EventLog(run_dir, None, None, "chaos")
    end_leftovers(run_dir, events)
    return [event["kind"] for event in read_events(run_dir)]


def again(path):
    """A command that leaves a trace."""
    argv = [sys.executable, "-c", f"open({str(path)!r}, 'w')"]
    return {"argv": argv, "cwd": "/", "environment": dict(os.environ), "run_dir": str(path.parent), "killed": 99999}


def test_a_planted_journal_runs_no_command_and_kills_nobody(tmp_path, victim):
    trace = tmp_path / "trace"
    hostile = [
        {"do": "os:system", "args": {"command": f"touch {trace}"}},
        {"do": "everstep.chaos.launcher:start_again", "args": again(trace)},
        {"do": "everstep.chaos.signals:send", "args": {"procs": [[victim.pid, time.time()]], "signum": 9}},
        {"do": "continue", "args": {"procs": [[victim.pid, time.time()]], "signum": 9}},
        {"do": "continue", "args": {"procs": [[-1, time.time()]]}},
        {"do": "continue-on-nodes", "args": {"commands": [["touch", str(trace)]]}},
        {"do": "continue-on-nodes", "args": {"orders": [{"job": 1, "node": f"x; touch {trace}", "procs": []}]}},
        {"do": "remove-filler", "args": {"path": str(tmp_path / "precious")}},
        {"do": "remove-filler", "args": {"path": str(tmp_path / "folder" / FILLER)}},
        [],
        7,
    ]
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "folder" / FILLER).mkdir(parents=True)
    for number, undo in enumerate(hostile):
        plant(tmp_path, undo, f"guard-{number}.jsonl")
    kinds = ended(tmp_path)
    time.sleep(0.5)  # for a command, if one was started
    assert not trace.exists()
    assert victim.poll() is None
    assert (tmp_path / "precious").exists()
    assert (tmp_path / "folder" / FILLER).exists()
    assert set(kinds) == {"fault_undo_failed"}


def test_how_to_start_a_run_again_does_not_stand_in_a_file(tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "logs").mkdir()
    Undo("start-again", again(trace))()
    deadline = time.monotonic() + 30
    while not trace.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert trace.exists(), "the guard that was told the command does start it"
    trace.unlink()
    assert Undo("start-again", again(trace)).for_a_journal == Undo("start-again")
    plant(tmp_path, {"do": "start-again", "args": {}})
    assert ended(tmp_path) == ["fault_undo_failed"]


def test_a_process_that_only_has_the_pid_is_left_alone(tmp_path, victim):
    stop(victim)
    born = psutil.Process(victim.pid).create_time()
    plant(tmp_path, {"do": "continue", "args": {"procs": [[victim.pid, born - 5]]}})
    ended(tmp_path)
    assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED
    plant(tmp_path, {"do": "continue", "args": {"procs": [[victim.pid, born]]}})
    assert ended(tmp_path)[-1] == "fault_undone"
    deadline = time.monotonic() + 10
    while psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED


def test_journals_that_others_could_have_written_are_passed_over(tmp_path, victim):
    stop(victim)
    undo = {"do": "continue", "args": {"procs": [[victim.pid, time.time()]]}}
    plant(tmp_path, undo, mode=0o666)
    target = plant(tmp_path, undo, "elsewhere")
    (target.parent / "guard-2.jsonl").symlink_to(target)
    os.mkfifo(target.parent / "guard-3.jsonl")
    assert ended(tmp_path) == []
    assert psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED


def test_a_directory_that_others_can_write_to_is_no_run(tmp_path):
    EventLog(tmp_path, None, None, "supervisor").close()
    (tmp_path / "config.toml").write_text("")
    tmp_path.chmod(0o777)
    with pytest.raises(LaunchError, match="chmod go-w"):
        find_target(tmp_path)
    with pytest.raises(ValueError, match="chmod go-w"):
        end_leftovers(tmp_path, EventLog(tmp_path, None, None, "chaos"))


def test_only_this_runs_arenas_are_removed(tmp_path):
    """`kill-host` removed whatever folder a keeper's file named."""
    token = run_token(tmp_path)
    mine = Segment(tmp_path, run_id(token), 0)
    mine.create()
    other = tmp_path / "precious"
    other.mkdir()
    link = Segment(tmp_path / "links", run_id(token), 2)
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


def test_a_draft_is_nobodys_link_and_what_is_read_is_a_file(tmp_path):
    path = tmp_path / "state.json"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f"state.{os.getpid()}.tmp").symlink_to(victim)
    write_json(path, {"a": 1})
    assert victim.read_text() == "precious"
    assert read_json(path) == {"a": 1}
    for planted in ("[1]", "{", "[" * 100_000, "9" * 5000, '{"a": NaN}'):
        path.write_text(planted)
        assert read_json(path) == {}
    path.unlink()
    path.symlink_to(victim)
    assert read_json(path) == {}
    path.unlink()
    os.mkfifo(path)
    assert read_json(path) == {}


def test_signals_are_ordered_by_type_only():
    for args in ({}, {"procs": [[1, 0.0]]}, {"procs": [["7", 0.0]]}, {"procs": [[True, 0.0]]}, {"procs": {}}):
        with pytest.raises(UnfitError):
            signals.undo(args)
