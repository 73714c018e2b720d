"""`everstep doctor`: what it says about values, and about this machine."""

import json
import os
import sys
from types import SimpleNamespace

import pytest

from everstep.config.sections import FaultTolerance
from everstep.launch import doctor, node, prepare
from everstep.launch.machine import sharing_complaint
from everstep.launch.prepare import Model
from everstep.snapshot.section import Snapshot
from forked import ran


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def verdicts(lines):
    return [line.verdict for line in lines]


@pytest.mark.parametrize(("ranks", "train_timeout_s", "said"), [(2, 100, ["warning"]), (1, 100, []), (2, 700, [])])
def test_a_collective_of_a_group_may_not_end_before_a_wait_for_other_groups(ranks, train_timeout_s, said):
    ft = FaultTolerance(enable=True, quorum_timeout_s=50.0, reduce_timeout_s=600.0)
    lines = list(doctor.patience(ft, ranks, train_timeout_s))
    assert verdicts(lines) == said
    assert all("train_timeout_seconds = 100" in line.found and "reduce_timeout_s = 600" in line.found for line in lines)


@pytest.mark.parametrize(
    ("groups", "min_groups", "verdict", "what"),
    [
        (3, 1, "ok", "hanging"),
        (2, 1, "warning", "more than half"),
        (1, 1, "warning", "nobody holds the state"),
        (3, 3, "warning", "every step waits"),
    ],
)
def test_the_number_of_groups_decides_what_is_survived(groups, min_groups, verdict, what):
    line = doctor.group_count(FaultTolerance(min_groups=min_groups), groups)
    assert line.verdict == verdict
    assert what in line.found
    assert bool(line.advice) == (verdict != "ok")


def test_a_run_directory_is_this_users_and_takes_a_write(tmp_path):
    assert doctor.run_directory(tmp_path / "run").verdict == "ok"
    (tmp_path / "file").write_text("")
    assert doctor.run_directory(tmp_path / "file").verdict == "error"
    (tmp_path / "run").chmod(0o777)
    assert "chmod go-w" in doctor.run_directory(tmp_path / "run").found


@pytest.mark.parametrize(
    ("host", "nodes", "verdict", "what"),
    [
        ("127.0.0.1", 1, "ok", "on lo"),
        ("127.0.0.1", 8, "warning", "only processes on this machine"),
        ("192.0.2.1", 8, "error", "192.0.2.1"),
        ("no-such-host.invalid", 2, "error", "no-such-host.invalid"),
    ],
)
def test_the_card_that_sums_use_is_named_and_is_this_machines(host, nodes, verdict, what):
    line = doctor.network(host, nodes)
    assert line.verdict == verdict
    assert what in line.found
    assert ("bind_host" in line.advice) == (verdict != "ok")


def test_nccl_may_be_told_to_share_a_gpu(monkeypatch):
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in sharing_complaint(["0"], 2, "nccl")
    assert not sharing_complaint(["0"], 2, "gloo")
    assert not sharing_complaint([], 2, "nccl")
    assert not sharing_complaint(list("01234567"), 8, "nccl")
    assert sharing_complaint(list("01234567"), 2 * 8, "nccl")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert not sharing_complaint(["0"], 2, "nccl")


CONFIG = """
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
local_batch_size = 2
global_batch_size = 12
disable_cuda_graphs = true
[data]
source = "stdlib"
[fault_tolerance]
enable = true
groups = 3
[snapshot]
enable = true
[attention_check]
enable = true
"""


def test_the_command_ends_with_1_for_an_error_and_knows_the_models_size(tmp_path):
    config, no_folder = tmp_path / "run.toml", tmp_path / "file"
    config.write_text(CONFIG)
    no_folder.write_text("")
    command = [sys.executable, "-m", "everstep.cli", "doctor", str(config), "--run-dir", str(no_folder), "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = ran(command, env=environment)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    by_check = {check["check"]: check for check in found["checks"]}
    assert not found["ok"]
    assert by_check["run directory"]["verdict"] == "error"
    assert by_check["config"]["verdict"] == "ok"
    assert "6.2 M parameters: 0.07 GB" in by_check["config"]["found"]
    assert by_check["attention"]["found"] == "18 of 18 linear layers and kernels are checked"


@pytest.mark.parametrize(
    ("exact", "ours", "host"),
    [(False, "4.0 GB of sums in each rank, 4.0 GB more", "46.2 GB"), (True, "16.1 GB of sums", "46.2 GB")],
)
def test_memory_of_a_rank_of_8b_on_8_is_what_docs_say(exact, ours, host):
    sections = {
        "fault_tolerance": FaultTolerance(enable=True, groups=2, exact=exact),
        "snapshot": Snapshot(enable=True),
    }
    config = SimpleNamespace(**sections, semi_sync=SimpleNamespace(enabled=False))
    text = prepare.memory_of_rank(config, 4 * 8.03e9 / 8, 12 * 8.03e9 / 8)
    assert "16.1 GB of parameters" in text
    assert ours in text
    assert host in text


def test_a_model_that_would_be_checked_in_part_is_an_error():
    model = Model(1, 12, "", 300.0, "16 of 17", ["layers.0.extra"])
    *_, line = doctor.config_and_model(model)
    assert (line.verdict, "layers.0.extra" in line.found) == ("error", True)


def test_a_product_of_whole_numbers_tells_a_processor_that_computes_wrongly(monkeypatch):
    import torch

    assert node.gemm_complaint("cpu") == ""
    right = torch.Tensor.__matmul__

    def wrong(left, other):
        product = right(left, other)
        if product.is_floating_point():
            product[3, 5] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert "cpu computes wrongly: 1 of 65536 elements" in node.gemm_complaint("cpu")


def test_a_node_is_looked_at_without_a_config(tmp_path):
    command = [sys.executable, "-m", "everstep.cli", "doctor", "--node", "--run-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = ran(command, env=environment)
    assert (done.returncode, done.stdout) == (0, "ok       node: fit to train on\n")
    (tmp_path / "file").write_text("")
    done = ran([*command[:-1], str(tmp_path / "file")], env=environment)
    assert done.returncode == 1
    assert "cannot be written" in done.stdout
    assert "Traceback" not in done.stderr
