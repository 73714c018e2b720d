"""Files written for torchtitan 0.2 load: each of its keys is translated, or named in the one warning."""

import functools
import json
import logging

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC

from everstep.config.errors import ConfigError
from everstep.config.legacy import CONVERTED, GONE, GONE_TABLES, MOVED
from everstep.config.resolved import resolved_toml
from everstep.config.source import parse_source
from everstep.titan.load import config_from_source
from sectioned import SectionedTrainer

BASE = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'

KEYS_02 = {
    "job": {
        "config_file": "x.toml",
        "dump_folder": "elsewhere",
        "description": "a run",
        "print_config": True,
        "save_config_file": "config.json",
        "custom_config_module": "my.config",
    },
    "profiling": {
        "enable_profiling": True,
        "save_traces_folder": "traces",
        "profile_freq": 7,
        "profiler_active": 2,
        "profiler_warmup": 2,
        "enable_memory_snapshot": True,
        "save_memory_snapshot_folder": "memory",
    },
    "metrics": {
        "log_freq": 3,
        "enable_tensorboard": True,
        "disable_color_printing": True,
        "save_tb_folder": "board",
        "save_for_all_ranks": True,
        "enable_wandb": True,
    },
    "model": {
        "hf_assets_path": "assets",
        "tokenizer_path": "assets",
        "converters": ["float8"],
        "print_after_conversion": True,
    },
    "optimizer": {
        "name": "Adam",
        "lr": 1e-3,
        "beta1": 0.8,
        "beta2": 0.99,
        "eps": 1e-6,
        "weight_decay": 0.2,
        "implementation": "foreach",
        "early_step_in_backward": True,
    },
    "lr_scheduler": {
        "warmup_steps": 3,
        "total_steps": 50,
        "decay_ratio": 0.5,
        "decay_type": "cosine",
        "min_lr_factor": 0.1,
    },
    "training": {
        "dataset": "c4",
        "dataset_path": "/data",
        "local_batch_size": 4,
        "global_batch_size": 64,
        "seq_len": 512,
        "max_norm": 2.0,
        "steps": 11,
        "enable_cpu_offload": True,
        "dtype": "bfloat16",
        "mixed_precision_param": "float32",
        "mixed_precision_reduce": "float32",
        "gc_freq": 5,
        "gc_debug": True,
    },
    "training.dataloader": {
        "num_workers": 2,
        "persistent_workers": True,
        "pin_memory": True,
        "prefetch_factor": 4,
    },
    "parallelism": {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 4,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 2,
        "disable_loss_parallel": True,
        "enable_async_tensor_parallel": False,
        "pipeline_parallel_degree": 2,
        "module_fqns_per_model_part": [["layers.0"], ["layers.1"]],
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "pipeline_parallel_layers_per_stage": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_schedule_csv": "schedule.csv",
        "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_expert_parallel_overlap": False,
        "context_parallel_degree": 2,
        "context_parallel_load_balancer": "ptrr",
        "context_parallel_rotate_method": "alltoall",
        "expert_parallel_degree": 2,
        "expert_tensor_parallel_degree": 2,
        "expert_parallel_comm_backend": "deepep",
    },
    "checkpoint": {
        "enable": True,
        "enable_ft_dataloader_checkpoints": False,
        "folder": "saved",
        "interval": 7,
        "initial_load_path": "/start",
        "initial_load_model_only": False,
        "initial_load_in_hf": True,
        "initial_load_in_hf_quantized": False,
        "last_save_model_only": False,
        "last_save_in_hf": True,
        "export_dtype": "bfloat16",
        "async_mode": "async",
        "keep_latest_k": 3,
        "load_step": 5,
        "exclude_from_loading": ["optimizer"],
        "enable_first_step_checkpoint": True,
        "create_seed_checkpoint": True,
        "load_only": True,
    },
    "activation_checkpoint": {
        "mode": "full",
        "selective_ac_option": "2",
        "per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe"],
        "early_stop": True,
        "preserve_rng_state": False,
        "determinism_check": "none",
        "debug": True,
    },
    "compile": {"enable": True, "components": ["model"], "backend": "eager"},
    "quantize.linear.float8": {
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
        "recipe_name": "rowwise",
        "filter_fqns": ["output"],
        "emulate": True,
    },
    "quantize.linear.mx": {
        "mxfp8_dim1_cast_kernel_choice": "cuda",
        "recipe_name": "mxfp8_cublas",
        "filter_fqns": ["output"],
    },
    "quantize.grouped_mm.float8": {"fqns": ["experts"]},
    "quantize.grouped_mm.mx": {"recipe_name": "mxfp8", "fqns": ["experts"]},
    "comm": {
        "init_timeout_seconds": 20,
        "train_timeout_seconds": 10,
        "trace_buf_size": 100,
        "save_traces_folder": "comm",
        "save_traces_file_prefix": "r",
        "mode": "fake_backend",
    },
    "memory_estimation": {"enable": True, "disable_fake_mode": True},
    "fault_tolerance": {
        "enable": True,
        "process_group": "nccl",
        "process_group_timeout_ms": 5000,
        "replica_id": 1,
        "group_size": 2,
        "min_replica_size": 3,
        "semi_sync_method": "",
        "sync_steps": 3,
        "should_quantize": True,
        "fragment_sync_delay": 1,
        "fragment_update_alpha": 0.5,
        "module_fqns_per_model_fragment": [["layers.0"]],
        "num_fragments": 2,
    },
    "experimental": {"custom_import": "my.module", "custom_args_module": "my.args"},
    "validation": {
        "enable": True,
        "dataset": "c4",
        "dataset_path": "/data",
        "local_batch_size": 4,
        "seq_len": 512,
        "freq": 3,
        "steps": 5,
    },
    "validation.dataloader": {
        "num_workers": 2,
        "persistent_workers": True,
        "pin_memory": True,
        "prefetch_factor": 4,
    },
    "debug": {
        "seed": 3,
        "deterministic": True,
        "deterministic_warn_only": True,
        "moe_force_load_balance": True,
    },
}
"""Every key of torchtitan 0.2.2's JobConfig and its torchft extension, by TOML table, with a value that is
not the default. (`name` and `flavor` of [model] are in the base; `memory_budget` needs its mode and has a
test.)"""

