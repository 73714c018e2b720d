"""The command line answers at once, and says in one sentence what the user can put right."""

import os
import resource
import subprocess
import sys

import pytest

from everstep.cli import COMMANDS
from everstep.report.score import score, verdict
from launched import DEADLINE_S

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def everstep(*args, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "everstep.cli", *args],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=cwd,
        check=False,
    )


def test_help_takes_less_than_half_a_second():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert everstep("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_without_torch(command):
    code = (
        "import sys; from everstep import cli\n"
        f"try: cli.main([{command!r}, '--help'])\n"
        "finally: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: everstep {command}")
    assert shown.stdout.endswith("False\n")


def test_a_mistake_ends_a_process_with_one_sentence(tmp_path):
    done = everstep("run", "missing.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "everstep: missing.toml: there is no such file\n")
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_work_ends_before_anything_is_started(start):
    run = start(1, 1, "--tiny.exit", "2")
    assert run.process.wait(60) == 1
    assert run.events("run_ended")[0]["status"] == "failed"
    assert len(run.events("workers_started")) == 1
    assert "its configuration is not valid" in run.said()


def test_an_error_in_the_first_step_gives_up_after_three_starts_and_names_itself(start):
    run = start(1, 2, "--tiny.fail_in", "1", "--training.steps", "9")
    assert run.process.wait(60) == 1
    assert len(run.events("workers_started")) == 3
    (ended,) = run.events("run_ended")
    assert ended["status"] == "failed"
    assert "its workers were started 3 times and failed each time" in ended["reason"]
    assert "FileNotFoundError: there is no dataset for port" in ended["reason"]
    assert "in group 0" not in ended["reason"], "the first line says what it is"
    assert "FileNotFoundError" in run.said()


def test_an_error_that_all_groups_have_ends_the_run_at_once(start):
    run = start(3, 1, "--tiny.fail_in", "1", "--training.steps", "9")
    assert run.process.wait(60) == 1
    assert len(run.events("workers_started")) < 9, "not every group needs to try three times"
    (ended,) = run.events("run_ended")
    assert "workers of 3 groups were started" in ended["reason"]
    assert "FileNotFoundError" in ended["reason"]


def test_a_slot_that_ends_whoever_computes_it_is_named_and_ends_the_run(start):
    run = start(3, 1, "--tiny.fail_in", "6", "--training.steps", "9")
    assert run.process.wait(90) == 1
    (poison,) = run.events("poison_slot")
    assert (poison["step"], poison["slot"], poison["groups"]) == (6, 2, [0, 1, 2])
    (ended,) = run.events("run_ended")
    assert "slot 2 of step 6 ended the workers of group(s) 0, 1, 2" in ended["reason"]
    assert "FileNotFoundError" in ended["reason"]


def test_a_slot_that_ends_whoever_computes_it_is_skipped_where_that_is_asked_for(start):
    run = start(3, 1, "--tiny.fail_in", "6", "--tiny.skip", "--training.steps", "9")
    assert run.process.wait(DEADLINE_S) == 0
    (poison,) = run.events("poison_slot")
    assert (poison["step"], poison["slot"], poison["action"]) == (6, 2, "skip")
    assert "It is skipped" in run.said()
    figures = score(run.run_dir)
    assert figures["give_ups"] == {}
    assert figures["slots_skipped"] == 1
    assert any("did not enter the model" in sentence for sentence in verdict(figures)), "not in silence"


def test_a_first_step_that_is_longer_than_a_stall_is_no_stall(start):
    run = start(1, 1, "--tiny.first_s", "5", "--training.steps", "3")
    assert run.process.wait(60) == 0
    assert run.events("workers_stalled") == []
