"""Groups of several ranks, other models and data, spares: runs that lose groups have an undisturbed run's losses."""

import json
import os
import signal

import pytest

from everstep.report import score
from everstep.run.events import read_events
from watched import losses_match, write_config

ENDLESS = ("--steps", "1000000")
PACE_S = 0.1


@pytest.mark.parametrize("backend", ["spmd_types", pytest.param("full_dtensor", marks=pytest.mark.slow)])
def test_a_group_of_two_sharded_ranks_lives_and_dies_as_one(start, tmp_path, backend):
    parallelism = {"spmd_backend": backend}
    config = write_config(tmp_path / "fsdp.toml", training={"global_batch_size": 6}, parallelism=parallelism)
    run = start(config, "--groups", "2", "--ranks-per-group", "2", *ENDLESS, pace_s=PACE_S)
    run.wait_for_step((0, 1))
    killed = run.kill(0, ranks=slice(1, 2))
    died = run.wait_for("workers_died", after=killed, group=0)
    assert "rank 1 was killed by SIGKILL" in died["reason"]
    run.wait_for_step((0, 1), after=died["t"])
    losses_match(run, start, config, "--ranks-per-group", "2")
    owners = run.events("commit")[-1]["owners"]
    assert len(owners) == 3, "slots of two ranks each, shared out unevenly"


def test_a_users_own_dataset_gives_the_same_batches_when_a_group_dies_and_a_spare_takes_its_place(start, tmp_path):
    notes = tmp_path / "notes.jsonl"
    texts = (f"note {n}: " + "the quick brown fox "[n % 7 :] * (n % 9) for n in range(400))
    notes.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = write_config(
        tmp_path / "jsonl.toml", job={"module": "small_job", "config": "jsonl"}, data={"source": "dataloader"},
        dataloader={"dataset": "notes", "dataset_path": str(notes), "num_workers": 1},
        training={"global_batch_size": 4}, fault_tolerance={"spares": 1},
    )  # fmt: skip
    run = start(config, "--groups", "3", *ENDLESS, pace_s=PACE_S)
    at_work = [set(run.wait_for_step((0, 1, 2))["owners"]) for _ in range(5)][-1]  # two may heal in a first step
    [spare] = {0, 1, 2} - at_work
    killed = run.kill(min(at_work))
    run.until(lambda: [e for e in run.events("commit", killed) if spare in e["owners"]], "the spare to compute")
    run.wait_for_step((0, 1, 2), after=killed)
    assert len(set(run.events("commit")[-1]["owners"])) == 2
    losses_match(run, start, config, "--fault_tolerance.spares", "0")


def test_shrinking_commits_what_is_left_of_a_step(start, tmp_path):
    config = write_config(tmp_path / "shrink.toml", fault_tolerance={"on_loss": "shrink"})
    run = start(config, *ENDLESS, pace_s=PACE_S)
    run.wait_for_step((0, 1, 2))
    os.kill(run.wait_for_phase(1, {"compute"}).pid, signal.SIGKILL)
    run.wait_for_step((0, 1, 2))
    steps = run.stop()
    figures = score.score(run.run_dir)
    assert figures["last_step"] == figures["steps"] == steps
    assert figures["samples_repeated"] == 0
    lost = [e["owners"].count(-1) for e in read_events(run.run_dir, {"commit"}) if e["group"] == 0]
    assert sum(lost) == figures["samples_lost"] > 0
    assert lost[-1] == 0, "a new step is shared out among those that are there"
