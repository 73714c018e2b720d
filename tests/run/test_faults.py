"""One run of three groups, hit by one fault after another and scaled, compared with the run in which nothing failed.

The tests depend on their order: each leaves the run with all its groups taking part again.
"""

import os
import signal
import time

import pytest

from everstep.run.directory import groups_file
from everstep.run.events import read_events
from everstep.run.files import write_json
from watched import LOSS_TOLERANCE, everstep, losses_match, write_config

ALL = (0, 1, 2)
PACE_S = 0.1


def refused(*words):
    """Run a command that must fail, and return its error, one line on stderr."""
    done = everstep(*words)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done
    return done.stderr


def files_of(run_dir):
    paths = (run_dir / "config.toml", *run_dir.glob("checkpoint/**/*"), *run_dir.glob("events/**/*"))
    return {path: path.read_bytes() for path in paths if path.is_file()}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config") / "faults.toml", training={"steps": 1_000_000})


@pytest.fixture(scope="module")
def run(start, config):
    return start(config, pace_s=PACE_S)


def test_a_group_killed_in_the_first_step_is_missed_by_nobody(run):
    victim = run.wait_for_phase(1, {"compute", "reduce"})
    assert not run.events("commit", group=1), "this is the first step"
    killed = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    run.wait_for_step(ALL, after=killed)
    assert run.events("commit")[0]["step"] == 1


def test_a_group_killed_while_it_heals_heals_in_the_end(run):
    victim = None
    while victim is None or victim.phase == "compute":  # it had healed before its phase was seen
        killed = run.kill(1)
        run.wait_for("workers_died", after=killed, group=1)
        run.wait_for("workers_started", after=killed, group=1)
        victim = run.wait_for_phase(1, {"connect", "heal", "compute"})
    os.kill(victim.pid, signal.SIGKILL)
    killed = time.time()
    run.wait_for_step(ALL, after=killed)
    assert not [event for event in run.events("workers_died", after=killed) if event["group"] != 1]


def test_all_groups_killed_at_once_go_on_from_the_checkpoint_with_the_same_losses(run):
    saved = max(run.wait_for("checkpoint_saved")["step"], run.events("checkpoint_saved")[-1]["step"])
    before = {e["step"]: e["loss"] for e in run.events("commit", rank=0)}
    killed = run.kill(*ALL)
    run.wait_for_step(ALL, after=killed)
    restored = run.wait_for("training_started", after=killed, rank=0)
    assert restored["source"] == "disk"
    assert restored["step"] > saved - 10
    again = {e["step"]: e["loss"] for e in run.events("commit", after=killed, rank=0)}
    both = before.keys() & again.keys()
    assert all(abs(before[step] - again[step]) <= LOSS_TOLERANCE for step in both)


def test_one_interrupt_stops_the_run_cleanly_with_a_checkpoint_even_if_a_group_is_killed_meanwhile(run):
    tree = run.tree()
    asked = time.time()
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping")
    run.kill(1)
    assert (run.wait(), run.events("run_ended")[-1]["status"]) == (0, "stopped")
    left = {event["step"] for kind in ("left", "training_done") for event in run.events(kind, after=asked)}
    last = run.events("commit")[-1]["step"]
    assert last - 1 <= min(left) <= max(left) == last, "a group is asked a step later at most"
    assert run.events("checkpoint_saved", after=asked)[-1]["step"] == last
    assert not [process for process in tree if process.is_running()]


def test_a_run_directory_is_not_taken_from_another_config(run, tmp_path):
    other = write_config(tmp_path / "other.toml", training={"steps": 1_000_000, "seq_len": 32})
    before = files_of(run.run_dir)
    said = refused("run", other, "--run-dir", run.run_dir)
    assert "holds a run of another config" in said
    assert "seq_len: 64 → 32" in said
    assert files_of(run.run_dir) == before


@pytest.fixture(scope="module")
def resumed(run, config, start):
    """The run, continued in its directory with two groups and with snapshots."""
    return start(config, "--groups", "2", "--snapshot.enable", run_dir=run.run_dir, pace_s=PACE_S)


def test_a_stopped_run_continues_in_its_directory_with_another_number_of_groups(run, resumed):
    stopped_at = run.events("commit")[-1]["step"]
    assert resumed.wait_for_step((0, 1))["step"] > stopped_at
    first = resumed.events("training_started")[0]
    assert (first["source"], first["step"]) == ("disk", stopped_at + 1)


def wait_for_steps_of(run, groups):
    """Wait until exactly these groups took part in a step."""
    after = run.events("commit")[-1]["t"]
    run.until(lambda: [e for e in run.events("commit", after, rank=0) if e["groups"] == groups], f"a step of {groups}")


def test_more_and_fewer_groups_join_and_leave_and_none_is_restarted(resumed):
    said = refused("scale", resumed.run_dir, "--groups", 8)
    assert "7 slots" in said
    assert "for 8 groups" in said
    done = everstep("scale", resumed.run_dir, "--groups", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for_steps_of(resumed, [0, 1, 2])
    write_json(groups_file(resumed.run_dir), {"groups": 1})  # as `everstep scale` does
    wait_for_steps_of(resumed, [0])
    assert not resumed.events("workers_died")
    assert [len(resumed.events("workers_started", group=group)) for group in ALL] == [1, 1, 1]
    assert {(e["source"], e["nominal_groups"]) for e in resumed.events("training_started", group=2)} == {("peer", 3)}
    assert not [e for e in resumed.events("attempt", rank=0) if not e["committed"] and e["recomputed"]]


def test_the_losses_are_those_of_the_run_in_which_nothing_failed(run, resumed, config, start):
    losses_match(resumed, start, config)
    assert not [e for e in read_events(run.run_dir, {"commit"}) if not e["coverage_ok"]]
