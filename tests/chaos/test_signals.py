"""Tests of which processes, groups and folders an injector may hit."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import Mock

import psutil
import pytest

from everstep.chaos import signals
from everstep.chaos.fault import Fault
from everstep.chaos.kinds import FAULTS, own_segments
from everstep.chaos.runner import Runner
from everstep.chaos.schedule import Schedule
from everstep.chaos.target import LocalTarget
from everstep.chaos.view import Proc, View
from everstep.run.directory import LaunchError, groups_file, holder_of
from everstep.run.files import write_json
from everstep.run.token import run_token
from everstep.snapshot.peers import KeeperRecord
from everstep.snapshot.section import Snapshot
from everstep.snapshot.segment import Segment, run_id
from timeline import Timeline
from watched import DEADLINE_S, environment


@pytest.fixture
def victim():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_a_signal_reaches_no_process_that_began_after_it_was_announced(victim):
    born = psutil.Process(victim.pid).create_time()
    assert signals.send([(victim.pid, born - 2.0)], signal.SIGKILL) == []
    assert victim.poll() is None
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == [victim.pid]
    assert victim.wait(DEADLINE_S) == -signal.SIGKILL
    assert signals.send([(victim.pid, born)], signal.SIGKILL) == []


def test_only_this_runs_arenas_are_removed(tmp_path):
    """`kill-host` once removed any folder that a keeper's file named."""
    token = run_token(tmp_path)
    apart = Snapshot(failure_domain="group", segment_dir=str(tmp_path))
    mine = Segment.of(apart, run_id(token), 0)
    mine.create()
    other = tmp_path / "precious"
    other.mkdir()
    link = Segment.of(replace(apart, segment_dir=str(tmp_path / "links")), run_id(token), 2)
    link.path.parent.mkdir()
    link.path.symlink_to(other)
    around = tmp_path / "x" / ".." / mine.path.name
    named = ((0, mine.path), (1, other), (1, mine.path), (0, around), (2, link.path))
    places = [KeeperRecord(group, "h", "h:1", 77, str(path), 0.0) for group, path in named]
    assert [segment.path for segment in own_segments(tmp_path, places)] == [mine.path]


@pytest.mark.parametrize(("groups", "there", "hit", "candidates"), [
    (3, (0, 2), [], [0, 2]), (3, (0, 2), [0], []), (1, (0,), [], [0])])  # fmt: skip
def test_only_groups_that_take_part_may_be_hit_and_the_last_one_is_spared(tmp_path, groups, there, hit, candidates):
    view = View(tmp_path)
    write_json(groups_file(tmp_path), {"groups": groups})
    told = Timeline()
    for group in there:
        told.add(1, "workers_started", group, incarnation=0, pids=[2 + group])
    view.apply(told.commit(2, 1, there).events)
    view.hit(hit)
    assert view.candidates(1) == candidates
    if candidates:
        assert "no rank 5" in FAULTS["kill-worker"].why_not(Fault(name="kill-worker", rank=5), view)


@pytest.mark.parametrize("answer", [LaunchError("Slurm is busy."), []])
def test_a_fault_of_a_campaign_that_hits_nothing_is_not_done(tmp_path, answer):
    view = View(tmp_path)
    view.apply(Timeline().add(1, "lighthouse_started", address="h:1", pid=7).commit(2, 1, (0,)).events)
    target, schedule = LocalTarget(view), Schedule([Fault(name="kill-lighthouse", at_step=1)])
    target.signal = Mock(side_effect=[answer])
    Runner(target, schedule).tick(time.monotonic())
    says = answer or "none of its processes is there any more."
    assert schedule.unmet() == [f"kill-lighthouse at step 1 could not be done: {says}"]


def test_the_launcher_is_who_holds_the_lock(tmp_path, victim):
    """A process that has the file open, or holds another lock, is not the launcher."""
    assert holder_of(tmp_path) is None
    (tmp_path / ".lock").touch()
    assert holder_of(tmp_path) is None
    code = "import subprocess, sys; from pathlib import Path; from everstep.run.directory import lock_run_dir as lock\n"
    code += "lock(Path(sys.argv[1])); print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], **pipes, env=environment())
    worker = int(run.stdout.readline())
    with (tmp_path / ".lock").open():
        assert holder_of(tmp_path) == run.pid
    target = LocalTarget(View(tmp_path))
    ours, others = (Proc(pid, time.time(), "worker", 0) for pid in (worker, victim.pid))
    assert target.signal([ours, others], signal.SIGTERM) == [worker]
    run.kill()
    run.wait()
    assert holder_of(tmp_path) is None


def test_what_is_signalled_on_a_cluster_is_told_by_type_only(monkeypatch):
    words = []
    monkeypatch.setattr(signals, "call", lambda command: words.append(command) or "[7]")
    assert signals.send_on("3", "n1", [(7, 0.0)], signal.SIGKILL) == [7]
    assert words[0][-1] == "[[[7,0.0]],9]"
    assert "--nodelist=n1" in words[0]
    wrong = [("x; touch y", 7, "is no node"), ("-x", 7, "is no node")]
    for node, pid, says in [*wrong, *(("n1", pid, "no processes of a run") for pid in (1, -1, "7", True))]:
        with pytest.raises(LaunchError, match=says):
            signals.send_on("3", node, [(pid, 0.0)], signal.SIGKILL)
    assert len(words) == 1
