"""Seeded campaigns on real training: every kind of fault at least once, and the losses of a run without any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.chaos.campaign import read_campaign
from everstep.chaos.registry import FAULTS
from everstep.report.events import read_events
from everstep.report.score import score
from recount import differences
from watched import LOSS_TOLERANCE, environment, write_config

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGNS = ROOT / "configs" / "chaos"


def kinds(path):
    return {entry.fault.name for entry in read_campaign(path).entries}


def test_the_campaign_files_hold_every_kind_of_fault():
    covered = set().union(*(kinds(path) for path in CAMPAIGNS.glob("*.toml")))
    assert covered == FAULTS.keys()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["processes", "workers"])
def test_a_campaign_costs_no_step_no_sample_and_no_loss(tmp_path, name):
    campaign = CAMPAIGNS / f"{name}.toml"
    last = max(entry.at_step for entry in read_campaign(campaign).entries)
    config = write_config(
        tmp_path / "campaign.toml",
        training={"steps": last + 20},
        snapshot={"enable": True},
        attention_check={"enable": True, "frequency": 1.0},
    )
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "everstep.chaos.trial",
            config,
            "--run-dir",
            run_dir,
            "--verify",
            "--campaign",
            campaign,
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = score(run_dir, tmp_path / "run-reference")
    assert figures["status"] == "done"
    assert figures["last_step"] == figures["steps"] == last + 20
    assert figures["loss_delta_max"] <= LOSS_TOLERANCE
    assert figures["faults"].keys() - {"died"} == kinds(campaign)
    raw = [json.loads(line) for line in (run_dir / "events" / "chaos.jsonl").read_text().splitlines()]
    names = [event["fault"] for event in raw if event["kind"] == "fault"]
    assert figures["kills"] == sum(fault.startswith("kill") for fault in names)
    assert differences(list(read_events(run_dir))) == {}, "an independent count agrees with the score"
