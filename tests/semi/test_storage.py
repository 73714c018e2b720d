"""A storage of workers' states that is slow or full: it is waited for, what that costs is said, and no run starts over
in silence."""

import shutil
import subprocess

import pytest

from semi_runs import DEADLINE_S, SYNC_STEPS, semi_config, soon, worst

QUICK = {"join_timeout_s": 3.0, "connect_timeout_s": 2.0, "reduce_timeout_s": 8.0, "quorum_timeout_s": 15.0}


def config(path, rounds, module="tiny_llama"):
    return semi_config(
        path, job={"module": module}, training={"steps": rounds * SYNC_STEPS}, fault_tolerance=QUICK
    )  # fmt: skip


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


def test_a_group_that_dies_before_a_slow_storage_has_its_workers_ends_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setenv("SLOW_WRITE", "3600")
    run = start(config(tmp_path / "run.toml", 400, "slow_storage"))
    told = soon(run, lambda: run.events("workers_unprotected"))[0]
    assert "the storage takes longer than a round" in told["reason"]
    soon(run, lambda: commits(run, after=5))
    killed = run.kill(1)
    assert run.wait(DEADLINE_S) == 1, run.said()
    ended = run.events("run_ended")[-1]
    assert "the state of worker" in ended["reason"]
    assert "Start the run again" in ended["reason"]
    assert {event["source"] for event in run.events("training_started", killed)} <= {"peer"}, "nobody starts over"


def test_a_full_storage_is_told_of_and_costs_nothing_once_there_is_room(start, reference, tmp_path, small):
    run = start(toml := config(tmp_path / "run.toml", 40))
    assert "No space left" in soon(run, lambda: run.events("workers_unprotected"))[0]["reason"]
    soon(run, lambda: "dies now, the run ends" in run.output.read_text())
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    soon(run, lambda: len({event["group"] for event in run.events("workers_protected")}) == 2)
    run.kill(1)
    assert run.wait(DEADLINE_S) == 0, run.said()
    assert worst(run, reference(toml), 40 * SYNC_STEPS) <= 1e-5
    shutil.rmtree(small, ignore_errors=True)
