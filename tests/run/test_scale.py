"""A live run with two groups, then three, then one: nobody is restarted, and the losses do not notice."""

import signal
import statistics
import sys
from itertools import pairwise

import pytest

from forked import ran
from watched import assert_nothing_lost, environment, until, write_config

TOLERANCE = 1e-6


def scale(run, groups):
    command = [sys.executable, "-m", "everstep.cli", "scale", str(run.run_dir), "--groups", str(groups)]
    return ran(command, env=environment(), timeout=300.0)


def wait_for_steps_of(run, groups):
    """The first step that these groups and no others took after the one that was seen last."""
    after = run.events("commit")[-1]["t"]
    steps = until(
        lambda: [e["step"] for e in run.events("commit", after, rank=0) if e["groups"] == groups], f"a step of {groups}"
    )
    return steps[0]


@pytest.fixture(scope="module")
def scaled(start, tmp_path_factory):
    """The run, stopped, and what was said to more groups than it has slots."""
    config = write_config(
        tmp_path_factory.mktemp("config") / "scale.toml",
        training={"steps": 1_000_000},
        fault_tolerance={"groups": 2},
        snapshot={"enable": True},
    )
    run = start(config)
    run.wait_for_step((0, 1))
    refused = scale(run, 8)
    for groups in (3, 1, 2):
        done = scale(run, groups)
        assert done.returncode == 0, done.stdout + done.stderr
        wait_for_steps_of(run, list(range(groups)))
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0
    reference = start(config, "--groups", "1", "--steps", str(run.events("commit")[-1]["step"]))
    assert reference.wait(600) == 0
    return run, refused, reference


def test_more_and_fewer_groups_change_no_loss_and_lose_no_sample(scaled):
    run, _, reference = scaled
    steps = run.events("commit")[-1]["step"]
    figures = assert_nothing_lost(run.run_dir, reference.run_dir, steps, statuses=("stopped",))
    assert figures["loss_delta_max"] <= TOLERANCE
    gaps = [after["t"] - before["t"] for before, after in pairwise(run.events("commit", group=0, rank=0))]
    print(f"gaps between commits: median {statistics.median(gaps):.3f} s, longest {sorted(gaps)[-3:]}")


def test_groups_leave_and_join_and_none_is_restarted(scaled):
    run, _, _ = scaled
    assert not run.events("workers_died")
    assert [len(run.events("workers_started", group=group)) for group in range(3)] == [1, 2, 1]
    assert {event["source"] for event in run.events("training_started", group=2)} == {"peer"}
    assert not [e for e in run.events("attempt", rank=0) if not e["committed"] and e["recomputed"]]


def test_more_groups_than_slots_are_refused_in_a_sentence(scaled):
    _, refused, _ = scaled
    assert refused.returncode == 2
    assert "7 slots" in refused.stderr
    assert "for 8 groups" in refused.stderr
    assert "Traceback" not in refused.stderr
