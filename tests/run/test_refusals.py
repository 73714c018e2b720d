"""What cannot work is refused at once, in one sentence, and nothing is overwritten.

What the judge of a config knows is in tests/config; here is that a run asks it, and what only a run can see.
"""

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
    "unknown model": ({"job": {"config": "llama3_huge"}}, (), ("llama3_huge", "the nearest is")),
    "no tokenizer": (
        {"data": {"source": "dataloader"}, "": {"hf_assets_path": "none/here"}}, (), ("none/here",),
    ),
    "no token file": (
        {"data": {"source": "tokens", "path": "none.tokens"}}, (), ("none.tokens", "no such file"),
    ),
    "too few slots for ranks": (
        {"training": {"global_batch_size": 4}}, ("--ranks-per-group", "2"), ("2 slots", "3 groups"),
    ),
    "unknown dataset": (
        {"data": {"source": "dataloader"}, "dataloader": {"dataset": "c5"}, "": {"hf_assets_path": "."}}, (),
        ('dataset = "c5"', 'the nearest is "c4"'),
    ),
    "nccl without a GPU": (
        {"fault_tolerance": {"process_group": "nccl"}}, (), ('process_group = "nccl" needs a GPU', '"gloo"'),
    ),
    "wrong flag": ({}, ("--training.stepz", "4"), ("stepz",)),
    "many groups": ({}, ("--fault_tolerance.groups", "many"), ("groups must be an integer, got many",)),
    "groups apart": ({}, ("--fault_tolerance.no-enable",), ("enable = true",)),
}  # fmt: skip
"""What is wrong: sections over the base config, arguments of `everstep run`, words of the answer."""
FILES = {
    "[training\n": ":1: not valid TOML",
    b"\xff\xfe\x00": "not valid TOML",
    None: "cannot be read: Is a directory",
}
"""Whole files that are wrong, or a folder, and words of the answer."""


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


PREPARE = """
import json, pathlib, sys
from everstep.launch.prepare import main, take_answer
for call in json.loads(sys.argv[1]):
    print("status", main(call), take_answer(pathlib.Path(call["run_dir"])))
"""


def prepared(tmp_path, calls):
    """What a process that prepares these says: a line each."""
    command = [sys.executable, "-c", PREPARE, json.dumps(calls)]
    done = ran(command, env=environment(), cwd=tmp_path, timeout=COMPLETE_S)
    answers = [line for line in done.stdout.splitlines() if line.startswith("status ")]
    assert len(answers) == len(calls), done.stderr
    return answers


def call(config, run_dir, *flags, groups=3, ranks=1):
    run_dir.mkdir(exist_ok=True)
    return {"config": str(config), "run_dir": str(run_dir), "flags": list(flags), "groups": groups, "ranks": ranks}


def test_every_mistake_is_found_before_anything_starts(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")  # of hf_assets_path = "."
    calls, wanted = [], []
    for index, (sections, args, words) in enumerate(MISTAKES.values()):
        flags, ranks = (args, 1) if "--ranks-per-group" not in args else ((), 2)
        config = write_config(tmp_path / f"{index}.toml", **sections)
        calls.append(call(config, tmp_path / f"run-{index}", *flags, ranks=ranks))
        wanted.append(words)
    for text, words in FILES.items():
        config = tmp_path / f"{len(calls)}.toml"
        if text is None:
            config.mkdir()
        else:
            config.write_bytes(text if isinstance(text, bytes) else text.encode())
        calls.append(call(config, tmp_path / f"run-{len(calls)}"))
        wanted.append((words,))
    for answer, words in zip(prepared(tmp_path, calls), wanted, strict=True):
        assert answer.startswith("status 2 "), (words, answer)
        assert all(word in answer for word in words), (words, answer)
    assert not list(tmp_path.glob("run-*/config.toml"))


def test_a_run_directory_goes_on_with_its_own_config_and_another_number_of_groups(tmp_path):
    config, run_dir = write_config(tmp_path / "good.toml"), tmp_path / "run"
    flags = ((), ("--fault_tolerance.groups", "2"), ("--debug.seed", "8"))
    settled, fewer, other_seed = prepared(tmp_path, [call(config, run_dir, *one, groups=None) for one in flags])
    identity = settled.partition("identity=")[2].partition(",")[0]
    assert settled.startswith("status 0 Prepared(groups=3, ranks=1, seed=0, steps=30")
    assert fewer.startswith("status 0 Prepared(groups=2"), "the number of groups does not decide the result"
    assert f"identity={identity}" in fewer
    assert other_seed.startswith("status 2 ")
    assert "holds a run of another config" in other_seed
    assert "seed" in other_seed


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
