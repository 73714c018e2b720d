"""Everstep's losses are torchtitan's own; by default that is shown by tests/recipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "healthy.py"


@pytest.mark.slow
def test_two_groups_train_as_torchtitans_hsdp_does():
    done = subprocess.run(
        [sys.executable, BENCH, "--steps", "6", "--rounds", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout[done.stdout.index("{") :])["loss_difference_max"] <= 1e-5
