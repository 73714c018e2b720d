"""`everstep doctor`: what it says about values, and about this machine."""

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep.config.sections import FaultTolerance
from everstep.launch import doctor, links, node
from everstep.snapshot.section import Snapshot
from forked import ran

GB = 10**9
PLAN = doctor.Plan(
    config=Path("run.toml"),
    flags=(),
    fault_tolerance=FaultTolerance(),
    snapshot=Snapshot(enable=True, memory_reserve_gb=1.0),
    groups=4,
    nodes_per_group=1,
    run_dir=None,
    host="node",
)


def verdicts(lines):
    return [line.verdict for line in lines]


def test_defaults_are_in_order():
    assert verdicts(doctor.timeouts(FaultTolerance())) == ["ok"]


@pytest.mark.parametrize(
    ("shorter", "longer"), [("quorum_timeout_s", "stall_timeout_s"), ("join_timeout_s", "quorum_timeout_s")]
)
def test_a_wait_that_outlasts_the_one_around_it_is_an_error_that_names_both(shorter, longer):
    ft = FaultTolerance(**{shorter: 5000.0})
    errors = [line.found for line in doctor.timeouts(ft) if line.verdict == "error"]
    assert any(shorter in found and longer in found for found in errors)
    assert "ok" not in verdicts(doctor.timeouts(ft))


def test_heartbeats_that_a_busy_host_misses_are_warned_of():
    assert verdicts(doctor.timeouts(FaultTolerance(heartbeat_timeout_s=0.5))) == ["warning", "ok"]


@pytest.mark.parametrize(
    ("groups", "min_groups", "verdict", "what"),
    [
        (3, 1, "ok", "hanging"),
        (2, 1, "warning", "more than half"),
        (1, 1, "warning", "nobody holds the state"),
        (3, 3, "warning", "every step waits"),
        (3, 4, "error", "only 3"),
    ],
)
def test_the_number_of_groups_decides_what_is_survived(groups, min_groups, verdict, what):
    (line,) = doctor.group_count(FaultTolerance(min_groups=min_groups), groups)
    assert line.verdict == verdict
    assert what in line.found
    assert bool(line.advice) == (verdict != "ok")


def test_a_missing_or_an_old_package_is_named_and_extras_are_not_asked_for():
    needed = ["torch>=2.15", "torchft<0.3,>=0.2", "tyro", 'pytest; extra == "dev"']
    installed = {"torch": "2.15.0+cu130", "torchft": "0.2.0", "torchtitan": "0.3.0", "tyro": "1"}
    assert verdicts(doctor.versions(needed, installed.get)) == ["ok"]
    (line,) = doctor.versions(needed, {**installed, "torch": "2.14.1", "tyro": None}.get)
    assert line.verdict == "error"
    assert "torch is 2.14.1" in line.found
    assert "tyro is missing" in line.found
    assert "torchft" not in line.found


