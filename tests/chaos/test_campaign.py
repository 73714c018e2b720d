"""A seeded campaign on real training: every kind of fault once, and the losses of a run without any."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.chaos.campaign import read_campaign
from everstep.chaos.kinds import FAULTS
from everstep.report.score import score
from everstep.run.directory import LaunchError
from watched import LOSS_TOLERANCE, environment, write_config

CAMPAIGN = Path(__file__).resolve().parents[2] / "configs" / "chaos" / "every-kind.toml"


def test_the_campaign_file_holds_every_kind_of_fault():
    assert {fault.name for fault in read_campaign(CAMPAIGN).faults} == FAULTS.keys()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no fault"),
        ("sed = 1\nfault = []", "unknown key 'sed'"),
        ("[[fault]]\nname = 'kill-grup'\nat_step = 1", "did you mean kill-group?"),
        ("[[fault]]\nname = 'kill-all'", "fault 1 (kill-all): give either at_step or at_s"),
        ("[[fault]]\nname = 'kill-all'\nat_step = '1'", "fault 1 (kill-all): at_step should be"),
        ("[[fault]]\nname = 'kill-all'\nat_step = 1\ndurations = 4", "fault 1 (kill-all) has the unknown key"),
        ("seed = 'a'\nfault = []", "../folder/c.toml: seed should be an integer, is 'a'."),
        ("every = ", "not valid TOML"),
    ],
)
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
    config = write_config(
        tmp_path / "campaign.toml",
        training={"steps": steps},
        snapshot={"enable": True, "failure_domain": "group"},
        attention_check={"enable": True, "frequency": 1.0},
    )
    run_dir = tmp_path / "run"
    words = ["everstep.chaos.trial", config, "--run-dir", run_dir, "--verify", "--campaign", CAMPAIGN]
    command = [sys.executable, "-m", *map(str, words)]
    # A run directory that others could write to would be refused.
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, umask=0)
    figures, said = score(run_dir, tmp_path / "run-reference"), done.stdout + done.stderr
    assert done.returncode == 0, said
    assert figures["status"] == "done", said
    assert figures["last_step"] == figures["steps"] == figures["loss_delta_steps"] == steps, said
    assert (figures["samples_lost"], figures["samples_repeated"], figures["attempts_thrown_away"]) == (0, 0, 0), said
    assert figures["faults"].keys() - {"died"} == FAULTS.keys(), said
    assert figures["loss_delta_max"] <= LOSS_TOLERANCE
    raw = [json.loads(line) for line in (run_dir / "events" / "chaos.jsonl").read_text().splitlines()]
    names = [event["fault"] for event in raw if event["kind"] == "fault"]
    assert figures["kills"] == sum(fault.startswith("kill") for fault in names)
