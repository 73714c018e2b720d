"""The Llama 3 debug model, compiled block by block as torchtitan does it, trains on while attention goes wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "attention_training.py"


@pytest.mark.slow
def test_a_compiled_model_trains_on_through_faults_and_finds_what_eager_mode_finds(tmp_path):
    result = tmp_path / "result.json"
    options = ["--steps", "12", "--path", "fused", "--compile", "--kinds", "nan,inf", "--json", str(result)]
    paths = [str(BENCH.parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCH), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(result.read_text())
    clean = found["clean"]["losses"]
    assert len(clean) == 12
    assert clean != found["nan, checked, eager"]["losses"], "it was compiled"
    for kind in ("nan", "inf"):
        hit, eager = found[f"{kind}, checked"], found[f"{kind}, checked, eager"]
        assert hit["hits"] >= 4
        assert hit["not_found"] == []
        assert hit["found"] == [place for place in eager["found"] if place[2] != "scores"]
        assert hit["losses"] == pytest.approx(clean, abs=1e-3)
        assert found[f"{kind}, unchecked"]["losses"] != pytest.approx(clean, abs=1e-3), "the faults do harm"
    assert found["clean, checked"]["findings"] == {}
