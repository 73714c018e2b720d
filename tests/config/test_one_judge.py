"""`run`, `doctor` and `submit --dry-run` accept the same configs. Each mistake gives one sentence and status 2."""

import contextlib
import io
import json
import subprocess
from dataclasses import replace

import pytest

from config.conftest import GOOD
from everstep import cli
from everstep.commands import doctor
from everstep.commands.init import SOURCES
from everstep.config.errors import ConfigError
from everstep.launch import prepare, supervisor
from everstep.titan.imports import import_all


@pytest.fixture
def doors(tmp_path, monkeypatch):
    """A function that returns command -> its refusal of a file and flags, "" if it accepts them. This process, which
    has imported torchtitan already, stands in for the one in which a command reads a config."""
    import_all()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(prepare.subprocess, "run", answered)
    monkeypatch.setattr(supervisor, "run", started)
    monkeypatch.setattr(doctor, "run_checks", lambda *plan: [])  # it checks the machine, not the config

    def judge(path, flags, capsys):
        said = {}
        for door in (["run"], ["submit", "--dry-run"], ["doctor", "--json"]):
            with pytest.raises(SystemExit) as ended:
                cli.main([*door, str(path), *flags])
            out, err = capsys.readouterr()
            assert "Traceback" not in out + err
            if door[0] == "doctor" and out:
                found = [line["found"] for line in json.loads(out)["checks"] if line["check"] == "config"]
                said["doctor"] = "".join(found)
            else:
                assert ended.value.code in (0, 2), (door, ended.value.code, out, err)
                said[door[0]] = err.strip().removeprefix("everstep: ") if ended.value.code == 2 else ""
        return said

    return judge


def answered(command, **how):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = prepare.main(json.loads(command[-1]), tells=True)
    return subprocess.CompletedProcess(command, status, said.getvalue(), "")


def started(options, *more, **others):
    prepare.prepare_in_subprocess(replace(options, run_dir=""))
    raise SystemExit(0)


@pytest.mark.parametrize("what", [what for what, (kind, _) in SOURCES.items() if kind == "configs"])
def test_what_init_writes_is_judged_alike(doors, tmp_path, capsys, what):
    with pytest.raises(SystemExit):
        cli.main(["init", what, "--out", "run.toml"])
    flags = ["--parallelism.data_parallel_shard_degree", "-1", "--fault_tolerance.process_group", "gloo"]
    [said] = set(doors(tmp_path / "run.toml", flags, capsys).values())
    assert not said or "has no tokenizer" in said


MISTAKES = {
    # lines after the example, flags: the sentence
    ("", "--fault_tolerance.enable=false"): (
        "command line: --fault_tolerance.enable takes no value: it switches on; --fault_tolerance.no-enable switches "
        "off"
    ),
    ("", "--optimizer.lr 1"): "command line: --optimizer.lr is not a flag: set it in the file",
    ("", "--data.source dataloader --hf_assets_path none"): (
        'run.toml: hf_assets_path = "none" has no tokenizer (tokenizer.json or vocab.txt or vocab.json), which [data] '
        'source = "dataloader" needs; download the model\'s tokenizer, or set [data] source = "stdlib"'
    ),
    ("", "--validator.enable --validator.dataloader.dataset_path nowhere"): (
        'run.toml: [validator.dataloader] dataset = "c4_validation" is read from nowhere, which does not exist'
    ),
    ('[validator.dataloader]\nclass = "torchtitan.hf_datasets.text_datasets.InterleavedHuggingFaceTextDataLoader"\n'
     'sources = [{dataset = "c4_test", dataset_path = "no"}]', "--validator.enable"): (
        'run.toml: [validator.dataloader] sources[0]: dataset = "c4_test" is read from no, which does not exist'
    ),
    ('[checkpoint]\nenable = true\ninitial_load_path = "/no"', ""): (
        'run.toml: [checkpoint] initial_load_path = "/no" is no folder of a checkpoint'
    ),
    ('[override]\nimports = ["no_such_package.f"]', ""): (
        "run.toml: Failed to import override target 'no_such_package.f': module 'no_such_package' could not be "
        "imported: No module named 'no_such_package'"
    ),
    **{
        (f'[[optimizer.param_groups]]\noptimizer_name = "Adam{more}', ""): f"run.toml: [optimizer] {what}"
        for more, what in (
            ('X"\npattern = ".*"', "Optimizer AdamX not added."),
            ('"\npattern = "("', 'pattern = "(": missing ), unterminated subpattern at position 0'),
            ('"\npattern = "nothing"', "Optimizer param_groups pattern 'nothing' matched no parameters"),
            ('"\npattern = ".*"\noptimizer_kwargs = {lrr = 1.0}', "optimizer_kwargs has lrr, which no optimizer reads"),
        )
    },
    ("[checkpoint]\nlast_save_model_weights_only = 3", ""): (
        "run.toml:18: [checkpoint] last_save_model_only ([checkpoint] last_save_model_weights_only in the file) must "
        "be true or false, got 3"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("more", "flags"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_sentence_at_every_door(doors, tmp_path, capsys, more, flags):
    path = tmp_path / "run.toml"
    path.write_text(f"{GOOD}{more}\n")
    said = doors(path, flags.split(), capsys)
    assert set(said.values()) == {MISTAKES[more, flags].replace("run.toml", str(path), 1)}


@pytest.mark.parametrize(("keys", "why"), [
    ('pipeline_parallel_schedule = "2F2B"', "Unknown schedule name '2F2B'"),
    ("".join(f'[[optimizer.param_groups]]\npattern = "{part}"\noptimizer_name = "Adam"\n' for part in ("head", "")),
     'pattern = "head" matches no parameter of the pipeline stage with tok_embeddings, layers.0'),
    ('[compile]\nenable = true\nbackend = "inductr"', 'backend = "inductr" is none of .*inductor'),
    ("pipeline_parallel_layers_per_stage = 0", "layers_per_stage must be at least 1, got 0"),
    ('pipeline_parallel_schedule = "ZBVZeroBubble"\npipeline_parallel_layers_per_stage = 1', "per rank, got 4"),
    ("context_parallel_degree = 3", "seq_len = 2048 must be a multiple of 6, into which"),
    ("expert_parallel_degree = 2", "expert_parallel_degree = 2 must divide the 3 ranks of a group that share"),
])  # fmt: skip
def test_what_torchtitan_refuses_once_its_ranks_are_connected_is_refused_before(tmp_path, keys, why):
    (path := tmp_path / "run.toml").write_text(f"{GOOD}[parallelism]\npipeline_parallel_degree = 2\n{keys}\n")
    with pytest.raises(ConfigError, match=why):
        prepare.prepare(prepare.PrepareOptions(str(path), ranks=6))
