"""Files written for torchtitan 0.2 load. Each of their keys is translated, or named in the only warning."""

import functools
import json

import pytest
import tomli

from everstep.config.errors import ConfigError
from everstep.config.legacy import GONE, MOVED
from everstep.config.resolved import resolved_toml
from everstep.config.source import parse_source
from everstep.titan.load import config_from_source
from everstep.titan.trainer import EverstepTrainer

BASE = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'


def paths_of(name):
    *tables, key = name.split(".")
    return ".".join(tables), key


@functools.cache
def defaults():
    return tomli.loads(resolved_toml(config_from_source(parse_source(BASE, "run.toml"), EverstepTrainer.Config)))


OTHER = {  # valid values of the keys for which `changed` gives no valid value
    "model.name": "llama3", "model.flavor": "debugmodel", "lr_scheduler.lr_min": 0.5,
    "checkpoint.model_weights_only": False, "checkpoint.last_save_model_weights_only": False,
    "fault_tolerance.process_group_timeout_ms": 5000, "fault_tolerance.semi_sync_method": "diloco",
    "job.save_config_file": "elsewhere", "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": ["moe"],
    "parallelism.enable_async_tensor_parallel": False, "experimental.enable_async_tensor_parallel": False,
}  # fmt: skip


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return 4 if value == "None" else "elsewhere"


@pytest.mark.parametrize("old", [name for name in MOVED if name not in ("profiling", "validation")])
def test_a_key_that_moved_arrives_where_it_is_today(load, old):
    """The key is set to a value other than its default. A table that moved is tested with one of its keys."""
    old, new = (f"{old}.pin_memory", f"{MOVED[old]}.pin_memory") if old.endswith("dataloader") else (old, MOVED[old])
    mode = '[activation_checkpoint]\nmode = "selective"\n' if old.startswith("activation_checkpoint") else ""
    default = defaults()
    for part in new.split("."):
        default = default.get(part, "None") if isinstance(default, dict) else default
    value = "elsewhere" if new.endswith(("path", "dataset")) else OTHER.get(old, changed(default))
    table, name = paths_of(old)
    warnings = []
    text = f"{name} = {json.dumps(value)}\n"
    if new.startswith("semi_sync.") and name != "semi_sync_method":  # without a method nothing reads the key
        text += 'semi_sync_method = "diloco"\n'
    text = text if table in mode else f"[{table}]\n{text}"
    if table == "model":
        text = "" if name in BASE else text.removeprefix("[model]\n")
    config = load(mode + text, base=BASE, check=False, warnings=warnings)
    found = tomli.loads(resolved_toml(config))
    for part in new.split("."):
        found = found[part]
    assert found == (value / 1000 if name.endswith("_ms") else value)
    assert not warnings


@pytest.mark.parametrize("method", ["", "local_sgd"])
def test_keys_of_a_method_that_is_not_used_are_named_and_change_nothing(load, method):
    warnings = []
    text = f'[fault_tolerance]\nsemi_sync_method = "{method}"\nnum_fragments = 2\n'
    config = load(text, base=BASE, check=False, warnings=warnings)
    assert "  line 6: [fault_tolerance] num_fragments → nothing: it is read with semi_sync_method" in warnings[0]
    assert config.semi_sync.fragments == 1


@pytest.mark.parametrize("key", ["model", "experimental"])
def test_a_value_in_place_of_an_old_table_is_refused(load, key):
    with pytest.raises(ConfigError, match=f"run.toml:1: there is no key '{key}'"):
        load(f'{key} = 3\n[job]\nmodule = "llama3"\nconfig = "llama3_debugmodel"\n', base="")


def test_keys_that_are_gone_are_named_at_once_with_line_and_successor_and_change_nothing(load):
    tables, lines, rows = {"model": {}}, BASE.splitlines(), []
    for gone in GONE:
        if not gone.startswith("fault_tolerance"):
            table, key = paths_of(gone if "." in gone else f"{gone}.enable")
            tables.setdefault(table, {})[key] = GONE[gone]
    for table, keys in tables.items():
        lines += [f"[{table}]"] if table != "model" else []  # BASE ends in [model]
        for key, went in keys.items():
            lines.append(f"{key} = false")
            rows.append(f"  line {len(lines)}: [{table}] {key} → {went}")
    warnings = []
    config = load("\n".join(lines), base="", check=False, warnings=warnings)
    assert tomli.loads(resolved_toml(config)) == defaults()
    [warning] = warnings
    assert warning.splitlines()[1:] == rows


LLAMA3_01 = """
[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./torchtitan/datasets/tokenizer/original/tokenizer.model"
[training]
warmup_steps = 200
steps = 1000
dataset = "c4"
[experimental]
context_parallel_degree = 2
[checkpoint]
interval_type = "steps"
interval = 500
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
"""llama3_8b.toml of torchtitan 0.1, shortened."""


def test_a_llama3_file_of_01_loads_and_keeps_its_warmup_and_parallelism(load):
    warnings = []
    config = load(LLAMA3_01, base="", warnings=warnings)
    assert (config.lr_scheduler.warmup_steps, config.parallelism.context_parallel_degree) == (200, 2)
    (warning,) = warnings
    assert "[checkpoint] interval_type → nothing: [checkpoint] interval counts steps" in warning
    assert "warmup_steps" not in warning


def test_a_converter_that_would_be_dropped_is_refused(load):
    with pytest.raises(ConfigError, match=r"\[float8\] enable_float8_linear asks for float8"):
        load("[float8]\nenable_float8_linear = true\n", base=BASE, check=False)
