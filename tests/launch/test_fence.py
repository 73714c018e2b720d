"""The fence: which start of a group counts, and what an agent does when another start counts."""

import os
import select
import subprocess
import sys
import time

import pytest

from everstep.commands.status import status_of
from everstep.launch import slurm
from everstep.report.account import read
from everstep.run import beats, fence, files
from everstep.run.beats import BeatFile, agent_beat_path, beat_path, read_beat
from everstep.run.directory import over_file
from everstep.run.events import EventLog, read_events
from everstep.run.exits import FENCED_EXIT
from everstep.run.fence import Claim, Fenced, claim_group, fence_file, holds
from everstep.run.files import write_json
from forked import Forked
from launched import DEADLINE_S, TinyRun, alive, until


@pytest.mark.parametrize(("later", "earlier"), [
    (Claim(7, 2), Claim(7, 1)), (Claim(8, 0), Claim(7, 5)), (Claim(10, 0), Claim(9, 0))])  # fmt: skip
def test_claims_go_upwards_only(tmp_path, monkeypatch, later, earlier):
    claim_group(tmp_path, 0, later, lambda: False)
    before = os.listdir("/proc/self/fd")
    claim_group(tmp_path, 0, later, lambda: False)
    assert len(os.listdir("/proc/self/fd")) == len(before), "each try during a shortage would keep one more open"
    with pytest.raises(Fenced, match=f"{later.job}.{later.restart}"):
        claim_group(tmp_path, 0, earlier, lambda: False)
    assert holds(tmp_path, 0, later)
    assert not holds(tmp_path, 0, earlier)
    monkeypatch.setattr(fence, "lock_for_life", lambda path: False)
    with pytest.raises(Fenced, match="group 1 is run by another process already"):  # somebody removed its claim
        claim_group(tmp_path, 1, later, lambda: False)


def test_a_lock_goes_with_its_file(tmp_path):
    for _ in range(2):
        assert files.lock_for_life(tmp_path / "lock")
        (tmp_path / "lock").unlink()


def test_an_agent_that_was_overtaken_kills_its_workers_and_the_new_one_starts_only_then(agent):
    """If the same start is started once more while it runs, the second one is refused and the first one goes on."""
    old = agent("--training.steps", "1000000", job=7, restart=0)
    pids = old.wait_for("workers_started")["pids"]
    old.wait_for("commit")
    new = agent("--training.steps", "1000000", job=7, restart=1)
    assert old.process.wait(DEADLINE_S) == FENCED_EXIT
    assert not any(alive(pid) for pid in pids)
    second = until(lambda: old.events("workers_started", incarnation=1), "the new start's workers")[0]
    ended = old.events("agent_ended", status="fenced")[0]
    assert ended["t"] < second["t"]
    twice = agent("--training.steps", "1000000", job=7, restart=1)
    assert twice.process.wait(DEADLINE_S) == FENCED_EXIT
    assert f"is run by process {new.process.pid} on" in twice.console()
    assert read_beat(agent_beat_path(new.run_dir, 0)).phase == "watching", "the first one has not ended"
    assert new.process.poll() is None
    new.process.kill()
    new.process.wait(DEADLINE_S)
    agent("--training.steps", "1000000", job=7, restart=1)
    old.wait_for("workers_started", incarnation=2)


def test_everstep_run_leaves_agents_alone_which_train_in_its_directory(agent, tmp_path, request):
    """A run of agents, here without a batch system, can be seen and stopped, even if `everstep run` was there first."""
    before = EventLog(tmp_path / "run", None, None, "supervisor")
    before.emit("run_started", groups=1, steps=9)
    before.emit("run_ended", status="done", reason="every group finished")
    one = agent("--training.steps", "1000000", ranks=1)
    one.wait_for("commit")
    state = {path.name for path in (one.run_dir / "state").iterdir()}
    refused = TinyRun(one.run_dir, 1, 1)
    assert refused.process.wait(DEADLINE_S) == 2
    assert f"{one.run_dir}: in use by agents, which run group-0." in refused.console()
    assert state <= {path.name for path in (one.run_dir / "state").iterdir()}
    assert "run     running (processes of group-0)" in status_of(one.run_dir)
    assert read(read_events(one.run_dir)).status == "running"
    assert "asked every group" in slurm.stop(one.run_dir)
    assert one.process.wait(DEADLINE_S) == 0
    assert slurm.has_ended(one.run_dir)
    assert "run     stopped" in status_of(one.run_dir)
    write_json(slurm.job_file(one.run_dir), {"groups": "7"})
    write_json(over_file(one.run_dir, 0), {"status": "stopped", "reason": ""})
    write_json(fence_file(one.run_dir, 0), {"job": 7, "restart": 1, "host": "node17", "pid": 99})
    last, begin = TinyRun(one.run_dir, 1, 1, "--training.steps", "1000000"), time.time()
    request.addfinalizer(last.end)
    last.wait_for("commit", after=begin)
    assert f"run     running (pid {last.process.pid})" in status_of(one.run_dir), "no Slurm is asked"
    assert "asked every group" in slurm.stop(one.run_dir)
    assert last.process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("skew_s", [-200.0, 200.0])
@pytest.mark.parametrize("host", ["this one", "another one"])
def test_no_wall_clock_says_how_old_a_beat_is(tmp_path, monkeypatch, host, skew_s):
    """The age of another host's beat is measured by the file server's clock. The age of a beat of this host is measured
    by no file system's clock, as that of a local disk is the wall clock."""
    path = beat_path(tmp_path, 3, 0)
    if host == "this one":
        BeatFile(path).beat("compute", 7)
        os.utime(path, (then := path.stat().st_mtime + skew_s, then))
    else:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(beats, "this_boot", lambda: b"another machine.")
            BeatFile(path).beat("compute", 7)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew_s)
    ((group, seen, age_s),) = beats.beats_of_groups(tmp_path)
    assert (group, seen.step) == (3, 7)
    assert 0.0 <= age_s < 1.0


HOLD = """
import sys, time
from pathlib import Path
from everstep.launch.worker import await_predecessor
await_predecessor(Path(sys.argv[1]), 0, 0)
print("mine", flush=True)
time.sleep(1000)
"""


def test_a_rank_waits_for_its_predecessor_of_a_launcher_that_was_killed(tmp_path):
    first, second = (Forked([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) for _ in range(2))
    ready, _, _ = select.select([first.stdout, second.stdout], [], [], DEADLINE_S)
    (early,) = (one for one in (first, second) if one.stdout in ready)
    late = second if early is first else first
    assert select.select([late.stdout], [], [], 1.5)[0] == [], "it waits"
    early.kill()
    assert late.stdout.readline() == "mine\n"
    late.kill()
