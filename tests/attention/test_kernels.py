"""Kernels of our own: what they sum, what they move, and that they compile for a GPU, where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from everstep.attention import kernels

INTERPRETED = Path(__file__).with_name("interpreted.py")


@pytest.fixture(scope="module")
def interpreted():
    """What the kernels did under Triton's interpreter, which must be asked for before they are imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(INTERPRETED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("fp32", False),
        ("fp16, several shares", False),
        ("bf16, one key head, wide values, blind rows", True),  # whose gradients know nothing of blind rows
        ("dq infinite", True),
        ("dk not a number", True),
    ],
)
def test_the_kernels_sum_what_pytorch_sums(interpreted, name, bad):
    case = interpreted[name]
    assert case["apart"] == {}
    assert case["same verdict"]
    assert case["bad"] == bad
    assert (case["shares"] > 1) == (name == "fp16, several shares")


@pytest.mark.parametrize("kernel", ["column_totals", "pair_sums", "output_sums"])
def test_a_kernel_reads_its_operands_once_and_writes_its_results_once(interpreted, kernel):
    """This is what bench/attention_roofline.py counts."""
    moved = interpreted[kernel]
    assert moved["loaded"] == moved["read"]
    assert moved["stored"] == moved["written"]


class Absent:
    """A device that is not there: enough of a driver to compile for it."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def test_the_kernels_compile_for_an_h100(monkeypatch):
    made = []

    def compiled(kernel, grid, like, *args, **constants):
        built = kernel.warmup(*args, grid=grid, **constants, num_warps=kernels.WARPS)
        made.append((kernel.__name__, len(built.asm["cubin"])))

    monkeypatch.setattr(kernels, "_launched", compiled)
    monkeypatch.setattr(triton.runtime.driver, "_active", Absent())
    q, k = (torch.zeros(1, 4096, n, 128, dtype=torch.bfloat16) for n in (8, 2))
    lse = torch.zeros(1, 4096, 8)
    kernels.identity_sums(q, k, k, q, q, q, k, k, lse, lse, 0.1)
    assert [name for name, _ in made] == ["_totals", "_pairs", "_pairs", "_pairs", "_outputs"]
    assert all(size > 0 for _, size in made)
