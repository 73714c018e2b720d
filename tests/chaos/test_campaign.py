"""Tests of campaigns. A run with every kind of fault once has the losses of a run without faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.chaos.campaign import read_campaign
from everstep.chaos.kinds import FAULTS
from everstep.run.directory import LaunchError, holder_of
from watched import assert_nothing_lost, environment, until, write_config

CAMPAIGN = Path(__file__).resolve().parents[2] / "configs" / "chaos" / "every-kind.toml"


def test_the_campaign_file_holds_every_kind_of_fault():
    assert {fault.name for fault in read_campaign(CAMPAIGN).faults} == FAULTS.keys()


@pytest.mark.parametrize(("text", "says"), [
    ("", "c.toml: fault is missing"), ("sed = 1\nfault = []", "c.toml: sed is no known key"),
    ("[[fault]]\nname = 'kill-grup'\nat_step = 1", "did you mean kill-group?"),
    ("[[fault]]\nname = 'kill-all'", "fault 1 (kill-all): give either at_step or at_s"),
    ("[[fault]]\nname = 'kill-group'\nat_step = 1\ncount = 0", "fault 1 (kill-group): count should be at least 1"),
    ("[[fault]]\nname = 'kill-group'\nat_step = 1\ngroup = 0\ncount = 2", "give either group or count"),
    ("[[fault]]\nname = 'kill-all'\nat_step = 1\ngroup = 0", "has the unknown key 'group'; its keys are at_s, at"),
    ("[[fault]]\nname = 'kill-worker'\nat_step = 1\nrank = -1", "): rank should be at least 0, is -1."),
    ("seed = 'a'\nfault = []", "../folder/c.toml: seed should be a valid integer, is 'a'."),
])  # fmt: skip
def test_a_campaign_file_that_makes_no_sense_is_refused_with_the_place(tmp_path, monkeypatch, text, says):
    path = Path("../folder/c.toml")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    path.write_text(text)
    with pytest.raises(LaunchError) as refused:
        read_campaign(path)
    assert says in str(refused.value)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_campaign_costs_no_step_no_sample_and_no_loss(tmp_path):
    steps = max(fault.at_step for fault in read_campaign(CAMPAIGN).faults) + 20
    snapshot, checks = {"enable": True, "failure_domain": "group"}, {"enable": True, "frequency": 1.0}
    sections = {"training": {"steps": steps}, "snapshot": snapshot, "attention_check": checks}
    config, run_dir = write_config(tmp_path / "campaign.toml", **sections), tmp_path / "run"

    def start(*words):
        command = [sys.executable, "-m", "everstep.cli", *map(str, words)]
        # A run directory that other users can write to would be refused.
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log, umask=0)

    with (tmp_path / "log").open("w") as log:
        broken = start("run", config, "--run-dir", run_dir)
        until(lambda: (run_dir / "config.toml").exists() and holder_of(run_dir), "the run to be there")
        chaos = start("chaos", run_dir, "--campaign", CAMPAIGN)
        statuses = [chaos.wait(), broken.wait(), start("run", config, "--run-dir", tmp_path / "whole").wait()]
    said = (tmp_path / "log").read_text()
    assert statuses == [0, 0, 0], said
    figures = assert_nothing_lost(run_dir, tmp_path / "whole", steps)
    assert figures["faults"].keys() - {"died"} == FAULTS.keys(), said
    raw = [json.loads(line) for line in (run_dir / "events" / "chaos.jsonl").read_text().splitlines()]
    names = [event["fault"] for event in raw if event["kind"] == "fault"]
    assert figures["kills"] == sum(fault.startswith("kill") for fault in names)
