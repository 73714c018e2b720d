"""The command line answers at once, and says in one sentence what the user can put right."""

import json
import os
import subprocess
import sys
import time

import pytest

from everstep.cli import COMMANDS
from everstep.report.score import score, verdict
from forked import ran
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


def test_help_answers_within_half_a_second():
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        assert everstep("--help").returncode == 0
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5


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


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("rum",), "did you mean run"),
        (("run", "missing.toml"), "missing.toml: no such file"),
        (("run", "broken.toml"), "broken.toml: not valid TOML"),
        (("report", "nothing"), "nothing"),
        (("report", "nothing", "--jsn"), "--jsn"),
    ],
)
def test_mistakes_are_named_in_one_sentence_and_nothing_is_written(tmp_path, args, what):
    (tmp_path / "broken.toml").write_text("[training\n")
    done = everstep(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert what in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken.toml"]


def test_a_run_that_cannot_work_ends_before_anything_is_started(start):
    run = start(1, 1, "--tiny.exit", "2")
    assert run.process.wait(60) == 1
    assert run.events("run_ended")[0]["status"] == "failed"
    assert len(run.events("workers_started")) == 1
    assert "its configuration is not valid" in run.said()


def test_workers_that_keep_failing_end_the_run_with_their_reason(start):
    run = start(1, 1, "--tiny.fail")
    assert run.process.wait(60) == 1
    assert "RuntimeError: no such luck" in run.events("run_ended")[0]["reason"]
    assert len(run.events("workers_started")) == 3
    assert "RuntimeError: no such luck" in (run.run_dir / "logs/group-0/rank-0.log").read_text()


def test_an_error_in_the_first_step_gives_up_after_three_starts_and_names_itself(start):
    run = start(1, 2, "--tiny.fail_in", "1", "--training.steps", "9")
    assert run.process.wait(60) == 1
    assert len(run.events("workers_started")) == 3
    (ended,) = run.events("run_ended")
    assert ended["status"] == "failed"
    assert "started 3 times and failed each time" in ended["reason"]
    assert "FileNotFoundError: there is no dataset for port" in ended["reason"]
    assert "in group 0" not in ended["reason"], "the first line says what it is"
    assert "FileNotFoundError" in run.said()


def test_an_error_that_all_groups_have_ends_the_run_at_once(start):
    run = start(3, 1, "--tiny.fail_in", "1", "--training.steps", "9")
    assert run.process.wait(60) == 1
    assert len(run.events("workers_started")) < 9, "not every group needs to try three times"
    (ended,) = run.events("run_ended")
    assert "all 3 groups failed in the same way" in ended["reason"]
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
    assert "it is skipped" in run.said()
    figures = score(run.run_dir)
    assert figures["give_ups"] == {}
    assert figures["slots_skipped"] == 1
    assert any("did not enter the model" in sentence for sentence in verdict(figures)), "not in silence"


def test_a_slot_that_ends_the_only_group_three_times_ends_the_run_though_steps_were_committed(start):
    run = start(1, 1, "--tiny.fail_in", "5", "--training.steps", "9")
    assert run.process.wait(90) == 1
    assert len(run.events("workers_died")) == 3
    assert run.events("poison_slot")[0]["slot"] == 1


def test_a_first_step_that_is_longer_than_a_stall_is_no_stall(start):
    run = start(1, 1, "--tiny.first_s", "5", "--training.steps", "3")
    assert run.process.wait(60) == 0
    assert run.events("workers_stalled") == []


PREPARE = """
import json, pathlib, sys
from everstep.launch import warm
warm.preload(("torchtitan.train",))
from everstep.launch.prepare import main, take_answer
calls = json.loads(sys.argv[1])
print(json.dumps([[main(*call), take_answer(pathlib.Path(call[1]))] for call in calls]))
"""

CONFIG = """
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
steps = 4
local_batch_size = 2
global_batch_size = 12
disable_cuda_graphs = true
[data]
source = "stdlib"
[fault_tolerance]
enable = true
groups = 3
"""


def test_the_config_is_checked_and_settled_before_a_run_starts(tmp_path):
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(CONFIG)
    bad.write_text(CONFIG.replace("steps =", "stepz ="))
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    def call(config, *flags, ranks=1):
        return [str(config), str(run_dir), list(flags), ranks]

    calls = [
        call(bad),
        call(good, ranks=4),
        call(good, "--fault_tolerance.no-enable"),
        call(good),
        call(good, "--fault_tolerance.groups", "2"),
        call(good, "--debug.seed", "8"),
    ]
    done = ran([sys.executable, "-c", PREPARE, json.dumps(calls)], env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    unknown_key, indivisible, apart, settled, fewer_groups, other_seed = json.loads(done.stdout.splitlines()[-1])
    assert unknown_key[0] == 2
    assert "stepz" in unknown_key[1]["error"]
    assert "steps" in unknown_key[1]["error"]
    assert indivisible[0] == 2
    assert "global_batch_size" in indivisible[1]["error"]
    assert apart[0] == 2
    assert "enable = true" in apart[1]["error"]
    assert settled[0] == 0
    assert settled[1]["steps"] == 4
    assert (run_dir / "config.toml").exists()
    assert fewer_groups[0] == 0, "the number of groups does not decide the result"
    assert fewer_groups[1]["identity"] == settled[1]["identity"]
    assert other_seed[0] == 2
    assert "seed" in other_seed[1]["error"]
