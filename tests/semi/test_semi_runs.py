"""Runs of `everstep run` beside the papers' formulas, without failures and with them."""

from collections import Counter

import pytest

from everstep.report import score
from everstep.run.beats import beat_path, read_beat
from semi_runs import (
    DEADLINE_S,
    SYNC_STEPS,
    WORKERS,
    rounds_in_the_final_state,
    semi_config,
    soon,
    worst,
    worst_loss,
)


def computes(run, group):
    """Whether the group's newest worker is within a round."""
    beat = read_beat(beat_path(run.run_dir, group, 0))
    return beat and beat.phase == "compute" and beat.pid in run.workers(group)


@pytest.mark.parametrize("method", ["diloco", pytest.param("local_sgd", marks=pytest.mark.slow)])
def test_a_run_is_what_the_paper_says(start, reference, tmp_path, method):
    config = semi_config(tmp_path / "run.toml", semi_sync={"method": method})
    run = start(config)
    assert run.wait(DEADLINE_S) == 0, run.said()
    assert worst(run, reference(config)) <= 1e-6
    assert worst_loss(run, reference(config)) <= 1e-5
    figures = score.score(run.run_dir)
    assert score.verdict(figures) == []
    print("of a synchronous step's bytes", figures["payload_share"])
    # The changes once a round, and some words.
    assert 1 / SYNC_STEPS <= figures["payload_share"] < 1.01 / SYNC_STEPS


def test_kills_change_nothing(start, reference, tmp_path):
    """Each group is killed while it computes a worker's round; then both at once, and the run goes on from disk."""
    rounds, both = 30, (0, 1)
    config = semi_config(
        tmp_path / "run.toml",
        training={"steps": rounds * SYNC_STEPS},
        checkpoint={"interval": 2 * SYNC_STEPS},
    )
    run = start(config)
    for victim in both:
        soon(run, lambda: any(event["groups"] == [0, 1] for event in run.events("commit")))
        soon(run, lambda victim=victim: computes(run, victim))
        killed = run.kill(victim)
        healed = soon(run, lambda victim=victim, killed=killed: run.events("heal", killed, group=victim))[0]["t"]
        soon(run, lambda victim=victim, healed=healed: run.events("worker_round", healed, group=victim))
    soon(run, lambda: run.events("checkpoint_saved"))
    killed = run.kill(*both)
    assert soon(run, lambda: run.events("training_started", killed))[0]["source"] == "disk"
    assert run.wait(DEADLINE_S) == 0, run.said()
    expected = reference(config)
    assert worst(run, expected, rounds * SYNC_STEPS) <= 1e-5
    assert worst_loss(run, expected) <= 1e-5
    assert rounds_in_the_final_state(run.run_dir) == Counter(
        (step // SYNC_STEPS + 1, worker, step + 1) for step in range(rounds * SYNC_STEPS) for worker in range(WORKERS)
    )
    assert score.verdict(score.score(run.run_dir)) == []


STREAMED = {"fragments": 2, "overlap_steps": 2, "mixing": 0.5}
KEPT = {"keep_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "streamed", [{}, KEPT, STREAMED, STREAMED | {"keep_steps": 1}], ids=["at once", "kept", "streamed", "both"]
)
def test_a_kill_every_eight_seconds_changes_nothing(start, reference, tmp_path, streamed):
    rounds, sync_steps = 40, 10
    turn = sync_steps // streamed.get("fragments", 1)
    config = semi_config(
        tmp_path / "run.toml",
        training={"steps": rounds * sync_steps},
        semi_sync={"sync_steps": sync_steps, **streamed},
        checkpoint={"interval": 5 * sync_steps},
        fault_tolerance={"groups": 3},
    )
    run = start(config, "--chaos-every", "8")
    assert run.wait(DEADLINE_S) == 0, run.said()
    expected = reference(config)
    figures = score.score(run.run_dir)
    differences = worst(run, expected, rounds * sync_steps), worst_loss(run, expected)
    print("kills", figures["kills"], "parameters, losses differ by", differences, "rounds", figures["steps"])
    went_on = [event["from_step"] for event in run.events("worker_round", rank=0) if event["from_step"]]
    print("rounds that went on after so many of their steps", went_on)
    assert figures["kills"] >= 5
    assert bool(went_on) == ("keep_steps" in streamed)
    assert max(differences) <= 1e-5
    assert rounds_in_the_final_state(run.run_dir, turn) == Counter(
        (step // turn + 1, worker, step + 1) for step in range(rounds * sync_steps) for worker in range(WORKERS)
    )
    assert score.verdict(figures) == []


@pytest.mark.slow
def test_more_workers_than_fit_into_memory_are_refused(start, tmp_path):
    many = 100_000
    config = semi_config(
        tmp_path / "run.toml",
        training={"global_batch_size": many},
        semi_sync={"workers": many},
        fault_tolerance={"groups": 1},
    )
    run = start(config)
    assert run.wait(DEADLINE_S) != 0
    assert f"the states of {many} workers need" in run.said() + (run.run_dir / "logs/group-0/rank-0.log").read_text()
