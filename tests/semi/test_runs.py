"""Runs of `everstep run` beside the papers' formulas, without failures and with them."""

from dataclasses import dataclass

import pytest
import torch.distributed.checkpoint as dcp

from everstep.report import score
from everstep.run.beats import beat_path, read_beat
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer
from reference import build
from semi_runs import (
    DEADLINE_S,
    SYNC_STEPS,
    semi_config,
    soon,
    worst,
    worst_loss,
)


def computes(run, group):
    """Whether the group's newest worker is within a round."""
    beat = read_beat(beat_path(run.run_dir, group, 0))
    return beat and beat.phase == "compute" and beat.pid in run.workers(group)


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
    assert score.verdict(score.score(run.run_dir)) == []


STREAMED = {"sync_steps": 10, "fragments": 2, "overlap_steps": 2, "mixing": 0.5}
QUARTERS = {"sync_steps": 12, "fragments": 4, "overlap_steps": 1, "mixing": 0.5}
WAYS = {
    "at once": {"sync_steps": 10},
    "streamed": STREAMED,
    "quarters": QUARTERS,
}


@dataclass(frozen=True)
class Long:
    """A run of three groups, and what is compared in the end."""

    semi: dict
    outer_rounds: int

    def config(self, path):
        return semi_config(
            path,
            job={"config": "tiny_4" if self.semi.get("fragments", 1) > 2 else "tiny"},
            training={"steps": self.steps},
            semi_sync=self.semi,
            checkpoint={"interval": 5 * self.semi["sync_steps"]},
            fault_tolerance={"groups": 3, "allow_faults": True},
        )

    @property
    def steps(self):
        return self.outer_rounds * self.semi["sync_steps"]

    def is_as_without_failures(self, run, expected):
        figures = score.score(run.run_dir)
        differences = worst(run, expected, self.steps), worst_loss(run, expected)
        print("kills", figures["kills"], "parameters, losses differ by", differences, "rounds", figures["steps"])
        assert max(differences) <= 1e-5
        assert score.verdict(figures) == []
        return figures


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_kill_every_eight_seconds_changes_nothing(start, reference, tmp_path, way):
    long = Long(WAYS[way], 40)
    run = start(config := long.config(tmp_path / "run.toml"), "--chaos-every", "8")
    assert run.wait(DEADLINE_S) == 0, run.said()
    assert long.is_as_without_failures(run, reference(config))["kills"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["data_parallel_shard_degree", "tensor_parallel_degree"])
def test_groups_of_two_ranks_are_what_the_paper_says_also_when_one_dies_within_a_round(
    start, reference, tmp_path, degree
):
    """They begin with the reference's parameters; their own would be others, as each rank draws its shard's."""
    sections = {
        "training": {"steps": 20 * 8},
        "semi_sync": {"sync_steps": 8, "fragments": 2, "overlap_steps": 1, "mixing": 0.5},
        "parallelism": {degree: 2},
    }
    config = semi_config(tmp_path / "run.toml", **sections)
    model = build(load_config(config, EverstepTrainer.Config))
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path / "begin"), no_dist=True)
    begin = {"initial_load_path": str(tmp_path / "begin"), "initial_load_model_only": True}
    run = start(semi_config(tmp_path / "begun.toml", **sections, checkpoint=begin), "--ranks-per-group", "2")
    soon(run, lambda: run.events("commit"))
    soon(run, lambda: computes(run, 1))
    run.kill(1, ranks=slice(1, 2))
    assert run.wait(DEADLINE_S) == 0, run.said()
    differences = worst(run, reference(config), 160), worst_loss(run, reference(config))
    print("parameters, losses differ by", differences)
    assert max(differences) <= 1e-5
    assert run.events("worker_moved")
    assert score.verdict(score.score(run.run_dir)) == []
