"""Writes a config as TOML that loads to an equal config, as an identity, and as a list of differences to another."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from .assign import NONE, class_name, field_types, variants
from .positions import Path
from .private import is_component
from .source import describe


def resolved_toml(config: Any) -> str:
    """Return the config as TOML, with every key that a file may set. `load_config` of the text gives an equal config.

    Values that TOML cannot express, e.g. callables of a registry's config, are left to the base config that `[job]`
    names. Comments list their keys.
    """
    left_out: list[str] = []
    table = _to_table(config, (), left_out)
    table = {"job": table.pop("job"), **table}  # first, as a reader looks for it first
    lines = [f"# left to the base config: {name}" for name in left_out]
    lines += _toml_lines(table, ())
    return "\n".join(lines).strip() + "\n"


def config_identity(config: Any) -> str:
    """Return a hash (SHA-256, hexadecimal) of the settings that decide a run's result: model, data, batch, seed,
    precision, optimizer and learning rate schedule. The number of steps is one of them unless `[lr_scheduler]
    total_steps` is set, because the schedule decays over it.

    Settings that change only how the result is computed are not included: groups, timeouts, process group, parallelism,
    compilation, recomputation, checkpoint intervals, folders, logs. A run directory belongs to one identity.
    """
    text = json.dumps(identity_keys(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def differing_keys(old: Any, new: Any) -> list[str]:
    """Return the settings in which the identities of two configs differ, each as text like
    `[training] seq_len: 128 → 256`. Empty if and only if the identities are equal."""
    before, after = ({key: json.dumps(value) for key, value in identity_keys(one).items()} for one in (old, new))
    differing = (key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key))
    return [f"{key}: {before.get(key, 'absent')[:60]} → {after.get(key, 'absent')[:60]}" for key in differing]


def identity_keys(config: Any) -> dict[str, Any]:
    """Return name -> JSON value of the settings that `config_identity` hashes."""
    keys = {}
    for path, value in _flat(_to_table(config, (), [])):
        if _decides_result(path, config):
            keys[describe(path)] = value
    # An optimizer's implementations differ only by rounding, except the one with states of lower precision.
    keys["optimizer states in bfloat16"] = config.optimizer.implementation == "fused_opt_states_bf16"
    if config.semi_sync.enabled:
        # In place of the file's number, which may be 0.
        keys["[semi_sync] workers"] = config.semi_sync.workers or config.fault_tolerance.groups
    spec = config.model_spec
    keys["model"] = f"{spec.name} {spec.flavor}"
    # One value for the model's structure: it has hundreds of keys, none of which a TOML file sets.
    structure = json.dumps(_structure(spec.model), sort_keys=True)
    keys["model structure"] = hashlib.sha256(structure.encode()).hexdigest()
    return keys


_RESULT_SECTIONS = {"training", "lr_scheduler", "optimizer", "loss", "override"}
_RESULT_KEYS = {
    ("debug", "seed"),
    ("debug", "moe_force_load_balance"),
    ("data", "source"),
    ("data", "path"),
    ("data", "shuffle"),
    ("fault_tolerance", "on_loss"),
    ("checkpoint", "initial_load_path"),
    ("checkpoint", "initial_load_model_only"),
}
_NOT_THE_RESULT = {
    ("training", "disable_cuda_graphs"),
    ("training", "enable_cpu_offload"),
    ("training", "gc_freq"),
    ("training", "gc_debug"),
    ("optimizer", "implementation"),  # but see `identity_keys`
    ("loss", "num_chunks"),
    ("dataloader", "persistent_workers"),
    ("dataloader", "pin_memory"),
    ("dataloader", "prefetch_factor"),
}


def _decides_result(path: Path, config: Any) -> bool:
    if path[:2] in _NOT_THE_RESULT:
        return False
    if path == ("training", "steps"):
        return config.lr_scheduler.total_steps is None  # if set, it is the schedule's length
    if path[0] in ("dataloader", "tokenizer", "hf_assets_path"):
        # The other sources read none of these: their data is in tokens already.
        return config.data.source == "dataloader"
    if path[0] == "semi_sync":
        return config.semi_sync.enabled
    return path[0] in _RESULT_SECTIONS or path[:2] in _RESULT_KEYS


def _structure(value: Any) -> Any:
    """Return a model config as JSON values that are equal in every process. A function is represented by its name and
    the values that it closes over.

    The attention kernel is left out, because it depends on the device.
    """
    if dataclasses.is_dataclass(value):
        fields = {
            f.name: _structure(getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "inner_attention"
        }
        return {"class": class_name(value), **fields}
    if isinstance(value, dict):
        return {str(key): _structure(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [_structure(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, functools.partial):
        return [_structure(value.func), _structure(value.args), _structure(value.keywords)]
    if callable(value):
        closed = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return [f"{value.__module__}.{value.__qualname__}", *map(_structure, closed)]
    if isinstance(value, str | int | float | bool | type(None)):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _to_table(config: Any, path: Path, left_out: list[str]) -> dict[str, Any]:
    """Return a config dataclass as a table of TOML values. Keys that TOML cannot express are added to `left_out`."""
    table = {}
    for name, declared in field_types(type(config)).items():
        value = _to_value(getattr(config, name), declared, (*path, name), left_out)
        if value is None:
            left_out.append(describe((*path, name)))
        else:
            table[name] = value
    return table


def _to_value(value: Any, declared: Any, path: Path, left_out: list[str]) -> Any:
    """Return a value as TOML can express it; None if TOML cannot."""
    if modes := variants(declared):
        name = next(n for n, kind in modes.items() if kind is (None if value is None else type(value)))
        return {"mode": name} | ({} if value is None else _to_table(value, path, left_out))
    if dataclasses.is_dataclass(value):
        table = _to_table(value, path, left_out)
        if is_component(value) and type(value) is not declared:
            return {"class": class_name(value), **table}
        return table
    return _to_plain(value)


def _to_plain(value: Any) -> Any:
    if value is None:
        return NONE
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_to_plain(item) for item in value]
        return None if None in items else items
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        items = {key: _to_plain(item) for key, item in value.items()}
        return None if None in items.values() else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        left_out: list[str] = []
        table = _to_table(value, ("",), left_out)
        return None if left_out else table
    return None


def _flat(table: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(table, dict) and (table or not path):
        for key, value in table.items():
            yield from _flat(value, (*path, key))
    elif isinstance(table, list) and any(isinstance(item, dict) for item in table):
        for index, item in enumerate(table):
            yield from _flat(item, (*path, index))
    else:
        yield path, table


def _toml_lines(table: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a table in TOML: its own keys first, as TOML requires, then its sub-tables."""
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    if path:
        yield ""
        yield f"[{'.'.join(map(_toml_key, path))}]"
    for key, value in table.items():
        if key not in tables:
            yield f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tables.items():
        yield from _toml_lines(value, (*path, key))


def _toml_key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are valid in TOML except surrogate pairs, which ensure_ascii=False avoids. TOML requires an
        # escape for DEL, which JSON does not write.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)  # TOML spells them as Python does, also nan and inf
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    pairs = ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
    return f"{{{pairs}}}"
