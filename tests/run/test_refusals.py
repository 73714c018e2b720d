"""What cannot work is refused at once, in one sentence, and nothing is overwritten."""

import json
import socket
import sys

import pytest

from forked import ran
from watched import Watched, environment, write_config

COMPLETE_S = 90.0
"""Far more than a refusal takes on a quiet machine, where it is the import of torchtitan: about 5 s."""

MISTAKES = {
    "wrong key": ({"training": {"seq_length": 64}}, (), ("seq_length", "seq_len")),
    "wrong type": ({"training": {"steps": "many"}}, (), ("steps", "many")),
    "unknown model": ({"job": {"config": "llama3_huge"}}, (), ("llama3_huge", "the nearest is")),
    "unknown module": ({"job": {"module": "llama33"}}, (), ("llama33", '"llama3"')),
    "no tokenizer": (
        {"data": {"source": "dataloader"}, "": {"hf_assets_path": "none/here"}}, (), ("none/here",),
    ),
    "no token file": (
        {"data": {"source": "tokens", "path": "none.tokens"}}, (), ("none.tokens", "no such file"),
    ),
    "too few slots": ({"training": {"global_batch_size": 2}}, (), ("2 slots", "3 groups")),
    "too few slots for ranks": (
        {"training": {"global_batch_size": 4}}, ("--ranks-per-group", "2"), ("2 slots", "3 groups"),
    ),
    "indivisible batch": (
        {"training": {"local_batch_size": 2}}, (), ("global_batch_size = 7", "multiple of"),
    ),
    "unknown dataset": (
        {"data": {"source": "dataloader"}, "dataloader": {"dataset": "c5"}, "": {"hf_assets_path": "."}}, (),
        ('dataset = "c5"', 'the nearest is "c4"'),
    ),
    "nccl without a GPU": (
        {"fault_tolerance": {"process_group": "nccl"}}, (), ('process_group = "nccl" needs a GPU', '"gloo"'),
    ),
    "a learning rate that climbs": ({"optimizer": {"lr": -1.0}}, (), ("[optimizer] lr must be 0 or more",)),
    "wrong flag": ({}, ("--training.stepz", "4"), ("stepz",)),
}  # fmt: skip
"""What is wrong: sections over the base config, arguments of `everstep run`, words of the answer."""


def refused(config, run_dir, *args):
    """What `everstep run` says on stderr, having failed."""
    done = ran(
        Watched.command(config, run_dir, *args),
        env=environment(TMPDIR=str(config.parent)),
        cwd=config.parent,
        timeout=COMPLETE_S,
    )
    assert done.returncode == 2, done
    said = done.stderr.strip()
    assert said.startswith("everstep: ")
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in done.stderr + done.stdout
    return said


def nothing_was_written(run_dir):
    """Neither a config nor an event: at most what a process needs to look."""
    return not (run_dir / "config.toml").exists() and not any((run_dir / "checkpoint").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_run_at_once_in_one_sentence(tmp_path, mistake):
    sections, args, words = MISTAKES[mistake]
    (tmp_path / "tokenizer.json").write_text("{}")  # of hf_assets_path = "."
    said = refused(write_config(tmp_path / "bad.toml", **sections), tmp_path / "run", *args)
    assert all(word in said for word in words), said
    assert nothing_was_written(tmp_path / "run")


PREPARE = """
import json, pathlib, sys
from everstep.launch import warm
warm.preload(("torchtitan.train",))
from everstep.launch.prepare import main, take_answer
for call in json.loads(sys.argv[1]):
    print("status", main(call), take_answer(pathlib.Path(call["run_dir"])))
"""


def test_every_mistake_is_found_before_anything_starts(tmp_path):
    calls = []
    for index, (sections, args, _) in enumerate(MISTAKES.values()):
        config = write_config(tmp_path / f"{index}.toml", **sections)
        (tmp_path / f"run-{index}").mkdir()
        (tmp_path / "tokenizer.json").write_text("{}")  # of hf_assets_path = "."
        flags, ranks = list(args), 1
        if "--ranks-per-group" in flags:
            flags, ranks = [], 2
        run_dir = str(tmp_path / f"run-{index}")
        calls.append({"config": str(config), "run_dir": run_dir, "flags": flags, "groups": 3, "ranks": ranks})
    command = [sys.executable, "-c", PREPARE, json.dumps(calls)]
    done = ran(command, env=environment(), cwd=tmp_path, timeout=COMPLETE_S)
    answers = [line for line in done.stdout.splitlines() if line.startswith("status ")]
    assert len(answers) == len(MISTAKES), done.stderr
    for (name, (_, _, words)), answer in zip(MISTAKES.items(), answers, strict=True):
        assert answer.startswith("status 2 "), (name, answer)
        assert all(word in answer for word in words), (name, answer)
    assert all(nothing_was_written(tmp_path / f"run-{index}") for index in range(len(MISTAKES)))


def test_a_run_directory_is_not_taken_from_another_config_or_a_run_that_is_going(start, tmp_path):
    config = write_config(tmp_path / "first.toml", training={"steps": 3})
    other = write_config(tmp_path / "other.toml", training={"steps": 3, "seq_len": 32})
    run = start(config, "--groups", "1")
    run.wait_for("run_started")
    said = refused(config, run.run_dir)
    assert f"in use by a run that is still going (pid {run.process.pid})" in said
    assert run.wait() == 0

    def contents():
        return {
            path: path.read_bytes()
            for path in run.run_dir.rglob("*")
            if path.is_file() and path.relative_to(run.run_dir).parts[0] in ("config.toml", "checkpoint", "events")
        }

    before = contents()
    said = refused(other, run.run_dir)
    assert "holds a run of another config" in said
    assert "seq_len: 64 → 32" in said
    assert contents() == before


def test_a_missing_file_needs_no_second(tmp_path):
    assert "missing.toml: there is no such file" in refused(tmp_path / "missing.toml", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "in use"), ("192.0.2.1", "assign")])
def test_a_lighthouse_says_when_it_cannot_have_its_address(tmp_path, host, why):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "everstep.quorum.lighthouse", "--bind", address, "--run-dir", str(tmp_path)]
        done = ran(command, env=environment(), timeout=COMPLETE_S)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"lighthouse: cannot listen on {address}: ")
    assert why in done.stderr
    assert "Traceback" not in done.stderr
