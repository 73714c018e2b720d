"""What `everstep doctor` says about a config and about this machine."""

import fcntl
import json
from unittest.mock import Mock

import pytest

from everstep.commands import doctor
from everstep.launch.machine import VISIBLE, visible_devices
from everstep.run.directory import LaunchError, lock_run_dir
from watched import everstep, write_config


@pytest.fixture(autouse=True)
def no_job(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.mark.parametrize(("host", "nodes", "verdict", "what"), [
    ("127.0.0.1", 1, "ok", "on lo"), ("127.0.0.1", 8, "warning", "only processes on this machine"),
    ("::1", 1, "ok", "on lo"),
    ("192.0.2.1", 8, "error", "this machine cannot listen on 192.0.2.1"),
    ("no-such-host.invalid", 2, "error", "no-such-host.invalid"),
])  # fmt: skip
def test_the_card_that_sums_use_is_named_and_is_this_machines(host, nodes, verdict, what):
    line = doctor.check_network(host, nodes)
    assert (line.verdict, "bind_host" in line.advice) == (verdict, verdict != "ok")
    assert what in line.found


def test_a_file_system_without_locks_is_no_place_for_a_run(monkeypatch, tmp_path):
    for name in ("flock", "lockf"):
        monkeypatch.setattr(fcntl, name, Mock(side_effect=OSError(38, "Function not implemented")))
    assert "Lustre needs the mount option flock" in doctor.check_run_directory(tmp_path).found
    with pytest.raises(LaunchError, match="Lustre needs the mount option flock"):
        lock_run_dir(tmp_path)


def test_gpus_that_only_a_variable_names_are_none(monkeypatch):
    monkeypatch.setenv(VISIBLE, "0,1,7,8")
    assert visible_devices(2) == ["0", "1"]


def test_the_command_ends_with_1_for_an_error_and_knows_the_models_size(tmp_path):
    llama, on = {"module": "llama3", "config": "llama3_debugmodel"}, {"enable": True}
    config = write_config(tmp_path / "run.toml", job=llama, snapshot=on, attention_check=on)
    (no_folder := tmp_path / "file").write_text("")
    done = everstep("doctor", config, "--run-dir", no_folder, "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    by_check = {check["check"]: check for check in found["checks"]}
    assert not found["ok"]
    assert (by_check["run directory"]["verdict"], by_check["config"]["verdict"]) == ("error", "ok")
    assert "6.2 M parameters: 0.07 GB" in by_check["config"]["found"]
    seen, unseen = by_check["attention"]["found"].split(", in every slot for extremes alone: ")
    assert seen == "18 of 18 linear layers and kernels are checked"
    assert unseen == "a moderate error in a slot that is not drawn is not seen"