SAY_NOTHING_NEW = {
    "training.mixed_precision_reduce",  # has one valid value
    "checkpoint.initial_load_in_hf_quantized",  # needs three other keys to be true
    "parallelism.enable_async_tensor_parallel",  # needs compilation to be true
    "fault_tolerance.semi_sync_method",  # none is the default
}
"""Keys of `KEYS_02` whose value is the default, or what the base says."""


def toml(table, key, value):
    return f"[{table}]\n{key} = {json.dumps(value)}\n"


@functools.cache
def base_02():
    """The resolved TOML of BASE."""
    return resolved_toml(config_from_source(parse_source(BASE, "run.toml"), SectionedTrainer.Config))


def load_02(load, text):
    """The resolved TOML of a 0.2 file, before checks across sections."""
    base = BASE if "[model]" not in text else ""
    return resolved_toml(load(text, base=base, check=False, allow_dropped=True))


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [(table, key, value) for table, keys in KEYS_02.items() for key, value in keys.items()],
)
def test_every_key_of_02_is_translated_or_named(load, caplog, table, key, value):
    text = toml(table, key, value)
    if table == "model":
        text = BASE + text.removeprefix("[model]\n")
    before = base_02()
    with caplog.at_level(logging.WARNING, "everstep.config"):
        after = load_02(load, text)
    warnings = [record.getMessage() for record in caplog.records if record.name == "everstep.config"]
    if f"{table}.{key}" in GONE or table.split(".")[0] in GONE_TABLES or key == "selective_ac_option":
        (warning,) = warnings
        assert f": [{table}] {key} → " in warning
        assert after == before
    elif f"{table}.{key}" in SAY_NOTHING_NEW:
        assert (after, warnings) == (before, [])
    else:
        assert warnings == []
        (change,) = set(after.splitlines()) - set(before.splitlines()) or {"same lines, other table"}
        if "process_group_timeout_ms" not in key:
            spelled = json.dumps(value).strip('"[]')
            assert spelled in after, change


def test_the_names_of_keys_that_moved_are_todays(load):
    """Each target of the table can be set: it is a key of a config on which all of 0.2's keys have landed."""
    import tomli

    for old, new in MOVED.items():
        mode = "selective" if old.startswith("activation_checkpoint") else "none"
        text = f'[activation_checkpoint]\nmode = "{mode}"\n'
        value = tomli.loads(resolved_toml(load(text)))
        for key in new.split("."):
            assert key in value, (old, new)
            value = value[key]


