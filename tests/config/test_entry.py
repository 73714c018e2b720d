"""`--module everstep --config FILE.toml` through torchtitan's own parser."""

import sys

import pytest
from torchtitan.config import ConfigManager

TEXT = """\
[job]
module = "llama3"
config = "llama3_debugmodel"
[training]
seq_len = 128
disable_cuda_graphs = true
local_batch_size = 2
global_batch_size = 24
[fault_tolerance]
enable = true
groups = 3
"""


def parse(*arguments):
    return ConfigManager().parse_args(["--module", "everstep", *map(str, arguments)])


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_a_toml_file_is_a_config_of_torchtitans_parser(run_toml):
    from everstep.titan.trainer import EverstepTrainer

    config = parse("--config", run_toml, "--training.seq_len", 64)
    assert type(config) is EverstepTrainer.Config
    assert (config.training.seq_len, config.fault_tolerance.groups) == (64, 3)
    assert config.job.config == "llama3_debugmodel"


def test_a_flag_may_mend_what_the_file_alone_could_not_run(run_toml):
    run_toml.write_text(TEXT + "min_groups = 4\n")
    assert parse("--config", run_toml, "--fault_tolerance.groups", 5).fault_tolerance.groups == 5


def test_what_cannot_run_is_refused_by_the_parser_with_status_2(run_toml, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--config", run_toml, "--fault_tolerance.min_groups", 4)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert "min_groups = 4 can never be met" in said.out + said.err


def test_a_wrong_file_ends_with_its_message_and_status_2(run_toml, capsys):
    run_toml.write_text(TEXT + "group = 3\n")
    with pytest.raises(SystemExit) as caught:
        parse("--config", run_toml)
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"everstep: {run_toml}:12: [fault_tolerance] has no key 'group'; the nearest is 'groups' (an integer)"
    )


def test_a_file_that_is_not_there_is_named(run_toml, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--config", run_toml.with_name("rum.toml"))
    assert caught.value.code == 2
    assert capsys.readouterr().err == (f"everstep: {run_toml.with_name('rum.toml')}: there is no such file\n")


def test_a_library_that_is_missing_is_named_and_not_swallowed(run_toml, monkeypatch):
    monkeypatch.setitem(sys.modules, "everstep.titan.trainer", None)  # an import of it fails
    with pytest.raises(ImportError, match=r"everstep\.titan\.trainer"):
        parse("--config", run_toml)


def test_the_command_line_has_no_flag_for_the_base(run_toml, capsys):
    with pytest.raises(SystemExit):
        parse("--config", run_toml, "--job.config", "llama3_8b")
    said = capsys.readouterr()
    assert "Unrecognized options: --job.config" in said.out + said.err
