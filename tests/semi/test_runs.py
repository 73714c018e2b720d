"""Runs of `everstep run` with kills, compared with the papers' formulas."""

import pytest
import torch.distributed.checkpoint as dcp

from everstep.report import score
from everstep.step.holding import NOT_FINITE
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer
from reference import build
from semi_runs import SYNC_STEPS, semi_config, worst, worst_loss

WAYS = {
    "halves, late": {"job": {"config": "struck"},
                     "semi_sync": {"sync_steps": 6, "fragments": 2, "overlap_steps": 2, "mixing": 0.5}},
    "at once": {},
    "the whole, late": {"semi_sync": {"overlap_steps": 2, "mixing": 0.25}},
    "quarters, late": {"job": {"config": "tiny_4"},
                       "semi_sync": {"sync_steps": 12, "fragments": 4, "overlap_steps": 1, "mixing": 0.5}},
    "local SGD": {"semi_sync": {"method": "local_sgd"}},
    "experts": {"job": {"config": "tiny_moe"}},
    "streams of a dataloader": {"job": {"config": "tiny_streams"}, "data": {"source": "dataloader"}},
    "an attention that is checked": {
        "attention_check": {"enable": True, "mode": "detect", "frequency": 1.0},
        "attention_check.inject": {"kind": "nan", "first_step": 3, "every": 1000},
    },
}  # fmt: skip


@pytest.mark.parametrize("way", [
    "halves, late", *(pytest.param(way, marks=pytest.mark.slow) for way in list(WAYS)[1:])])  # fmt: skip
def test_kills_change_nothing(start, reference, tmp_path, monkeypatch, way):
    """Each group is killed in a round, then both at once, with fragments between two synchronisations. A `struck` model
    computes a NaN after the sum over groups has begun."""
    monkeypatch.setenv("STRUCK", "36")
    sections, both = WAYS[way], (0, 1)
    semi = sections.get("semi_sync", {})
    sync_steps = semi.get("sync_steps", SYNC_STEPS)
    steps = 48 // sync_steps * sync_steps
    round_steps = sync_steps // semi.get("fragments", 1)
    interval = sync_steps + round_steps
    more = {"training": {"steps": steps}, "checkpoint": {"interval": interval}}
    config = semi_config(tmp_path / "run.toml", **sections | more)
    run = start(config, pace_s=0.1)
    for victim in both:
        run.wait_for("commit", groups=[0, 1])
        run.wait_for_phase(victim, {"compute"})
        killed = run.kill(victim)
        healed = run.wait_for("heal", killed, group=victim)["t"]
        run.wait_for("worker_round", healed, group=victim)
    run.wait_for("checkpoint_saved")
    killed = run.kill(*both)
    assert run.wait_for("training_started", killed)["source"] == "disk"
    assert run.wait() == 0, run.console()
    expected = reference(config)
    assert worst(run, expected, steps) <= 1e-5
    assert worst_loss(run, expected) <= 1e-5
    assert score.broken_promises(score.score(run.run_dir)) == []
    assert {event["step"] for event in run.events("commit") if event["metrics"]} >= {1, -(-10 // round_steps)}
    assert run.events("worker_moved")
    assert [*{event["reason"] for event in run.events("slot_refused")}] == [NOT_FINITE] * (way == "halves, late")


@pytest.mark.slow
@pytest.mark.parametrize("degree", ["data_parallel_shard_degree", "tensor_parallel_degree"])
def test_groups_of_two_ranks_are_what_the_paper_says_also_when_one_dies_within_a_round(
    start, reference, tmp_path, degree
):
    """The run loads the reference's initial parameters, because each rank would draw those of its shard itself."""
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
    run.wait_for("commit")
    run.wait_for_phase(1, {"compute"})
    run.kill(1, ranks=slice(1, 2))
    assert run.wait() == 0, run.console()
    differences = worst(run, reference(config), 160), worst_loss(run, reference(config))
    print("parameters, losses differ by", differences)
    assert max(differences) <= 1e-5
    assert run.events("worker_moved")
    assert score.broken_promises(score.score(run.run_dir)) == []
