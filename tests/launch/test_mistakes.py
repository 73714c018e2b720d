"""Mistakes of a new user: each is told in a sentence, ends with the right status, and leaves nothing behind.

Those that only torchtitan can see are in tests/run/test_refusals.py.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from everstep import cli
from watched import until

GOOD = """
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
steps = 4
global_batch_size = 12
[fault_tolerance]
enable = true
groups = 3
"""
FILES = {
    "good.toml": GOOD,
    "broken.toml": "[training\n",
    "binary.toml": b"\xff\xfe\x00",
    "empty.toml": "",
    "string.toml": GOOD.replace("groups = 3", 'groups = "three"'),
    "boolean.toml": GOOD.replace("enable = true", 'enable = "yes"'),
    "unknown.toml": GOOD + "grups = 3\n",
    "table.toml": "fault_tolerance = 3\n",
    "seed.toml": GOOD + "[debug]\nseed = 1.5\n",
    "converter.toml": '[model]\nname = "llama3"\nflavor = "8B"\nconverters = ["float8"]\n',
    "diloco.toml": GOOD + 'semi_sync_method = "diloco"\nmodule_fqns_per_model_fragment = [["norm"]]\n',
    "twice.toml": "[training]\nseed = 1\n[debug]\nseed = 2\n",
    "parity.toml": GOOD + "[snapshot]\nparity = 7\n",
    "text.txt": "hello\n",
}

MISTAKES = {
    # what was typed: status, words of the answer
    "": (2, "usage: everstep COMMAND"),
    "rum good.toml": (2, "there is no command rum, did you mean run?"),
    "frobnicate": (2, "there is no command frobnicate."),
    "help rum": (2, "there is no command rum, did you mean run?"),
    "--verbose": (2, "there is no command --verbose."),
    "run": (2, "CONFIG is missing; see --help"),
    "run missing.toml": (2, "missing.toml: no such file"),
    "run folder": (2, "folder: cannot be read: Is a directory"),
    "run broken.toml": (2, "broken.toml: not valid TOML"),
    "run binary.toml": (2, "binary.toml: not valid TOML"),
    "run string.toml": (2, 'string.toml:10: [fault_tolerance] groups must be an integer, got "three"'),
    "run boolean.toml": (2, "boolean.toml:9: [fault_tolerance] enable must be true or false"),
    "run unknown.toml": (2, "unknown.toml:11: [fault_tolerance] has no key 'grups'; the nearest is 'groups'"),
    "run table.toml": (2, "table.toml:1: fault_tolerance must be a table"),
    "run seed.toml": (2, "seed.toml:12: [debug] seed must be an integer"),
    "run converter.toml": (2, "give --allow-dropped"),
    "run diloco.toml": (2, "diloco.toml:12: [fault_tolerance] module_fqns_per_model_fragment must be empty"),
    "run twice.toml": (2, "twice.toml:2: [training] seed is torchtitan 0.2's name of [debug] seed"),
    "run parity.toml": (2, "parity.toml:12: [snapshot] parity must be one of 0, 1, 2"),
    "run good.toml --group 3": (2, "there is no flag --group, did you mean --groups?"),
    "run good.toml --stepz 3": (2, "there is no flag --stepz, did you mean --steps?"),
    "run good.toml 3": (2, "unknown argument 3"),
    "run good.toml --groups": (2, "--groups needs a value: a whole number"),
    "run good.toml --groups x": (2, "--groups must be a whole number, got x"),
    "run good.toml --groups 1.5": (2, "--groups must be a whole number, got 1.5"),
    "run good.toml --groups 0": (2, "--groups and --ranks-per-group must be at least 1."),
    "run good.toml --ranks-per-group -1": (2, "must be at least 1."),
    "run good.toml --steps 0": (2, "--steps must be at least 1."),
    "run good.toml --chaos-every 0": (2, "--chaos-every must be more than 0 seconds."),
    "run good.toml --chaos-every often": (2, "--chaos-every must be a number, got often"),
    "run good.toml --run-dir text.txt": (2, "text.txt: cannot be used as run directory"),
    "run good.toml --fault_tolerance.groups many": (2, "groups must be a whole number, got many"),
    "run good.toml --fault_tolerance.on_loss ignore": (2, "must be one of redistribute, shrink"),
    "doctor": (2, "CONFIG is missing"),
    "doctor good.toml --measure-s 5": (2, "--measure-s needs --run-dir"),
    "init": (2, "WHAT is missing"),
    "init llama4": (2, "must be one of demo, llama3_1b, llama3_8b, qwen3_0.6b, slurm"),
    "init demo --out good.toml": (2, "good.toml is there already"),
    "init demo --out none/here.toml": (2, "there is no such folder"),
    "plan good.toml --nodes 8 --mtbf-hours 100": (2, "--step-s is missing"),
    "plan good.toml --nodes 0 --mtbf-hours 100 --step-s 1": (2, "--nodes and --ranks-per-node must be at least 1"),
    "plan good.toml --nodes 8 --step-s 1": (2, "give either --mtbf-hours or --kill-every-s"),
    "plan good.toml --nodes 8 --step-s 1 --kill-every-s 0": (2, "--mtbf-hours or --kill-every-s more than 0"),
    "plan good.toml --nodes 8 --mtbf-hours 9 --from folder": (2, "folder: folder has no events/ folder"),
    "report nothing": (2, "nothing has no events/ folder; give the directory of a run"),
    "report folder --jsn": (2, "there is no flag --jsn, did you mean --json?"),
    "watch folder": (2, "folder is no run directory"),
    "status folder": (2, "folder is no run directory"),
    "stop folder": (2, "folder is no run directory"),
    "snapshots folder": (2, "folder"),
    "submit good.toml": (2, "there is no sbatch here"),
    "submit missing.toml": (2, "missing.toml: no such file"),
    "agent good.toml --run-dir folder": (2, "--group is missing"),
    "chaos folder": (2, "give --every SECONDS"),
    "chaos folder --every 5": (2, "folder"),
    "pack missing.txt --out x.tokens": (2, "missing.txt"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with some files, and no Slurm."""
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing_behind(here, typed, capsys):
    status, words = MISTAKES[typed]
    before = contents(here)
    with pytest.raises(SystemExit) as ended:
        cli.main(typed.split())
    said = "".join(capsys.readouterr())
    assert ended.value.code == status, said
    assert words in said
    assert "Traceback" not in said
    assert "..\n" not in said
    assert contents(here) == before