def test_the_run_directory_is_probed_by_name_and_a_file_in_its_place_is_an_error(tmp_path, monkeypatch):
    for name in ("n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        lines = list(doctor.run_directory(tmp_path / "run", nodes=4))
    assert verdicts(lines) == ["ok", "ok"]
    assert "n1, n2" in lines[0].found
    (tmp_path / "file").write_text("")
    (line,) = doctor.run_directory(tmp_path / "file", nodes=4)
    assert line.verdict == "error"


@pytest.mark.parametrize(("skew_s", "verdict"), [(0.2, "ok"), (3.0, "warning"), (30.0, "error")])
def test_clocks_that_differ_are_reported_by_how_much(skew_s, verdict):
    assert verdicts(doctor.clock_skew(skew_s)) == [verdict]


def test_a_run_directory_whose_clock_is_an_hour_behind_is_an_error(tmp_path, monkeypatch):
    now = doctor.time.time()
    monkeypatch.setattr(doctor, "time", SimpleNamespace(time=lambda: now + 3600))
    assert verdicts(doctor.run_directory(tmp_path, nodes=1)) == ["ok", "error"]


@pytest.mark.parametrize(
    ("addresses", "nodes", "verdict", "what"),
    [
        ({"10.0.0.7"}, 8, "ok", "ib0, 200 Gbit/s"),
        ({"10.9.9.9"}, 8, "error", "no address of this machine"),
        ({"127.0.0.1"}, 8, "warning", "only processes on this machine"),
        ({"127.0.0.1"}, 1, "ok", "lo"),
    ],
)
def test_the_interface_for_healing_is_named(addresses, nodes, verdict, what):
    own = {"127.0.0.1": "lo", "10.0.0.7": "ib0"}
    (line,) = doctor.interface("node", addresses, own, {"lo": 0, "ib0": 200_000}, nodes)
    assert line.verdict == verdict
    assert what in line.found


def test_a_host_name_that_nobody_knows_is_an_error():
    (line,) = doctor.network("no-such-host.invalid", 2)
    assert line.verdict == "error"
    assert "bind_host" in line.advice


def test_snapshots_take_two_slots_and_their_parity():
    # 2 B/n + 2 B/n m/(n - m), as docs/snapshots.md has it
    assert doctor.snapshot_bytes(12 * GB, groups=4, parity=1, scope="sharded") == 8 * GB
    assert doctor.snapshot_bytes(12 * GB, groups=4, parity=0, scope="sharded") == 6 * GB
    assert doctor.snapshot_bytes(12 * GB, groups=4, parity=1, scope="full") == 24 * GB
    assert doctor.snapshot_bytes(12 * GB, groups=1, parity=2, scope="sharded") == 24 * GB


@pytest.mark.parametrize(
    ("tmpfs_gb", "available_gb", "verdict"),
    # 8 GB for each of four groups, 12 for each of three: 32 and 48
    [
        (100, 100, "ok"),
        (60, 49.5, "ok"),
        (40, 100, "warning"),
        (10, 100, "error"),
        (100, 32.5, "error"),
        (None, 9, "error"),
    ],
)
def test_snapshots_need_room_in_tmpfs_and_in_memory(monkeypatch, tmpfs_gb, available_gb, verdict):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    memory = SimpleNamespace(tmpfs=tmpfs_gb and tmpfs_gb * GB, available=available_gb * GB)
    assert verdicts(doctor.snapshots(PLAN, 12 * GB, memory)) == [verdict]


def test_the_nodes_of_a_group_share_its_snapshots():
    memory = SimpleNamespace(tmpfs=7 * GB, available=100 * GB)
    (line,) = doctor.snapshots(replace(PLAN, nodes_per_group=2), 12 * GB, memory)
    assert line.verdict == "ok"
    assert "4.00 GB" in line.found


def test_a_lighthouse_is_asked_not_only_connected_to(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.listen()
        (line,) = doctor.lighthouse(f"http://127.0.0.1:{mute.getsockname()[1]}")
    assert line.verdict == "warning"
    assert verdicts(doctor.lighthouse("")) == ["ok"]


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
    assert by_check["timeouts"]["verdict"] == by_check["config"]["verdict"] == "ok"
    assert "6.2 M parameters, 0.07 GB" in by_check["config"]["found"]
    assert "snapshots" in by_check
    assert by_check["attention"]["found"] == "18 of 18 linear layers and kernels are checked"


def test_a_model_that_would_be_checked_in_part_is_an_error():
    line = doctor.attention("16 of 17", ["layers.0.attention.extra"])
    assert (line.verdict, "layers.0.attention.extra" in line.found) == ("error", True)


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


def test_gpus_that_are_needed_and_not_there_are_a_complaint(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "GPU_FILES", tmp_path)
    assert node.gpu_complaint(None) == ""
    assert node.gpu_complaint(8) == "8 GPUs are needed and none is visible"


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


def test_hosts_that_look_at_the_same_time_measure_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(links, "BULK_BYTES", 8 << 20)
    found = {}

    def look(name):
        found[name] = links.measure_others(tmp_path, name, "127.0.0.1", 20.0, 3)

    threads = [threading.Thread(target=look, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join()
    assert {name: sorted(link.name for link in seen) for name, seen in found.items()} == {
        "a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"],
    }  # fmt: skip
    for link in (link for seen in found.values() for link in seen):
        assert link.error == ""
        assert 0 < link.rtt_s <= link.worst_rtt_s < 5.0
        assert link.bytes_per_s > 1e6
    assert list(tmp_path.iterdir()) == []


def test_timeouts_are_proposed_from_what_was_measured():
    slow = links.Link("b", 1e-3, 30e-3, 1e9)
    proposed = links.propose([slow], 0.1, gradient_bytes=4e9, state_bytes=40e9)
    assert proposed == links.Proposal(heartbeat_timeout_s=1.3, reduce_timeout_s=32.0, heal_timeout_s=160.0)
    plan = replace(PLAN, fault_tolerance=FaultTolerance(heartbeat_timeout_s=1.0))
    lines = list(doctor.network_measured(plan, [slow], 0.1, {"parameters": 10**9, "state_bytes": 40e9}))
    assert any("set [fault_tolerance] heartbeat_timeout_s = 1.3" in line.advice for line in lines)
    closed = links.Link("c", 0, 0, 0, error="10.0.0.3:1: refused")
    assert verdicts(doctor.network_measured(plan, [closed], 0.1, {}))[0] == "error"


def test_limits_and_memory_that_are_too_small_are_errors(monkeypatch):
    assert verdicts(doctor.limits(1)) == ["ok"]
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (256, 256))
    (line,) = doctor.limits(4)
    assert "256 open files" in line.found
    assert line.verdict == "error"
    assert verdicts(doctor.memory(PLAN, 10 * GB, 39 * GB, [])) == ["error"], "four groups of it on one machine"
    assert verdicts(doctor.memory(PLAN, 10 * GB, 41 * GB, [])) == ["ok"]
    assert verdicts(doctor.memory(replace(PLAN, ranks_per_group=8), 640 * GB, 1 * GB, [79 * GB])) == ["error"]
    assert verdicts(doctor.memory(replace(PLAN, ranks_per_group=8), 640 * GB, 1 * GB, [81 * GB])) == ["ok"]
