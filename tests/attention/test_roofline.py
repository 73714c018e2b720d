"""What an accelerator would run, on tensors without values: whatever looks at one raises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from everstep.attention.findings import Deviation, outcome
from everstep.attention.guard import Checks
from everstep.attention.identities import backward_deviation, forward_deviation
from everstep.attention.product import row_deviation, settle_rows, tile_sums
from everstep.attention.section import AttentionCheck


def meta(*shape):
    return torch.empty(*shape, device="meta", dtype=torch.float32)


def test_meta_tensors_let_nobody_look():
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(meta(2).sum() > 0)


def test_a_checked_projection_and_its_repair_ask_the_host_for_nothing():
    checks = Checks(AttentionCheck(enable=True, frequency=1.0))
    x, w = meta(64, 128), meta(256, 128)
    checks.begin(1, 0)
    y = settle_rows(
        checks.guard(0, "wo", ()),
        "wo.y",
        x @ w.t(),
        lambda part, rows: row_deviation(part, x if rows is None else x[rows], tile_sums(w.t())),
        lambda rows: (x if rows is None else x[rows]) @ w.t(),
        renew=lambda: None,
    )
    assert y.shape == (64, 256)
    assert len(checks.findings._records) == 1


@pytest.mark.parametrize("width", [32, 192])
def test_the_identities_ask_the_host_for_nothing(width):
    """By our own kernels, and by PyTorch where a head is too wide for them."""
    q, k = meta(2, 64, 4, width), meta(2, 64, 2, width)
    found = backward_deviation(q, k, k, q, q, q, k, k, meta(2, 64, 4), meta(2, 64, 4), 0.2)
    assert outcome(found, refused=found.bad().sum()).device.type == "meta"
    assert isinstance(forward_deviation(q, k), Deviation)


def test_the_bench_counts_every_check_of_a_layer():
    script = Path(__file__).parents[2] / "bench" / "attention_roofline.py"
    done = subprocess.run([sys.executable, str(script), "--json"], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0 < result["rate1_of_block"] < 0.03 < result["rate1_eager_of_block"]
    assert result["default_of_block"] <= 0.02
    assert 0 < result["kernels_per_layer"] < result["eager_kernels_per_layer"]
