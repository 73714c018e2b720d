"""A config written out loads to the same config; its identity changes with the mathematics of a run, and
only then."""

import copy
import json
from pathlib import Path

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from everstep.config.resolved import _structure, _toml_lines, config_identity, differing_keys, resolved_toml
from everstep.titan import cpu
from everstep.titan.load import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_of_ours_loads_to_an_equal_config_from_its_resolved_toml(path, config_class, tmp_path):
    config = load_config(path, config_class)
    copy_path = tmp_path / "config.toml"
    copy_path.write_text(resolved_toml(config))
    again = load_config(copy_path, config_class)
    sections = [name for name in config_class.__dataclass_fields__ if name != "model_spec"]
    assert [getattr(again, name) for name in sections] == [getattr(config, name) for name in sections]
    assert config_identity(again) == config_identity(config)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("llama3", "llama3_debugmodel_ce_loss"),
        ("qwen3", "qwen3_debugmodel_moe_param_groups"),
        ("deepseek_v3", "deepseek_v3_debugmodel_mtp"),
        ("gpt_oss", "gpt_oss_20b"),
    ],
)
def test_so_does_every_kind_of_torchtitans(load, module, name):
    base = f'[job]\nmodule = "{module}"\nconfig = "{name}"\n'
    config = load("", base=base)
    again = load(resolved_toml(config), base="")
    assert resolved_toml(again) == resolved_toml(config)
    assert config_identity(again) == config_identity(config)
    structure = json.dumps(_structure(config.model_spec.model))
    assert "normal_" in structure, "functions count, by name"
    assert " at 0x" not in structure, "it holds nothing of this process"


def test_what_toml_cannot_say_is_named(load):
    config = load("", base='[job]\nmodule = "llama3"\nconfig = "sft_debugmodel"\n')
    text = resolved_toml(config)
    assert text.startswith("# left to the base config: [dataloader] sample_processor\n")
    assert load(text, base="").dataloader.load_dataset_kwargs == config.dataloader.load_dataset_kwargs


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a.'\"\n é", max_size=3), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text("ab-_1 .\"'\\\n", max_size=3), VALUES, max_size=4))
def test_any_table_is_written_as_toml_that_reads_the_same(table):
    assert tomli.loads("\n".join(_toml_lines(table, ()))) == table


SAME = [
    "--fault_tolerance.groups=2",
    "--fault_tolerance.group_id=1",
    "--fault_tolerance.startup_timeout_s=4000",
    "--fault_tolerance.process_group=nccl",
    "--fault_tolerance.lighthouse=http://a:1",
    "--dump_folder=elsewhere",
    "--hf_assets_path=unread",
    "--metrics.log_freq=5",
    "--checkpoint.interval=5",
    "--optimizer.implementation=for-loop",
    "--parallelism.data_parallel_shard_degree=1",
    "--dataloader.dataset=unread",
    "--training.gc_freq=3",
    "--profiler.enable_profiling",
]
DIFFERENT = {
    "--training.seq_len=64": "[training] seq_len: 128 → 64",
    "--training.global_batch_size=48": "[training] global_batch_size: 12 → 48",
    "--training.steps=121": "[training] steps: 120 → 121",
    "--training.max_norm=0.5": "[training] max_norm: 1.0 → 0.5",
    "--lr_scheduler.warmup_steps=3": "[lr_scheduler] warmup_steps: 10 → 3",
    "--debug.seed=1": "[debug] seed: 0 → 1",
    "--data.no-shuffle": "[data] shuffle: true → false",
    "--fault_tolerance.on_loss=shrink": '[fault_tolerance] on_loss: "redistribute" → "shrink"',
    "--optimizer.implementation=fused_opt_states_bf16": "optimizer states in bfloat16: false → true",
}


@pytest.fixture(scope="module")
def demo(config_class):
    text = (Path(__file__).parents[2] / "configs" / "demo.toml").read_text()
    text = "\n".join("steps = 120" if line.startswith("steps") else line for line in text.splitlines())

    def load_demo(directory, *flags):
        path = directory / "demo.toml"
        path.write_text(text)
        return load_config(path, config_class, flags)

    return load_demo


@pytest.mark.parametrize("flag", SAME)
def test_how_a_result_is_reached_does_not_change_the_identity(demo, tmp_path, flag):
    before, after = demo(tmp_path), demo(tmp_path, flag)
    assert resolved_toml(before) != resolved_toml(after)
    assert config_identity(before) == config_identity(after)
    assert differing_keys(before, after) == []


@pytest.mark.parametrize(("flag", "difference"), DIFFERENT.items())
def test_what_decides_the_result_does(demo, tmp_path, flag, difference):
    before, after = demo(tmp_path), demo(tmp_path, flag)
    assert config_identity(before) != config_identity(after)
    assert differing_keys(before, after) == [difference]


def test_a_run_may_be_prolonged_if_its_schedule_has_a_length_of_its_own(demo, tmp_path):
    before, after = (demo(tmp_path, "--lr_scheduler.total_steps=120", f"--training.steps={n}") for n in (120, 240))
    assert differing_keys(before, after) == []


def test_the_model_and_its_data_decide_the_result_and_its_kernels_do_not(load):
    base, before = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n', load("")
    larger, other = load("", base=base + 'flavor = "1B"\n'), copy.deepcopy(before)
    other.model_spec.model.layers[0].feed_forward.w1.out_features += 1
    assert 'model: "llama3 debugmodel" → "llama3 1B"' in differing_keys(before, larger)
    assert [key.partition(":")[0] for key in differing_keys(before, other)] == ["model structure"]
    assert differing_keys(before, load('[dataloader]\ndataset = "c4"\n')) == ['[dataloader] dataset: "c4_test" → "c4"']
    assert [key.split()[0] for key in differing_keys(before, load("", ["--hf_assets_path", "b"]))] == [
        "hf_assets_path:"
    ]
    kernels = copy.deepcopy(before)
    cpu.prepare(kernels)
    assert config_identity(before) == config_identity(kernels)
