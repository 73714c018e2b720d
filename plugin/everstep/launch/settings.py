"""From a command line and a TOML file to what the supervisor needs, without importing torch."""

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.config.errors import ConfigError
from everstep.config.legacy import translate
from everstep.config.sections import FaultTolerance
from everstep.config.source import read_source
from everstep.launch.supervisor import RunSettings
from everstep.run.directory import LaunchError, read_toml


def read_run_toml(path: Path) -> dict:
    """A run's TOML file with the names of today: one written for torchtitan 0.2 says other words for the same.

    Raises:
        LaunchError: it is missing or no TOML.
    """
    read_toml(path)
    try:
        source = read_source(path)
        translate(source)
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    return source.table


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The last value of torchtitan flag `--name` (also `--name=value`, dashes for underscores); None if not
    given.
    """
    value = None
    wanted = name.replace("-", "_")
    for position, flag in enumerate(flags):
        if not flag.startswith("--"):
            continue
        key, equals, attached = flag[2:].partition("=")
        if key.replace("-", "_") != wanted:
            continue
        if equals:
            value = attached
        elif position + 1 < len(flags):
            value = flags[position + 1]
    return value


def fault_tolerance(toml: dict, flags: Sequence[str]) -> FaultTolerance:
    """The `[fault_tolerance]` section with its flags applied. Raises LaunchError for a value of the wrong
    type.
    """
    section = toml.get("fault_tolerance", {})
    values: dict[str, Any] = {}
    for field in dataclasses.fields(FaultTolerance):
        raw = flag_value(flags, f"fault_tolerance.{field.name}")
        if raw is None:
            if field.name not in section:
                continue
            raw = section[field.name]
        if field.type in (int, float):
            try:
                raw = field.type(raw)
            except (TypeError, ValueError):
                raise LaunchError(f"fault_tolerance.{field.name}: {raw!r} is not a number.") from None
        values[field.name] = raw
    return FaultTolerance(**values)


def whole_number(toml: dict, flags: Sequence[str], section: str, key: str) -> int | None:
    """`section.key` as the flags or else the file give it; None when neither does."""
    raw = flag_value(flags, f"{section}.{key}")
    if raw is None:
        raw = toml.get(section, {}).get(key)
    if raw is None:
        return None
    try:
        return int(raw)
    except (TypeError, ValueError):
        raise LaunchError(f"{section}.{key}: {raw!r} is not a whole number.") from None


def run_settings(
    config: Path,
    run_dir: Path,
    groups: int | None,
    ranks_per_group: int,
    steps: int | None,
    chaos_every_s: float | None,
    flags: Sequence[str],
) -> RunSettings:
    """Everything `everstep run` was asked for. Raises LaunchError for a missing or invalid file or value."""
    toml = read_run_toml(config)
    flags = list(flags)
    if steps is not None:
        if steps < 1:
            raise LaunchError("--steps must be at least 1.")
        flags += ["--training.steps", str(steps)]
    seed = whole_number(toml, flags, "debug", "seed")
    if seed is None:
        seed = 0
        flags += ["--debug.seed", "0"]  # so that two runs of one config can be compared
    section = fault_tolerance(toml, flags)
    groups = section.groups if groups is None else groups
    if groups < 1 or ranks_per_group < 1:
        raise LaunchError("--groups and --ranks-per-group must be at least 1.")
    if chaos_every_s is not None and chaos_every_s <= 0:
        raise LaunchError("--chaos-every must be more than 0 seconds.")
    return RunSettings(
        config=config,
        run_dir=run_dir,
        groups=groups,
        ranks_per_group=ranks_per_group,
        seed=seed,
        fault_tolerance=section,
        flags=flags,
        chaos_every_s=chaos_every_s,
    )


def local_host() -> str:
    """This machine's name as other machines of a cluster know it."""
    return socket.gethostname()
