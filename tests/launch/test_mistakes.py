"""A new user's mistakes: each gives one sentence and the right exit status, and leaves nothing behind."""

import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from config.conftest import GOOD

from everstep import cli
from everstep.config.sections import FaultTolerance
from everstep.run.directory import groups_file, prepared_file
from everstep.run.events import EventLog
from everstep.run.exits import USAGE_EXIT, TrainerEnds
from everstep.run.files import read_json, write_json
from everstep.titan.run_context import open_run_context
from watched import DEADLINE_S, environment, until

MISTAKES = {
    # command line -> part of the answer; the exit status is 2
    "": "usage: everstep COMMAND",
    "rum good.toml": "there is no command rum, did you mean run?",
    "run": "CONFIG is missing; see --help",
    "run missing.toml": "missing.toml: there is no such file",
    "run good.toml --stepz 3": "there is no flag --stepz, did you mean --steps?",
    "run good.toml --groups x": "--groups must be an integer",
    "run good.toml --groups 0": "--groups must be at least 1.",
    "run good.toml --chaos-every nan": "--chaos-every must be more than 0 seconds.",
    "run good.toml --run-dir text.txt": "text.txt: cannot be used as run directory",
    "init llama4": "must be one of demo, llama3_1b, llama3_8b, qwen3_0.6b, slurm",
    "init demo --out good.toml": "good.toml exists already",
    "init demo --out nothing/good.toml": "nothing/good.toml: No such file or directory",
    "agent good.toml --group 0 --run-dir text.txt": "text.txt: File exists",
    "report nothing": "nothing is not a run directory: it has no events/*.jsonl.",
    "status folder": "folder is not a run directory",
    "stop foreign": "foreign is not a run directory: it has neither token nor config.toml.",
    "snapshots started": "started/token is missing: without it no snapshot of the run can be found.",
    "snapshots foreign --sweep": "--sweep is for all of this machine's memory: give no run directory with it.",
    "snapshots --sweep --segment-dir nosuch": "--segment-dir nosuch: there is no such folder.",
    "submit good.toml": "there is no sbatch here",
    "submit good.toml --ntasks-per-node=8": "give --ranks-per-node instead",
    "submit good.toml -N2": "-N2: give --nodes-per-group instead",
    "agent good.toml --run-dir folder": "--group is missing",
    "agent good.toml --run-dir folder --group 0 --node-rank 1": "--node-rank below --nodes",
    "run good.toml --run-dir=": "run-dir is empty: give a path",
    "doctor good.toml --nodes-per-group 0": "--nodes-per-group must be at least 1, and --ranks-per-group a",
    "doctor good.toml --nodes-per-group 2": "--ranks-per-group a multiple of it.",
    "replay started --step 4 --slot 2": "step 4 has no slot 2: it has 2, counted from 0.",
    "replay semi --step 4 --slot 1": "--slot: a semi-synchronous run has no gradients",
    "chaos folder": "give --every SECONDS",
    "chaos started --campaign late.toml": "late.toml: kill-all at step 5, but the run ends at step 4.",
    "chaos folder --faults kill-all --campaign good.toml": "--faults needs --every SECONDS",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with some files. Slurm is not in the PATH."""
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "folder").mkdir()
    for name in ("foreign", "started", "semi"):
        log = EventLog(tmp_path / name, 0, 0, "worker")
        log.emit("commit", 4, groups=[0], loss=1.0, tokens=1.0, history="", parent="", owners=[0, 0])
    (tmp_path / "started" / "config.toml").touch()
    (tmp_path / "semi" / "config.toml").write_text('[semi_sync]\nmethod = "diloco"\n')
    write_json(
        prepared_file(tmp_path / "started"), dict.fromkeys(("groups", "ranks", "seed", "steps"), 4) | {"identity": ""}
    )
    (tmp_path / "late.toml").write_text('[[fault]]\nname = "kill-all"\nat_step = 5\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_told_in_a_sentence_and_leaves_nothing_behind(here, typed, capsys):
    before = contents(here)
    with pytest.raises(SystemExit) as ended:
        cli.main(typed.split())
    said = "".join(capsys.readouterr())
    assert ended.value.code == 2, said
    assert MISTAKES[typed] in said
    assert [words for words in ("Traceback", "..\n") if words in said] == []
    assert contents(here) == before


def start(*args, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(), **more,
    )  # fmt: skip


def test_a_mistake_that_only_a_supervisor_sees_is_told_by_it_and_leaves_what_the_run_goes_by(here):
    write_json(prepared := prepared_file(here / "mine"), {"of": "an earlier start"})
    flags = ("--data.source", "stdlib", "--training.seq_len", "1000000", "--run-dir", "mine")
    process = start("run", "good.toml", *flags, cwd=here)
    said = "".join(process.communicate(timeout=DEADLINE_S))
    assert (process.returncode, "Training sequence length 1000000 exceeds" in said) == (2, True), said
    assert read_json(prepared) == {"of": "an earlier start"}


def test_a_watcher_is_ended_by_ctrl_c_without_a_traceback_and_by_itself_if_the_launcher_was_killed(tmp_path):
    EventLog(tmp_path, None, None, "elsewhere").emit("run_started", groups=2, ranks_per_group=1, seed=0)
    process = start("watch", str(tmp_path))
    assert "2 groups of 1" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert (process.wait(DEADLINE_S), process.stderr.read()) == (cli.INTERRUPTED_EXIT, "")
    EventLog(tmp_path, None, None, "supervisor")
    assert start("watch", str(tmp_path)).wait(DEADLINE_S) == 1


def test_a_run_that_is_stopped_before_it_begins_leaves_nothing(here, capsys):
    before = contents(here)
    process = start("run", "good.toml", "--run-dir", "mine", cwd=here)
    until(lambda: list(here.glob("mine/events/*")), "the supervisor to be there")
    (here / "folder" / ".lock").hardlink_to(here / "mine" / ".lock")  # as before the events are there
    for command in ("status folder", "scale mine --groups 2"):
        with pytest.raises(SystemExit):
            cli.main(command.split())
    assert capsys.readouterr().err.count(f"is still starting (pid {process.pid})") == 2
    (here / "folder" / ".lock").unlink()
    process.send_signal(signal.SIGTERM)
    said = "".join(process.communicate(timeout=DEADLINE_S))
    assert process.returncode == 2, said
    assert "everstep: stopped before anything was started." in said
    assert "Traceback" not in said
    assert contents(here) == before


def test_a_group_that_the_run_does_not_have_is_refused_at_once(tmp_path, monkeypatch):
    """For instance if torchrun gives a wrong group id. The lighthouse need not be up for this."""
    monkeypatch.setenv("RANK", "0")
    ft = FaultTolerance(enable=True, groups=2, group_id=5, bind_host="192.0.2.1")
    config = SimpleNamespace(fault_tolerance=ft, dump_folder=str(tmp_path))
    with pytest.raises(TrainerEnds, match="group_id = 5 is none of this run's groups, 0 to 1") as ended:
        open_run_context(config)
    assert ended.value.status == USAGE_EXIT
    write_json(groups_file(tmp_path), {"groups": 2})  # as `everstep scale` does: the group's agent ends it cleanly
    with pytest.raises(TrainerEnds, match=r"bind_host = '192\.0\.2\.1'"):
        open_run_context(config)
