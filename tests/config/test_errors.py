"""What a user is told about a wrong file: where, which key, the nearest valid key, the expected type."""

import pytest

from everstep.config.errors import ConfigError, nearest

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
    "unknown key of a nested section": (
        '[validator.dataloader]\ndata_set = "c4"\n',
        "run.toml:5: [validator.dataloader] has no key 'data_set'; the nearest is 'dataset' (a string)",
    ),
    "key of another section": (
        "[training]\nlog_freq = 1\n",
        "run.toml:5: [training] has no key 'log_freq'; [metrics] has it",
    ),
    "key of another section, for all parameter groups": (
        "[training]\nlr = 1e-3\n",
        "run.toml:5: [training] has no key 'lr'; [optimizer] has it",
    ),
    "misspelled key that stands for all parameter groups": (
        "[optimizer]\nlearning_lr = 1e-3\n",
        "run.toml:5: [optimizer] has no key 'learning_lr'; the nearest is 'lr'",
    ),
    "string for an integer": (
        '[training]\nseq_len = "128"\n',
        'run.toml:5: [training] seq_len must be an integer, got "128"',
    ),
    "boolean for an integer": (
        "[training]\nsteps = true\n",
        "run.toml:5: [training] steps must be an integer, got true",
    ),
    "a choice that is not there": (
        '[fault_tolerance]\nprocess_group = "mpi"\n',
        'run.toml:5: [fault_tolerance] process_group must be one of "gloo", "nccl", got "mpi"',
    ),
    "an optional value": (
        '[lr_scheduler]\ndecay_ratio = "half"\n',
        'run.toml:5: [lr_scheduler] decay_ratio must be a number or "None", got "half"',
    ),
    "an element of an array": (
        "[compile]\ncomponents = [\n  'model',\n  3,\n]\n",
        "run.toml:5: [compile] components[1] must be a string, got 3",
    ),
    "an activation checkpointing mode that is not there": (
        '[activation_checkpoint]\nmode = "some"\n',
        'run.toml:5: [activation_checkpoint] mode must be one of "selective", "full", "memory-budget", '
        '"none", got "some"',
    ),
    "a key of another mode": (
        "[activation_checkpoint]\nmemory_budget = 0.5\n",
        'run.toml:5: [activation_checkpoint] memory_budget needs mode = "memory-budget", but mode is "selective"',
    ),
    "a class that is no data loader": (
        '[dataloader]\nclass = "torchtitan.components.loss.CrossEntropyLoss"\n',
        'run.toml:5: [dataloader] class must name a BaseDataLoader, got "torchtitan.components.loss.CrossEntropyLoss"',
    ),
    "a parameter group without its pattern": (
        '[[optimizer.param_groups]]\noptimizer_name = "AdamW"\n',
        "run.toml:4: [optimizer.param_groups[0]] needs the key 'pattern'",
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


REGISTRY = """
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.llama3 import model_registry
from dataclasses import dataclass, field
"""


def test_a_registry_may_hand_on_anothers_configs(load, tmp_path, monkeypatch):
    (tmp_path / "handed_on.py").write_text(REGISTRY)
    monkeypatch.syspath_prepend(tmp_path)
    base = '[job]\nmodule = "handed_on"\nconfig = '
    assert load("", base=base + '"llama3_debugmodel"\n').model_spec.flavor == "debugmodel"
    with pytest.raises(ConfigError, match='"field" is not in the registry of handed_on; the nearest is "llama3_debug'):
        load("", base=base + '"field"\n')


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
    "an unknown config": (
        '[job]\nmodule = "llama3"\nconfig = "llama3_8"\n',
        'run.toml:3: [job] config = "llama3_8" is not in the registry of llama3; the nearest is "llama3_8b"',
    ),
    "an unknown flavor": (
        '[job]\nmodule = "qwen3"\nflavor = "0.6b"\n',
        'run.toml:3: [job] flavor = "0.6b" is not a model of qwen3; the nearest is "0.6B" of "debugmodel", '
        '"debugmodel_non_fused_qkv", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "debugmodel_moe", "30B-A3B", '
        '"235B-A22B"',
    ),
    "a module without a config": (
        '[job]\nmodule = "gpt_oss"\n',
        "run.toml:1: [job] needs config or flavor; gpt_oss has the configs gpt_oss_debugmodel, "
        "gpt_oss_debugmodel_flex, gpt_oss_20b, gpt_oss_120b",
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


def test_a_wrong_override_is_refused_in_one_sentence_without_a_help_screen(load, capsys):
    with pytest.raises(ConfigError) as caught:
        load("", ["--training.seq_lenn", "128"])
    assert str(caught.value) == (
        "command line: there is no flag --training.seq_lenn, the nearest is --training.seq_len"
    )
    with pytest.raises(ConfigError) as caught:
        load("", ["--training.seq_len", "x"])
    assert str(caught.value) == ("command line: --training.seq-len must be an integer, got x")
    assert capsys.readouterr().out == ""


def test_a_key_with_a_word_left_out_is_nearer_than_one_with_letters_changed():
    assert nearest("batch_size", ["local_batch_size", "bath_sizes", "seq_len"]) == "local_batch_size"
