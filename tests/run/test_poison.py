"""A slot whose data ends whoever computes it."""

import pytest

from everstep.report.score import score, verdict
from everstep.run.events import read_events
from watched import write_config

STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("groups", [3, 2])
def test_a_run_goes_on_without_the_slot(start, tmp_path, groups):
    config = write_config(
        tmp_path / "poison.toml",
        job={"module": "poison_job", "config": "debugmodel"},
        training={"steps": STEPS},
        checkpoint={"interval": 1},
        fault_tolerance={"on_poison": "skip"},
    )
    run = start(config, "--groups", str(groups))
    assert run.wait(600) == 0, run.output.read_text()
    (poison,) = run.events("poison_slot")
    assert (poison["step"], poison["slot"]) == (4, 2)
    assert len(poison["groups"]) == groups
    assert "RuntimeError: a token that no table has" in poison["error"]
    figures = score(run.run_dir)
    assert (figures["steps"], figures["slots_skipped"], figures["samples_lost"]) == (STEPS, 1, 1)
    assert verdict(figures) == ["1 sample of the committed steps did not enter the model."]
    tokens = {event["step"]: event["tokens"] for event in read_events(run.run_dir, {"commit"})}
    assert tokens[4] == pytest.approx(tokens[3] * 6 / 7, rel=0.02)
