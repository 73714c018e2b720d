"""Sets the keys of a TOML table on a tree of config dataclasses, and checks their types.

Two kinds of section can have one of several classes, which an extra key selects. `mode` selects a member of a union
that torchtitan declares (`[activation_checkpoint] mode = "full"`), by the name that torchtitan's command line uses.
`class` exchanges a component for another of its kind (`[dataloader] class = "package.module.Component"`)."""

import dataclasses
import functools
import importlib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from everstep.run import typed
from everstep.run.typed import UnfitError, words

from .errors import ConfigError, nearest
from .positions import Path
from .private import component_of, is_component
from .source import Source, describe, describe_table

MODEL = "model_spec"
"""The field of a trainer's Config that a file cannot set, because `[job]` selects the model."""

NONE = "None"
"""The string that stands for None, because TOML has no null. torchtitan's command line uses the same."""


@functools.cache
def field_types(config_class: type) -> dict[str, Any]:
    """Return name -> type, with annotations, of the fields of a config dataclass that a file may set."""
    hints = typing.get_type_hints(config_class, include_extras=True)
    names = [f.name for f in dataclasses.fields(config_class) if not f.name.startswith("_")]
    return {name: hints[name] for name in names if name != MODEL}


def assign_table(
    config: Any, table: dict[str, Any], source: Source, path: Path = (), *, extra_keys: Iterable[str] = ()
) -> None:
    """Set the keys of `table` on `config`, in place, and run the checks of each section that changes.

    Args:
        config: a config dataclass. Its `__post_init__` runs again, unless `path` is empty (the root).
        table: key -> TOML value.
        source: the file, for messages.
        path: the keys that lead to `table` in the file.
        extra_keys: further keys that the caller reads from this table; candidates for the nearest key in messages.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or the section refuses its values.
    """
    known = field_types(type(config))
    for key, value in table.items():
        place = (*path, key)
        if key not in known:
            raise _unknown_key(source, place, value, known, extra_keys)
        setattr(config, key, convert(known[key], value, getattr(config, key), source, place))
    if path and table:
        run_own_checks(config, lambda message: source.error(path, f"{describe_table(path)}: {message}"))


def run_own_checks(config: Any, to_error: Callable[[str], ConfigError]) -> None:
    """Run a config dataclass's `__post_init__` again, and turn an exception that it raises into a ConfigError."""
    try:
        getattr(config, "__post_init__", lambda: None)()
    except Exception as error:
        raise to_error(str(error)) from error


def convert(declared: Any, value: Any, current: Any, source: Source, path: Path) -> Any:
    """Convert a TOML value for a field of type `declared`.

    Args:
        declared: the field's type, possibly Annotated.
        value: as tomli returns it.
        current: the field's current value. If it is a section, a table is applied to it in place.
        source: the file, for messages.
        path: the keys that lead to the value in the file.

    Raises:
        ConfigError: the value does not fit.
    """
    declared = _bare(declared)
    members = [_bare(member) for member in typing.get_args(declared)]
    if modes := variants(declared):
        return _set_variant(modes, value, current, source, path)
    section = type(current) if dataclasses.is_dataclass(current) else None
    section = section or next((kind for kind in (declared, *members) if dataclasses.is_dataclass(kind)), None)
    of_list = typing.get_origin(declared) is list
    if of_list and section is not None and isinstance(value, list):
        return [_set_section(section, item, None, source, (*path, i)) for i, item in enumerate(value)]
    if types.NoneType in members and value == NONE:
        return None
    if section is not None and not of_list:
        return _set_section(section, value, current, source, path)
    if isinstance(value, str) and (declared == list[str] or (list[str] in members and str not in members)):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return typed.parse(declared, value)
    except UnfitError:
        wanted = words(declared).replace("null", f'"{NONE}"')
        raise source.error(path, f"{source.name(path)} must be {wanted}, got {shown(value)}") from None


def shown(value: Any) -> str:
    """Return a TOML value as error messages quote it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value[:200]}"'
    if isinstance(value, dict):
        return "a table"
    return repr(value)[:200]


def class_name(config: Any) -> str:
    """Return a value for the `class` key: the import path of the class that a component's config builds."""
    owner = component_of(config) or type(config)
    return f"{owner.__module__}.{owner.__qualname__}"


def _bare(declared: Any) -> Any:
    while typing.get_origin(declared) is typing.Annotated:
        declared = typing.get_args(declared)[0]
    return declared


def variants(declared: Any) -> dict[str, type | None]:
    """Return name -> class for the values of `mode`, if a field is declared as a union of sections; else {}."""
    declared = _bare(declared)
    if typing.get_origin(declared) not in (typing.Union, types.UnionType):
        return {}
    found: dict[str, type | None] = {}
    for member in typing.get_args(declared):
        names = [getattr(mark, "name", None) for mark in getattr(member, "__metadata__", ())]
        bare = _bare(member)
        if not dataclasses.is_dataclass(bare) and bare is not types.NoneType:
            return {}
        if names and names[0]:
            found[names[0]] = None if bare is types.NoneType else bare
    return found


