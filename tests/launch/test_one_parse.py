"""What a run's config says is decided once: workers get what was judged before the start, flags and all."""

import json

import pytest
from torchtitan.config.manager import ConfigManager

from everstep.commands.agent import Agent, agent
from everstep.launch import prepare, slurm
from everstep.launch.agent import AgentSettings, worker_argv
from everstep.launch.settings import run_settings
from everstep.launch.supervisor import Supervisor
from everstep.run.directory import RunDir
from everstep.titan import cpu

CONFIG = """
[job]
module = "llama3"
config = "llama3_debugmodel"

[training]
global_batch_size = 4
local_batch_size = 1

[data]
source = "stdlib"

[fault_tolerance]
enable = true
groups = 2
"""
FLAGS = ["--parallelism.data_parallel_replicate_degree", "2", "--training.steps", "7", "--snapshot.interval=3"]


@pytest.fixture
def settled(tmp_path, monkeypatch):
    """Settings of a run, and its run directory with the config settled for its flags."""
    if not cpu.has_accelerator():
        cpu.stand_in()
    monkeypatch.setenv("WORLD_SIZE", "1")
    (tmp_path / "run.toml").write_text(CONFIG)
    settings = run_settings(tmp_path / "run.toml", tmp_path / "run", None, 1, None, None, FLAGS)
    settings.run_dir.mkdir()
    prepare.main(str(settings.config), str(settings.run_dir), settings.flags, 1, here=False)
    assert prepare.take_answer(settings.run_dir)["steps"] == 7
    assert not prepare.take_answer(settings.run_dir)
    return settings


def test_workers_do_not_apply_flags_to_what_flags_have_decided(settled, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # a supervisor's handlers
    supervisor = Supervisor(settled, RunDir(settled.run_dir))
    supervisor._devices = [None, None]
    config = ConfigManager().parse_args(worker_argv(supervisor._agent_settings(1), "http://h:1"))
    assert config.parallelism.data_parallel_replicate_degree == 1, "each replica became a group"
    assert (config.training.steps, config.snapshot.interval, config.debug.seed) == (7, 3, 0)
    ft = config.fault_tolerance
    assert (ft.group_id, ft.groups, ft.lighthouse, ft.bind_host) == (1, 2, "http://h:1", "127.0.0.1")
    assert config.dump_folder == str(settled.run_dir)


def test_a_batch_job_gets_the_settled_config_and_no_flags(settled):
    submission = slurm.Submission(config=settled.config, run_dir=settled.run_dir, groups=2, ranks_per_node=4)
    command = submission.commands()["groups"]
    script = next(word for word in command if word.endswith("train.sbatch"))
    settled_config = str(settled.run_dir / "config.toml")
    expected = [settled_config, "--run-dir", str(settled.run_dir), "--groups", "2", "--ranks", "4"]
    assert command[command.index(script) + 1 :] == expected


@pytest.mark.parametrize(("name", "own"), [("mine.toml", ["--fault_tolerance.groups", "2"]), ("run/config.toml", [])])
def test_an_agent_adds_to_a_settled_config_what_it_is_given_alone(tmp_path, monkeypatch, name, own):
    started = []
    monkeypatch.setattr("everstep.launch.agent.run_agent", started.append)
    (tmp_path / "run").mkdir()
    (tmp_path / name).write_text(CONFIG + 'bind_host = "10.1.2.3"\nstall_timeout_s = 99\n')
    agent(Agent(config=tmp_path / name, run_dir=tmp_path / "run", group=1), ["--training.steps", "5"])
    (settings,) = started
    assert settings.flags == [*own, "--training.steps", "5"]
    assert (settings.groups, settings.host, settings.fault_tolerance.stall_timeout_s) == (2, "10.1.2.3", 99)
    assert AgentSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
