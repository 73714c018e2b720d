"""Workers' states in the memory of hosts outlive the group that made them. Slow or full storage matters only if a host
is lost. The run reports when states are not protected, and never starts over silently."""

import contextlib
import os
import shutil
import signal
import subprocess

import pytest

from semi_runs import SYNC_STEPS, quick_config, worst

PACE_S, ROUNDS = 0.15, 24
"""Long enough that a killed group is back before the others reach the last round."""


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 1 MiB at the place of the workers' states on storage."""
    folder = tmp_path / "run" / "state" / "workers"
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("a tmpfs can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_group_that_dies_with_no_storage_and_no_memory_for_its_workers_ends_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW_WRITE", "3600")
    nowhere = {"segment_dir": str(tmp_path / "none")}
    run = start(quick_config(tmp_path / "run.toml", 400, "slow_storage", snapshot=nowhere), pace_s=PACE_S)
    told = run.wait_for("workers_unprotected")
    assert "the copy takes longer than a round" in told["reason"]
    assert told["risk"] == f"group {told['group']} dies"
    run.wait_for("commit", step=6)
    killed = run.kill(1)
    assert run.wait() == 1, run.console()
    ended = run.events("run_ended")[-1]
    assert "the state of worker" in ended["reason"]
    assert "Start the run again" in ended["reason"]
    assert {event["source"] for event in run.events("training_started", killed)} <= {"peer"}, "nobody starts over"


@contextlib.contextmanager
def away(run):
    """Group 1, which is killed and held in its next start until the other group computes its worker's round."""
    killed = run.kill(1)
    run.wait_for("workers_started", killed, group=1)
    run.kill(1, signum=signal.SIGSTOP)
    yield killed
    run.wait_for("worker_moved", killed, group=0)
    run.kill(1, signum=signal.SIGCONT)


def test_a_group_that_dies_while_the_storage_is_full_costs_no_state(start, reference, tmp_path, small):
    run = start(toml := quick_config(tmp_path / "run.toml", ROUNDS), run_dir=tmp_path / "run", pace_s=PACE_S)
    told = run.wait_for("workers_unprotected")
    assert "No space left" in told["reason"]
    assert told["risk"] == f"the host of group {told['group']} is lost"
    run.until(lambda: "is lost now, the run ends" in run.console(), "the risk to be said")
    with away(run) as killed:
        pass
    moved = run.events("worker_moved", killed, group=0)
    run.wait_for("commit", killed, group=1)
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    run.wait_for("workers_protected", killed, group=0)
    assert run.wait() == 0, run.console()
    assert max(event["rounds_again"] for event in moved) <= 1, "what was just being written"
    assert worst(run, reference(toml), ROUNDS * SYNC_STEPS) <= 1e-5
    shutil.rmtree(small, ignore_errors=True)


def test_a_host_that_is_lost_with_its_memory_costs_no_state_and_no_storage(start, reference, tmp_path):
    """Each group counts as a separate host."""
    memory = {"failure_domain": "group", "segment_dir": str(tmp_path)}
    run = start(toml := quick_config(tmp_path / "run.toml", ROUNDS, snapshot=memory), pace_s=PACE_S)
    after = max(run.wait_for("keeper_found", group=group)["t"] for group in (0, 1))
    run.until(lambda: [e for e in run.events("commit", after, group=1) if e["kept_bytes"]], "a state to be kept")
    shutil.rmtree(run.run_dir / "state" / "workers", ignore_errors=True)  # copies from before the other keeper started
    with away(run) as killed:
        os.kill(run.events("keeper_found", group=1)[-1]["pid"], signal.SIGKILL)
        for segment in tmp_path.glob("everstep-*-group-1"):
            shutil.rmtree(segment)
    moved = run.events("worker_moved", killed, group=0)
    assert run.wait() == 0, run.console()
    assert max(event["rounds_again"] for event in moved) <= 2, "what was just being copied"
    assert worst(run, reference(toml), ROUNDS * SYNC_STEPS) <= 1e-5
