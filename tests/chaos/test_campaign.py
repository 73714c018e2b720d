"""Seeded campaigns on real training: every kind of fault at least once, and the losses of a run without any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.chaos.campaign import read_campaign
from everstep.chaos.kinds import FAULTS
from everstep.report.score import curve, score
from everstep.run.events import read_events
from more_faults import IN_WORKER, MORE
from watched import LOSS_TOLERANCE, environment, write_config

HERE = Path(__file__).resolve().parent
CAMPAIGNS = HERE.parents[1] / "configs" / "chaos"


@pytest.fixture(autouse=True)
def more_kinds(monkeypatch):
    for name, kind in MORE.items():
        monkeypatch.setitem(FAULTS, name, kind)


def kinds(path):
    return {fault.name for fault in read_campaign(path).faults}


def test_the_campaign_files_hold_every_kind_of_fault():
    assert kinds(CAMPAIGNS / "every-kind.toml") == FAULTS.keys() - MORE.keys()
    assert set().union(*(kinds(path) for path in HERE.glob("*.toml"))) == MORE.keys()


def run_trial(folder, campaign, *flags):
    """The trial of a campaign: what it was, and where its run and the run without faults are."""
    steps = max(fault.at_step for fault in read_campaign(campaign).faults) + 20
    config = write_config(
        folder / "campaign.toml",
        training={"steps": steps},
        snapshot={"enable": True, "failure_domain": "group"},
        attention_check={"enable": True, "frequency": 1.0},
    )
    run_dir = folder / "run"
    words = ["more_faults", "trial", config, "--run-dir", run_dir, "--verify", "--campaign", campaign, *flags]
    done = subprocess.run(
        [sys.executable, "-m", *words, "--override.imports", IN_WORKER],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    figures = score(run_dir, folder / "run-reference")
    said = done.stdout + done.stderr
    assert figures["status"] == "done", said
    assert figures["last_step"] == figures["steps"] == figures["loss_delta_steps"] == steps, said
    assert (figures["samples_lost"], figures["samples_repeated"], figures["attempts_thrown_away"]) == (0, 0, 0), said
    assert figures["faults"].keys() - {"died"} == kinds(campaign), said
    return done, figures, run_dir


def assert_kept(done, figures, run_dir):
    """The promise was kept, and the kills are counted."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures["loss_delta_max"] <= LOSS_TOLERANCE
    raw = [json.loads(line) for line in (run_dir / "events" / "chaos.jsonl").read_text().splitlines()]
    names = [event["fault"] for event in raw if event["kind"] == "fault"]
    assert figures["kills"] == sum(fault.startswith("kill") for fault in names)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("campaign", [CAMPAIGNS / "every-kind.toml", HERE / "workers.toml"], ids=["users", "workers"])
def test_a_campaign_costs_no_step_no_sample_and_no_loss(tmp_path, campaign):
    assert_kept(*run_trial(tmp_path, campaign))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_replica_with_a_flipped_weight_is_found_and_heals(tmp_path):
    """The one fault that may change the losses, between the flip and the next audit (docs/faults.md)."""
    done, figures, run_dir = run_trial(tmp_path, HERE / "bitflip.toml")
    assert done.returncode == 1, "a curve that an audit doubts is not verified"
    assert "audit found a group whose parameters differ" in done.stdout
    assert figures["replicas_diverged"] == 1
    events = list(read_events(run_dir))
    (flip,) = (event for event in events if event["kind"] == "fault")
    audits = [event for event in events if event["kind"] == "audit"]
    found = next(event for event in audits if not event["agreed"])
    assert found["differing"] == [flip["target_group"]]
    healed = [e for e in events if e["kind"] == "heal" and e["t"] > found["t"] and e["group"] == flip["target_group"]]
    assert healed
    last = max(event["step"] for event in audits)
    assert last > found["step"]
    assert len({event["checksum"] for event in audits if event["step"] == last}) == 1
    clean = curve(tmp_path / "run-reference")
    before = {event["step"]: event["loss"] for event in events if event["kind"] == "commit" and event["t"] < flip["t"]}
    assert len(before) >= 5
    assert all(abs(loss - clean[step]) <= LOSS_TOLERANCE for step, loss in before.items())
