"""What a user is told about a wrong file: where, which key, the nearest valid key, the expected type."""

import pytest

from everstep.config.errors import ConfigError

# the base that the `load` fixture writes takes lines 1 to 3
WRONG = {
    "unknown section": (
        "[trainig]\nsteps = 1\n",
        "run.toml:4: there is no section [trainig]; the nearest is [training]",
    ),
    "unknown key": (
        "[training]\nsteps = 1\nseq_length = 128\n",
        "run.toml:6: [training] has no key 'seq_length'; the nearest is 'seq_len' (an integer)",
    ),
    "string for an integer": (
        '[training]\nseq_len = "128"\n',
        'run.toml:5: [training] seq_len must be an integer, got "128"',
    ),
    "a choice that is not there": (
        '[fault_tolerance]\nprocess_group = "mpi"\n',
        'run.toml:5: [fault_tolerance] process_group must be one of "gloo", "nccl", got "mpi"',
    ),
    "what torchtitan's section refuses itself": (
        "[checkpoint]\nkeep_latest_k = 1\n",
        "run.toml:4: [checkpoint]: We need to maintain at least 2 checkpoint replicas, as the last one "
        "may be in the process of being saved.",
    ),
    "not TOML": (
        "[training]\nsteps = \n",
        "run.toml:5: not valid TOML: Invalid value (column 9)",
    ),
}


BASES = {
    "nothing": (
        "",
        'run.toml: no base config: write [job] module = "llama3" and config = "llama3_debugmodel"',
    ),
    "an unknown model": (
        '[job]\nmodule = "lama3"\nconfig = "llama3_8b"\n',
        'run.toml:2: [job] module = "lama3" is neither a model of torchtitan nor a module that can be '
        'imported; the nearest model is "llama3"',
    ),
    "an unknown flavor": (
        '[job]\nmodule = "qwen3"\nflavor = "0.6b"\n',
        'run.toml:3: [job] flavor = "0.6b" is not a model of qwen3; the nearest is "0.6B" of "debugmodel", '
        '"debugmodel_non_fused_qkv", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "debugmodel_moe", "30B-A3B", '
        '"235B-A22B"',
    ),
}


LLAMA = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n'


@pytest.mark.parametrize(
    ("base", "text", "message"),
    [*((LLAMA, *row) for row in WRONG.values()), *((base, "", message) for base, message in BASES.values())],
    ids=[*WRONG, *BASES],
)
def test_a_wrong_file_is_refused_in_one_sentence(load, tmp_path, base, text, message):
    with pytest.raises(ConfigError) as caught:
        load(text, base=base)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == message
