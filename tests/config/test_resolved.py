"""A config that is written as TOML loads to the same one. Its identity changes only with the run's mathematics."""

import copy
import functools
import json
from pathlib import Path

import pytest

from everstep.config.resolved import _structure, config_identity, differing_keys, resolved_toml
from everstep.titan import cpu_attention
from everstep.titan.load import load_config
from everstep.titan.trainer import EverstepTrainer

CONFIGS = Path(__file__).parents[2] / "configs"
TORCHTITANS = (
    ("llama3", "llama3_debugmodel_ce_loss"), ("qwen3", "qwen3_debugmodel_moe_param_groups"),
    ("deepseek_v3", "deepseek_v3_debugmodel_mtp"), ("gpt_oss", "gpt_oss_20b"),
)  # fmt: skip
TEXTS = {path.stem: path.read_text() for path in sorted(CONFIGS.glob("*.toml"))}
TEXTS |= {name: f'[job]\nmodule = "{module}"\nconfig = "{name}"\n' for module, name in TORCHTITANS}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_config_loads_to_an_equal_one_from_its_resolved_toml(load, text):
    config = load(text, base="")
    again = load(resolved_toml(config), base="")
    sections = [name for name in EverstepTrainer.Config.__dataclass_fields__ if name != "model_spec"]
    assert [getattr(again, name) for name in sections] == [getattr(config, name) for name in sections]
    assert (resolved_toml(again), config_identity(again)) == (resolved_toml(config), config_identity(config))
    structure = json.dumps(_structure(config.model_spec.model))
    assert "normal_" in structure, "functions count, by name"
    assert " at 0x" not in structure, "it holds nothing of this process"


SAME = [
    "--fault_tolerance.groups=2", "--fault_tolerance.process_group=nccl", "--fault_tolerance.lighthouse=http://a:1",
    "--dump_folder=elsewhere", "--hf_assets_path=unread", "--optimizer.implementation=for-loop",
    "--parallelism.data_parallel_shard_degree=1", "--dataloader.dataset=unread",
]  # fmt: skip
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
def demo(tmp_path_factory):
    """A function that loads configs/demo.toml, with 120 steps, and flags."""
    path = tmp_path_factory.mktemp("demo") / "demo.toml"
    text = (CONFIGS / "demo.toml").read_text()
    path.write_text("\n".join("steps = 120" if line.startswith("steps") else line for line in text.splitlines()))
    return functools.cache(lambda *flags: load_config(path, EverstepTrainer.Config, flags))


@pytest.mark.parametrize(("flag", "difference"), [*((flag, None) for flag in SAME), *DIFFERENT.items()])
def test_what_decides_the_result_changes_the_identity_and_how_it_is_reached_does_not(demo, flag, difference):
    before, after = demo(), demo(flag)
    assert resolved_toml(before) != resolved_toml(after)
    assert (config_identity(before) == config_identity(after)) == (difference is None)
    assert differing_keys(before, after) == ([difference] if difference else [])


@pytest.mark.parametrize(("workers", "groups", "same"), [(4, 2, True), (3, 3, False), (0, 2, False)])
def test_a_run_directory_belongs_to_one_number_of_workers_and_not_of_groups(demo, workers, groups, same):
    def identity(workers, groups):
        flags = f"--semi_sync.method=diloco --semi_sync.sync_steps=10 --fault_tolerance.groups={groups}"
        more = f"--semi_sync.workers={workers} --snapshot.no-enable --training.global_batch_size=24"
        return config_identity(demo(*flags.split(), *more.split()))

    assert (identity(workers, groups) == identity(4 if workers else 0, 3)) == same


def test_the_model_and_its_data_decide_the_result_and_its_kernels_do_not(load):
    base, before = '[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n', load("")
    larger, other = load("", base=base + 'flavor = "1B"\n'), copy.deepcopy(before)
    other.model_spec.model.layers[0].feed_forward.w1.out_features += 1
    assert 'model: "llama3 debugmodel" → "llama3 1B"' in differing_keys(before, larger)
    assert [key.partition(":")[0] for key in differing_keys(before, other)] == ["model structure"]
    assert differing_keys(before, load('[dataloader]\ndataset = "c4"\n')) == ['[dataloader] dataset: "c4_test" → "c4"']
    [assets] = differing_keys(before, load("", ["--hf_assets_path", "b"]))
    assert assets.startswith("hf_assets_path: ")
    kernels = copy.deepcopy(before)
    cpu_attention.prepare(kernels)
    assert config_identity(before) == config_identity(kernels)
