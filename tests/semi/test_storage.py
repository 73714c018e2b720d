"""Workers' states outlive the group that made them in the memory of hosts; a storage that is slow or full matters once
a host is lost. What is protected no longer is said, and no run starts over in silence."""

import os
import shutil
import signal
import subprocess

import pytest

from semi_runs import DEADLINE_S, SYNC_STEPS, semi_config, soon, worst

QUICK = {"join_timeout_s": 3.0, "connect_timeout_s": 2.0, "reduce_timeout_s": 8.0, "quorum_timeout_s": 15.0}


def config(path, rounds, module="tiny_llama", **snapshot):
    return semi_config(
        path,
        job={"module": module},
        training={"steps": rounds * SYNC_STEPS},
        fault_tolerance=QUICK,
        snapshot=snapshot,
    )


def commits(run, after):
    return [event for event in run.events("commit", rank=0) if event["step"] > after]


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 1 MiB where the workers' states would be."""
    folder = tmp_path / "run" / "state" / "workers"
    folder.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode:
        pytest.skip("a tmpfs can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_group_that_dies_with_no_storage_and_no_memory_for_its_workers_ends_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW_WRITE", "3600")
    run = start(config(tmp_path / "run.toml", 400, "slow_storage", segment_dir=str(tmp_path / "none")))
    told = soon(run, lambda: run.events("workers_unprotected"))[0]
    assert "the copy takes longer than a round" in told["reason"]
    assert told["risk"] == f"group {told['group']} dies"
    soon(run, lambda: commits(run, after=5))
    killed = run.kill(1)
    assert run.wait(DEADLINE_S) == 1, run.said()
    ended = run.events("run_ended")[-1]
    assert "the state of worker" in ended["reason"]
    assert "Start the run again" in ended["reason"]
    assert {event["source"] for event in run.events("training_started", killed)} <= {"peer"}, "nobody starts over"


def test_a_group_that_dies_while_the_storage_is_full_costs_no_state(start, reference, tmp_path, small):
    run = start(toml := config(tmp_path / "run.toml", 40), run_dir=tmp_path / "run")
    told = soon(run, lambda: run.events("workers_unprotected"))[0]
    assert "No space left" in told["reason"]
    assert told["risk"] == f"the host of group {told['group']} is lost"
    soon(run, lambda: "is lost now, the run ends" in run.output.read_text())
    killed = run.kill(1)
    moved = soon(run, lambda: run.events("worker_moved", killed, group=0))
    soon(run, lambda: run.events("worker_moved", killed, group=1))
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    soon(run, lambda: run.events("workers_protected", killed, group=0))
    assert run.wait(DEADLINE_S) == 0, run.said()
    assert max(event["rounds_again"] for event in moved) <= 1, "what was just being written"
    assert worst(run, reference(toml), 40 * SYNC_STEPS) <= 1e-5
    shutil.rmtree(small, ignore_errors=True)


def test_a_host_that_is_lost_with_its_memory_costs_no_state_and_no_storage(start, reference, tmp_path):
    """Each group counts as a host of its own."""
    toml = config(tmp_path / "run.toml", 24, failure_domain="group", segment_dir=str(tmp_path))
    run = start(toml, pace_s=0.05)
    soon(run, lambda: len({event["group"] for event in run.events("keeper_found")}) == 2)
    after = run.events("keeper_found")[-1]["t"]
    soon(run, lambda: [event for event in run.events("commit", after, group=1) if event["kept_bytes"]])
    shutil.rmtree(run.run_dir / "state" / "workers", ignore_errors=True)  # from before there was another keeper
    killed = run.kill(1)
    os.kill(run.events("keeper_found", group=1)[-1]["pid"], signal.SIGKILL)
    for segment in tmp_path.glob("everstep-*-group-1"):
        shutil.rmtree(segment)
    moved = soon(run, lambda: run.events("worker_moved", killed, group=0))
    assert run.wait(DEADLINE_S) == 0, run.said()
    assert max(event["rounds_again"] for event in moved) <= 2, "what was just being copied"
    assert worst(run, reference(toml), 24 * SYNC_STEPS) <= 1e-5
