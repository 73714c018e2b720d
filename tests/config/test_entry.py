"""`--module everstep --config FILE.toml` through torchtitan's own parser."""

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


@pytest.mark.parametrize(
    ("more", "flags", "said"),
    [
        ("min_groups = 4\n", ["--fault_tolerance.groups", 5], ""),
        ("", ["--fault_tolerance.min_groups", 4], "min_groups = 4 can never be met"),
        ("group = 3\n", [], "run.toml:12: [fault_tolerance] has no key 'group'; the nearest is 'groups' (an integer)"),
        ("", ["--job.config", "llama3_8b"], "Unrecognized options: --job.config"),
    ],
)
def test_file_and_flags_are_refused_together_with_status_2(run_toml, capsys, more, flags, said):
    run_toml.write_text(TEXT + more)
    if not said:
        assert parse("--config", run_toml, *flags).fault_tolerance.groups == 5
        return
    with pytest.raises(SystemExit) as caught:
        parse("--config", run_toml, *flags)
    assert caught.value.code == 2
    assert said in "".join(capsys.readouterr())