def test_no_key_is_both_moved_and_gone():
    assert not MOVED.keys() & GONE.keys()


def test_a_file_for_02_trains_the_same_model_with_the_defaults_of_02(load):
    config = load("[training]\nsteps = 5\n", base='[model]\nname = "llama3"\nflavor = "8B"\n')
    assert (config.job.module, config.job.flavor, config.job.config) == ("llama3", "8B", "")
    assert (config.model_spec.name, config.model_spec.flavor) == ("llama3", "8B")
    (group,) = config.optimizer.param_groups
    assert (group.optimizer_name, group.optimizer_kwargs["lr"]) == ("AdamW", 8e-4)
    assert (config.training.steps, config.training.local_batch_size, config.training.seq_len) == (5, 8, 2048)
    assert config.training.disable_cuda_graphs, "0.2 had none"
    assert not config.validator.enable
    assert not config.profiler.enable_profiling


def test_a_fault_tolerant_file_for_02_is_accepted_as_it_is(load):
    config = load(
        "[training]\nglobal_batch_size = 64\n"
        '[fault_tolerance]\nenable = true\nprocess_group = "gloo"\nprocess_group_timeout_ms = 10000\n'
        "replica_id = 1\ngroup_size = 3\nmin_replica_size = 2\n",
        base=BASE,
    )
    ft = config.fault_tolerance
    assert (ft.group_id, ft.groups, ft.min_groups, ft.reduce_timeout_s) == (1, 3, 2, 10.0)


def test_modes_of_activation_checkpointing_keep_their_names(load):
    assert load('[activation_checkpoint]\nmode = "full"\n', base=BASE).activation_checkpoint == FullAC.Config()
    config = load(
        '[compile]\nenable = true\n[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 0.25\n'
        "visualize_memory_budget_pareto = true\n",
        base=BASE,
    )
    assert config.activation_checkpoint.memory_budget == 0.25
    assert config.activation_checkpoint.visualize_memory_budget_pareto


def test_the_warning_names_line_and_successor_of_every_dropped_key_at_once(load, caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "everstep.config"):
        load(
            'converters = ["float8"]\n'
            '[job]\ndescription = "x"\n'
            '[activation_checkpoint]\nmode = "full"\nselective_ac_option = "2"\nmemory_budget = 0.5\n',
            base=BASE,
            allow_dropped=True,
        )
    (record,) = [r for r in caplog.records if r.name == "everstep.config"]
    assert record.getMessage().replace(f"{tmp_path}/", "").splitlines() == [
        "run.toml: these keys of torchtitan 0.2 have no counterpart and are not used:",
        "  line 4: [model] converters → a registry config that applies the converter, named in [job] config, "
        "e.g. llama3_debugmodel_float8 or llama3_8b_mxfp8",
        "  line 6: [job] description → nothing: no program read it; a comment serves as well",
        '  line 10: [activation_checkpoint] memory_budget → nothing: only mode = "memory-budget" reads it',
    ]


def test_semi_synchronous_training_has_a_section_of_its_own(load):
    config = load('[fault_tolerance]\nsemi_sync_method = "DiLoCo"\nnum_fragments = 1\n', base=BASE, check=False)
    assert (config.semi_sync.method, config.semi_sync.sync_steps) == ("diloco", 5)
    config = load('[fault_tolerance]\nsync_steps = 7\nsemi_sync_method = "local_sgd"\n', base=BASE, check=False)
    assert (config.semi_sync.method, config.semi_sync.sync_steps) == ("local_sgd", 7)
    config = load(
        '[fault_tolerance]\nsemi_sync_method = "diloco"\nsync_steps = 8\nnum_fragments = 2\nfragment_sync_delay = 1\n'
        "fragment_update_alpha = 0.5\nshould_quantize = false\nmodule_fqns_per_model_fragment = []\n",
        base=BASE,
        check=False,
    )
    found = config.semi_sync
    assert (found.sync_steps, found.fragments, found.overlap_steps, found.mixing) == (8, 2, 1, 0.5)