def start(*args, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, **more,
    )  # fmt: skip


def test_a_reader_who_goes_away_sees_no_traceback():
    process = start("--help")
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(30) in (0, cli.BROKEN_PIPE_EXIT)
    assert said == ""


def test_a_watcher_is_ended_by_ctrl_c_without_a_traceback(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "supervisor.jsonl").write_text(
        '{"t":1.0,"mono":1.0,"role":"supervisor","group":null,"rank":null,"step":null,"kind":"run_started","groups":2,'
        '"ranks_per_group":1,"seed":0}\n'
    )
    process = start("watch", str(tmp_path))
    assert "2 groups of 1" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == cli.INTERRUPTED_EXIT
    assert process.stderr.read() == ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_it_begins_leaves_nothing(here, signum):
    before = contents(here)
    process = start("run", "good.toml", "--run-dir", "runs/mine", cwd=here)
    until(lambda: list(here.glob("runs/mine/events/*")), "the supervisor to be there")
    process.send_signal(signum)
    said = "".join(process.communicate(timeout=120))
    assert process.returncode == 2, said
    assert "everstep: stopped before anything was started." in said
    assert "Traceback" not in said
    assert contents(here) == before


def test_a_page_or_metrics_port_that_is_taken_costs_no_run(tmp_path, capfd):
    from everstep.report.live import Teller, Telling

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        teller = Teller(Telling(tmp_path, port=port))
        time.sleep(0.2)
        teller.close()
    assert f"no figures on 127.0.0.1:{port} (fault_tolerance.metrics_port)" in capfd.readouterr().out


def test_versions_and_help_are_found_under_all_their_names(capsys):
    for name in ("version", "-V", "--version"):
        with pytest.raises(SystemExit) as ended:
            cli.main([name])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert "torchtitan 0." in said
        assert "torch 2." in said
    for typed in (["help"], ["-h"], ["--help"], ["help", "run"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(typed)
        assert ended.value.code == 0
        assert "usage: everstep" in capsys.readouterr().out


def test_a_plan_of_a_batch_that_is_no_number_says_so(here, capsys):
    (here / "words.toml").write_text(GOOD.replace("global_batch_size = 12", 'global_batch_size = "many"'))
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "words.toml", "--nodes", "4", "--mtbf-hours", "100", "--step-s", "2"])
    assert ended.value.code == 2
    assert "global_batch_size must be" in capsys.readouterr().err


def test_a_plan_shows_its_choices_and_says_when_the_batch_is_too_small_for_more_groups(here, capsys):
    (here / "small.toml").write_text(GOOD.replace("steps = 4", "steps = 4\nlocal_batch_size = 2"))
    arguments = ["--mtbf-hours", "100", "--step-s", "2", "--ranks-per-node", "1"]
    for nodes, flags, small in (
        ("4", [], False),
        ("8", [], True),
        ("8", ["--training.global_batch_size", "16"], False),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", "small.toml", "--nodes", nodes, *arguments, *flags])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert "best: " in said
        if nodes == "4":
            assert "best: 4 groups of 1 node(s), 0 spare(s)" in said
        assert ("note: global_batch_size has 6 slots" in said) is small