def _set_section(declared: type, value: Any, current: Any, source: Source, path: Path) -> Any:
    if not isinstance(value, dict):
        raise source.error(path, f"{source.name(path)} must be a table, got {shown(value)}")
    keys = dict(value)
    wanted = keys.pop("class", None)
    if wanted is not None and (current is None or wanted != class_name(current)):
        declared, current = _component_config(wanted, declared, source, (*path, "class")), None
    if current is None:
        return _new_section(declared, keys, source, path)
    assign_table(current, keys, source, path)
    return current


def _new_section(declared: type, keys: dict[str, Any], source: Source, path: Path) -> Any:
    known = field_types(declared)
    values = {}
    for key, value in keys.items():
        if key not in known:
            raise _unknown_key(source, (*path, key), value, known, ())
        values[key] = convert(known[key], value, None, source, (*path, key))
    for f in dataclasses.fields(declared):
        if f.init and f.default is f.default_factory is dataclasses.MISSING and f.name not in values:
            raise source.error(path, f"{describe_table(path)} needs the key '{f.name}'")
    try:
        return declared(**values)
    except Exception as error:
        raise source.error(path, f"{describe_table(path)}: {error}") from error


def _set_variant(modes: dict[str, type | None], value: Any, current: Any, source: Source, path: Path) -> Any:
    if not isinstance(value, dict):
        raise source.error(path, f"{source.name(path)} must be a table, got {shown(value)}")
    keys = dict(value)
    now = type(current) if current else None
    mode = keys.pop("mode", next((name for name, kind in modes.items() if kind is now), None))
    name = mode.replace("_", "-") if isinstance(mode, str) else ""
    if name not in modes:
        place, choices = (*path, "mode"), ", ".join(f'"{name}"' for name in modes)
        raise source.error(place, f"{source.name(place)} must be one of {choices}, got {shown(mode)}")
    chosen = modes[name]
    known = field_types(chosen) if chosen is not None else {}
    for key, item in keys.items():
        if key in known:
            continue
        owners = [n for n, kind in modes.items() if kind is not None and key in field_types(kind)]
        if owners:
            wanted = " or ".join(f'"{owner}"' for owner in owners)
            raise source.error((*path, key), f'{describe((*path, key))} needs mode = {wanted}, but mode is "{name}"')
        raise _unknown_key(source, (*path, key), item, known, ["mode"])
    if chosen is None:
        return None
    if now is not chosen:
        return _new_section(chosen, keys, source, path)
    assign_table(current, keys, source, path)
    return current


def _component_config(name: Any, declared: type, source: Source, path: Path) -> type:
    """Return the Config class at this import path. Raises ConfigError if it is of another kind than `declared`."""
    module_name, _, attribute = str(name).rpartition(".")
    try:
        component = getattr(importlib.import_module(module_name), attribute)
        config_class = getattr(component, "Config", None)
        if dataclasses.is_dataclass(config_class):
            field_types(typing.cast(type, config_class))
    except (Exception, SystemExit) as error:
        what = f"must be the import path of a class, but {shown(name)} cannot be imported: {error}"
        raise source.error(path, f"{source.name(path)} {what}") from error
    # Any component of the same kind is accepted: a subclass of the kind's root, which is the last dataclass of the MRO
    # before the base Config with `build` that all components share.
    line = [c for c in declared.__mro__ if dataclasses.is_dataclass(c)]
    root = line[-2] if is_component(line[-1]) and len(line) > 1 else line[-1]
    if not isinstance(config_class, type) or not issubclass(config_class, root):
        kind = component_of(root) or root
        raise source.error(path, f"{source.name(path)} must name a {kind.__name__}, got {shown(name)}")
    return config_class


def _unknown_key(
    source: Source, path: Path, value: Any, known: dict[str, Any], extra_keys: Iterable[str]
) -> ConfigError:
    key = str(path[-1])
    near = nearest(key, [*known, *extra_keys])
    if len(path) == 1 and key in source.elsewhere:
        return source.error(path, f"there is no key '{key}' above the first section; [{source.elsewhere[key]}] has it")
    if len(path) == 1:
        what = f"there is no section [{key}]" if isinstance(value, dict) else f"there is no key '{key}'"
        is_table = near is not None and words(known.get(near, Any)) == "a table"
        return source.error(path, f"{what}; the nearest is {f'[{near}]' if is_table else repr(near)}")
    message = f"{describe_table(path[:-1])} has no key '{key}'"
    if key in source.elsewhere:
        return source.error(path, f"{message}; [{source.elsewhere[key]}] has it")
    if near is None:
        return source.error(path, message)
    kind = f" ({words(known[near])})" if near in known else ""
    return source.error(path, f"{message}; the nearest is '{near}'{kind}")
