"""From a command line and a TOML file to what the launcher needs, without importing torch.

The launcher reads some sections itself; they are parsed as every other one is, by type and with tyro's grammar. The
whole config is torchtitan's to judge, in `prepare`, before anything starts.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.config.assign import assign_table
from everstep.config.errors import ConfigError
from everstep.config.grammar import parse
from everstep.config.legacy import translate
from everstep.config.sections import FaultTolerance
from everstep.config.source import read_source
from everstep.launch.supervisor import RunSettings
from everstep.run.directory import LaunchError, read_toml
from everstep.snapshot.section import Snapshot


@dataclass(kw_only=True)
class Debug:
    """The part of torchtitan's `[debug]` that the launcher reads."""

    seed: int | None = None


@dataclass(kw_only=True)
class Training:
    """The part of torchtitan's `[training]` that the launcher reads."""

    steps: int | None = None
    local_batch_size: int = 0
    global_batch_size: int = 0


@dataclass(kw_only=True)
class Parallelism:
    """The part of torchtitan's `[parallelism]` that the launcher reads."""

    data_parallel_replicate_degree: int = 1
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1


@dataclass(kw_only=True)
class Checkpoint:
    """The part of torchtitan's `[checkpoint]` that the launcher reads."""

    interval: int = 500


@dataclass(kw_only=True)
class Sections:
    """What the launcher reads of a run's config."""

    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    snapshot: Snapshot = field(default_factory=Snapshot)
    debug: Debug = field(default_factory=Debug)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def read_sections(
    path: Path, flags: Sequence[str] = (), groups: int | None = None, *, allow_dropped: bool = False
) -> Sections:
    """The launcher's sections of a run's file, with torchtitan's `flags` applied, and so many groups if that is said.
    Files of torchtitan 0.2 say other words for the same.

    Raises:
        LaunchError: the file is missing, no TOML or for something that is not supported; or a value of these sections
            has the wrong type.
    """
    read_toml(path)
    found = Sections()
    try:
        source = read_source(path)
        translate(source, allow_dropped=allow_dropped)
        for name, section in vars(found).items():
            table = source.table.get(name, {})
            if not isinstance(table, dict):
                raise source.error((name,), f"{name} must be a table: write [{name}]")
            whole = isinstance(section, FaultTolerance | Snapshot)
            known = {key: value for key, value in table.items() if whole or hasattr(section, key)}
            assign_table(section, known, source, (name,))
        found = parse(Sections, flags, default=found)[0]
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    ft = found.fault_tolerance
    if ft.enable and ft.groups == 1:  # torchtitan's replicas are the groups
        ft.groups = max(1, found.parallelism.data_parallel_replicate_degree)
    if groups is not None:
        ft.groups = groups
    return found


def run_settings(
    config: Path,
    run_dir: Path,
    groups: int | None,
    ranks_per_group: int,
    steps: int | None,
    chaos_every_s: float | None,
    flags: Sequence[str],
    **more: Any,
) -> RunSettings:
    """Everything `everstep run` was asked for; `more` are further fields of the settings. Raises LaunchError for a
    missing or invalid file or value."""
    flags = list(flags)
    if steps is not None:
        if steps < 1:
            raise LaunchError("--steps must be at least 1.")
        flags += ["--training.steps", str(steps)]
    sections = read_sections(config, flags, groups, allow_dropped=more.get("allow_dropped", False))
    ft = sections.fault_tolerance
    if ft.groups < 1 or ranks_per_group < 1:
        raise LaunchError("--groups and --ranks-per-group must be at least 1.")
    if chaos_every_s is not None and chaos_every_s <= 0:
        raise LaunchError("--chaos-every must be more than 0 seconds.")
    return RunSettings(
        config=config,
        run_dir=run_dir,
        groups=ft.groups,
        ranks_per_group=ranks_per_group,
        seed=sections.debug.seed or 0,
        fault_tolerance=ft,
        flags=flags,
        chaos_every_s=chaos_every_s,
        **more,
    )


def local_host() -> str:
    """This machine's name as other machines of a cluster know it."""
    return socket.gethostname()