def test_fragments_by_name_are_refused(load, tmp_path):
    key = "module_fqns_per_model_fragment"
    with pytest.raises(ConfigError) as caught:
        load(f'[fault_tolerance]\nsemi_sync_method = "diloco"\n{key} = [["layers.0"], ["layers.1"]]\n', base=BASE)
    assert str(caught.value) == (
        f"{tmp_path}/run.toml:6: [fault_tolerance] {key} must be empty: layers are dealt to the fragments in turn"
    )


def test_a_key_under_both_its_names_is_refused(load, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load("[training]\nseed = 1\n[debug]\nseed = 2\n", base=BASE)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == (
        "run.toml:5: [training] seed is torchtitan 0.2's name of [debug] seed, which the file sets too"
    )


def test_an_error_in_a_key_that_moved_names_it_on_the_line_where_it_stands(load, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load("[training]\nsteps = 3\ndataset = 4\n", base=BASE)
    assert str(caught.value).removeprefix(f"{tmp_path}/") == (
        "run.toml:6: [dataloader] dataset ([training] dataset in the file) must be a string, got 4"
    )


def test_the_older_spellings_of_01_load(load):
    config = load(
        "[training]\nbatch_size = 2\ncompile = true\nseed = 4\n[lr_scheduler]\nlr_min = 0.1\n"
        "[checkpoint]\nenable_checkpoint = true\nmodel_weights_only = false\n"
        "[validation]\nenabled = true\nsteps = 3\n",
        base=BASE,
    )
    assert config.training.local_batch_size == 2
    assert config.compile.enable
    assert config.debug.seed == 4
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert config.checkpoint.enable
    assert not config.checkpoint.last_save_model_only
    assert config.validator.enable


LLAMA3_01 = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"
tokenizer_path = "./torchtitan/datasets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
batch_size = 1
seq_len = 8192
warmup_steps = 200
steps = 1000
data_parallel_shard_degree = -1
compile = false
dataset = "c4"
[experimental]
pipeline_parallel_degree = 1
context_parallel_degree = 2
[checkpoint]
enable_checkpoint = false
interval_type = "steps"
interval = 500
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_float8_linear = false
"""
"""llama3_8b.toml as torchtitan 0.1's tree had it, shortened."""


def test_a_llama3_file_of_01_loads_and_keeps_its_warmup_and_parallelism(load):
    warnings = []
    config = load(LLAMA3_01, base="", warnings=warnings)
    assert config.lr_scheduler.warmup_steps == 200
    assert config.parallelism.context_parallel_degree == 2
    (warning,) = warnings
    assert "[checkpoint] interval_type → nothing: [checkpoint] interval counts steps" in warning
    assert "warmup_steps" not in warning


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[model]\nname = "deepseek_v3"\nflavor = "671B"\nconverters = ["float8"]\n', "deepseek_v3_671b_float8"),
        ('[model]\nname = "llama3"\nflavor = "405B"\nconverters = "float8"\n', "llama3_debugmodel_float8"),
        (BASE + "[float8]\nenable_float8_linear = true\n", "[float8] enable_float8_linear asks for float8"),
    ],
)
def test_a_converter_that_would_be_dropped_is_refused_unless_that_is_allowed(load, text, what):
    with pytest.raises(ConfigError) as caught:
        load(text, base="", check=False)
    assert what in str(caught.value)
    assert "--allow-dropped" in str(caught.value)
    warnings = []
    load(text, base="", check=False, allow_dropped=True, warnings=warnings)
    assert len(warnings) == 1


def test_the_configs_that_a_hint_names_exist():
    import importlib

    for model, names in CONVERTED.items():
        registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        assert all(hasattr(registry, name) for name in names.split(" or "))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        ("llama4", "has no llama4 any more"),
        ("vlm", "has no vlm any more"),
        ("flux", "flux makes images"),
        ("transformers_modeling_backend", 'module = "torchtitan.experiments.transformers_modeling_backend"'),
    ],
)
def test_a_model_that_is_gone_says_so_instead_of_naming_a_neighbour(load, model, what):
    with pytest.raises(ConfigError) as caught:
        load("", base=f'[model]\nname = "{model}"\nflavor = "debugmodel"\n')
    assert what in str(caught.value)
    assert "nearest" not in str(caught.value)
