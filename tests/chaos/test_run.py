"""Tests of `everstep chaos` on one run, in its order, with workers that only act like trainers."""

import os
import signal
import time
import urllib.request

import pytest

from everstep.chaos.cluster import find_target
from everstep.run.directory import LaunchError, holder_of
from launched import TinyRun
from watched import everstep, until

ENDLESS = ("--training.steps", "1000000")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = TinyRun(tmp_path_factory.mktemp("tiny") / "run", 3, 2, *ENDLESS, "--tiny.page")
    for group in range(3):
        run.wait_for("commit", group=group)
    yield run
    run.end()


def tellers(run):
    """Return the processes that make and serve its page."""
    return [process.pid for process in run.tree() if "everstep.report.live" in process.cmdline()]


def broken(run, tmp_path, *entries):
    """Inject these faults. Return the wall time at which that began, and what the command printed."""
    path, begin = tmp_path / "campaign.toml", time.time()
    path.write_text("\n".join(f"[[fault]]\nat_step = 1\npatience_s = 120\n{entry}" for entry in entries))
    chaos = everstep("chaos", run.run_dir, "--campaign", path, timeout=180)
    assert chaos.returncode == 0, chaos.stdout + chaos.stderr
    return begin, chaos.stdout


def test_workers_groups_and_lighthouse_die_as_ordered_and_come_back(run, tmp_path):
    telling = until(lambda: tellers(run), "the page's process")
    kills = 'name = "kill-worker"\ngroup = 0\nrank = 1', 'name = "kill-group"\ngroup = 1', 'name = "kill-lighthouse"'
    begin, said = broken(run, tmp_path, *kills)
    assert "fault: kill-worker on group 0" in said
    died = run.wait_for("workers_died", after=begin, group=0)
    assert "rank 1 was killed by SIGKILL" in died["reason"]
    assert "was killed by SIGKILL" in run.wait_for("workers_died", after=begin, group=1)["reason"]
    run.wait_for("lighthouse_started", after=begin)
    assert "The lighthouse died (exit code -9): no group can join or leave" in run.console()
    for group in (0, 1):
        run.wait_for("commit", after=run.wait_for("workers_started", after=begin, group=group)["t"], group=group)
    faults = {event["fault"]: event for event in run.events("fault", after=begin)}
    assert faults["kill-worker"]["target_group"] == 0
    assert faults["kill-worker"]["t"] < died["t"], "the event is there before the deed"
    assert faults["kill-lighthouse"]["target_group"] is None
    assert not run.events("workers_died", after=begin, group=2)
    assert tellers(run) == telling, "it is no orphan of theirs"
    address = run.events("page")[0]["address"]
    page = "the page, which is written every few seconds, to show the fault"
    until(lambda: b"kill-lighthouse" in urllib.request.urlopen(address, timeout=30).read(), page)


def test_a_stopped_worker_goes_on_when_its_time_is_up(run, tmp_path):
    before = run.workers(2)
    begin, said = broken(run, tmp_path, 'name = "stop-worker"\ngroup = 2\nrank = 0\nduration_s = 1.0')
    undone = run.wait_for("fault_undone", after=begin)
    assert undone["target_group"] == 2
    run.wait_for("commit", after=undone["t"], group=2, rank=0)
    assert run.workers(2) == before, "it was not started again"
    (fault,) = run.events("fault", after=begin)
    assert 1.0 <= undone["t"] - fault["t"] < 60.0
    assert "fault undone: stop-worker" in said


def test_a_run_that_is_over_is_not_broken(run):
    pid = holder_of(run.run_dir)
    os.kill(pid, signal.SIGINT)
    until(lambda: holder_of(run.run_dir) is None, "the run to end")
    with pytest.raises(LaunchError, match="is over: stopped, stopped cleanly"):
        find_target(run.run_dir)
