"""What is told of a run while it goes: curves that no death leaves a mark on, and figures for Prometheus."""

import time
import urllib.request

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from everstep.launch.machine import free_port
from everstep.report import score
from watched import until, write_config

BOTH = (0, 1)


@pytest.mark.slow
def test_every_committed_step_is_one_point_though_a_group_and_the_launcher_were_killed(start, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    port = free_port("127.0.0.1")
    config = write_config(
        tmp_path / "told.toml",
        training={"steps": 40},
        checkpoint={"interval": 5},
        metrics={"enable_tensorboard": True, "enable_wandb": True},
        fault_tolerance={"groups": 2, "metrics_port": port},
    )
    run = start(config)
    run.wait_for_step(BOTH)
    killed = run.kill(1)
    run.wait_for_step(BOTH, after=killed)
    run.wait_for("checkpoint_saved")

    def figures():
        lines = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line.startswith("everstep_"))

    found = until(
        lambda: found if (found := figures()).get('everstep_heals_total{group="1"}') else None, "a heal in the figures"
    )
    assert found['everstep_deaths_total{group="1",reason="SIGKILL"}'] == "1.0"
    assert found["everstep_groups_alive"] == "2.0"
    assert float(found["everstep_committed_step"]) >= 2

    ended = time.time()
    run.end()
    again = start(config, run_dir=run.run_dir)
    assert again.wait(600) == 0
    assert again.events("training_started", after=ended, rank=0)[0]["source"] == "disk"
    stored = EventAccumulator(str(run.run_dir / "tb"), size_guidance={"scalars": 0}).Reload()
    curve = {point.step: point.value for point in stored.Scalars("loss_metrics/global_avg_loss")}
    assert [point.step for point in stored.Scalars("loss_metrics/global_avg_loss")] == list(range(1, 41))
    assert curve == pytest.approx(score.curve(run.run_dir), rel=1e-6)
    files = sorted(run.run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "one W&B run, of two processes"
