"""An agent without a supervisor, as a batch job starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from conftest import alive, until
from everstep.report.events import read_events

HERE = Path(__file__).parent
CODE = """
import json, sys
from everstep.launch.agent import AgentSettings, run_agent
settings = AgentSettings(**json.loads(sys.argv[1]))
sys.exit(run_agent(settings, preload=("everstep.launch.elastic", "tiny_trainer")))
"""


@pytest.fixture
def agent(tmp_path):
    """Starts one agent of two ranks in a session of its own."""
    started = []

    def _start(*flags, **settings):
        arguments = {
            "config": "unused.toml", "run_dir": str(tmp_path / "run"), "group": 0, "groups": 1, "ranks": 2,
            "lighthouse": "http://127.0.0.1:1", "flags": list(flags), "entry": "tiny_trainer:main",
            **settings,
        }  # fmt: skip
        temporary = tmp_path / "tmp"
        temporary.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-c", CODE, json.dumps(arguments)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "TMPDIR": str(temporary)},
            start_new_session=True,
        )
        started.append(process)
        return process

    yield _start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def events(tmp_path, kind):
    return [event for event in read_events(tmp_path / "run") if event["kind"] == kind]


def both_train(tmp_path):
    return {event["rank"] for event in events(tmp_path, "commit")} == {0, 1}


def test_it_ends_when_its_workers_are_done_and_leaves_nothing_behind(agent, tmp_path):
    assert agent("--training.steps", "3").wait(60) == 0
    assert events(tmp_path, "agent_ended")[0]["status"] == "done"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_batch_systems_sigterm_to_every_process_is_a_clean_stop(agent, tmp_path):
    process = agent("--training.steps", "1000000")
    until(lambda: both_train(tmp_path), "both ranks to train")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == 0
    assert {event["rank"] for event in events(tmp_path, "left")} == {0, 1}
    assert events(tmp_path, "agent_ended")[0]["status"] == "stopped"


def test_workers_that_do_not_end_within_the_grace_time_are_killed(agent, tmp_path):
    process = agent("--training.steps", "1000000", stop_grace_s=1.0)
    until(lambda: both_train(tmp_path), "both ranks to train")
    below = psutil.Process(process.pid).children(recursive=True)
    os.kill(events(tmp_path, "workers_started")[0]["pids"][0], signal.SIGSTOP)
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 4
    assert events(tmp_path, "agent_ended")[0]["reason"] == "did not end within 1 s and was killed"
    assert 1.0 <= time.monotonic() - asked < 10.0
    until(lambda: not any(alive(child.pid) for child in below), "all below the agent to end", deadline_s=5.0)
