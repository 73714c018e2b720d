"""Makes a trainer's config from a TOML file and command line arguments."""

import contextlib
import dataclasses
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path as FilePath
from typing import Any, TypeVar

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.manager import ConfigManager, custom_registry

from everstep.config.assign import assign_table, convert, field_types, run_own_checks, shown
from everstep.config.checks import problems
from everstep.config.errors import ConfigError
from everstep.config.grammar import parse
from everstep.config.legacy import translate
from everstep.config.sections import Job
from everstep.config.source import Source, describe, read_source
from everstep.titan.base_config import base_config

C = TypeVar("C")

logger = logging.getLogger("everstep.config")

_GROUP_KEYS = {"name": str, "lr": float, "beta1": float, "beta2": float, "eps": float, "weight_decay": float}
"""Keys of [optimizer], with their types, that apply to every parameter group at once, as in torchtitan 0.2."""


def load_config(
    path: FilePath,
    config_class: type[C],
    overrides: Sequence[str] = (),
    *,
    groups: int | None = None,
    ranks: int = 0,
    check: bool = True,
    warnings: list[str] | None = None,
) -> C:
    """Return the config that a TOML file describes.

    Args:
        path: the file. Relative paths inside it are relative to the working directory, as torchtitan's are.
        config_class: a subclass of `torchtitan.trainer.Trainer.Config` with the fields `job`,
            `fault_tolerance` and `data`. Each further field is a section of the file, and needs no code
            here.
        overrides: command line arguments in torchtitan's grammar, `--section.key value`; they win over the
            file.
        groups: number of replica groups, instead of the one in file and overrides.
        ranks: number of ranks of a group, for the checks; 0 if not known.
        check: whether to make groups of replicas and to refuse combinations that cannot work. A caller that applies
            more settings to the result does both afterwards, with `replicas_as_groups` and `problems`.
        warnings: list to which warnings for the user are added; if None, they are logged.

    Raises:
        ConfigError: names file, line and key, and says what to do.
    """
    source = read_source(FilePath(path))
    config = config_from_source(source, config_class, warnings=warnings)
    if overrides:
        config = _override(config, overrides)
    if check:
        if told := replicas_as_groups(config, groups):
            _tell(f"{source.file}: {told}", warnings)
        for problem in problems(config, ranks):
            raise source.error(problem.key, problem.message)
        run_own_checks(config, lambda message: ConfigError(f"{source.file}: {message}"))
    return config


def warm_up_parser() -> None:
    """Have torchtitan parse a command line, so that processes that are forked later need not repeat what its parser
    imports and caches at its first use."""
    logging.disable()  # nothing is trained by this config, so its warnings would mislead
    ConfigManager().parse_args(["--module", "llama3", "--config", "llama3_debugmodel"])
    logging.disable(logging.NOTSET)


def config_from_source(source: Source, config_class: type[C], *, warnings: list[str] | None = None) -> C:
    """Return the config of a parsed document, as `load_config` does, without overrides and checks across sections."""
    if dropped := translate(source):
        _tell(dropped, warnings)
    job = Job()
    assign_table(job, _section(source, "job"), source, ("job",))
    base = base_config(job, source)
    config: Any = config_class(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)})
    config.job = job
    source.elsewhere = _sections_by_key(config)
    rest = {key: value for key, value in source.table.items() if key not in ("job", "optimizer")}
    assign_table(config, rest, source)
    _assign_optimizer(config.optimizer, _section(source, "optimizer"), source)
    if config.debug.seed is None:
        config.debug.seed = 0
    return config


def _tell(warning: str, warnings: list[str] | None) -> None:
    if warnings is None:
        logger.warning(warning)
    else:
        warnings.append(warning)


def replicas_as_groups(config: Any, groups: int | None = None) -> str:
    """Set the number of groups, in place. Return a sentence for the user, or "" if replicas did not become groups.

    torchtitan's data-parallel replicas become replica groups, as many as there are replicas unless a number is given.
    Each group then is one replica, and the global batch is that which torchtitan would give all replicas together.
    """
    parallelism, training, ft = config.parallelism, config.training, config.fault_tolerance
    replicas = parallelism.data_parallel_replicate_degree
    if ft.enable and ft.groups == 1:
        ft.groups = max(1, replicas)
    if groups is not None:
        ft.groups = groups
    if not ft.enable or replicas < 2 or ft.groups < 2:
        return ""
    parallelism.data_parallel_replicate_degree = 1
    if training.global_batch_size < 0 and parallelism.data_parallel_shard_degree > 0:
        training.global_batch_size = training.local_batch_size * parallelism.data_parallel_shard_degree * replicas
    return f"data_parallel_replicate_degree = {replicas}: trains as {ft.groups} replica groups of one replica each"


def _sections_by_key(config: Any) -> dict[str, str]:
    """Return key -> section, for the keys that only one section has."""
    sections: dict[str, set[str]] = {key: {"optimizer"} for key in _GROUP_KEYS}
    for section in field_types(type(config)):
        value = getattr(config, section)
        if dataclasses.is_dataclass(value):
            for key in field_types(type(value)):
                sections.setdefault(key, set()).add(section)
    return {key: owners.pop() for key, owners in sections.items() if len(owners) == 1}


def _section(source: Source, name: str) -> dict[str, Any]:
    table = source.table.get(name, {})
    if not isinstance(table, dict):
        raise source.error((name,), f"{name} must be a table, got {shown(table)}")
    return table


def _assign_optimizer(config: OptimizersContainer.Config, table: dict[str, Any], source: Source) -> None:
    """Set [optimizer], in which the keys of `_GROUP_KEYS` (such as `lr`) apply to every parameter group."""
    own = {key: value for key, value in table.items() if key not in _GROUP_KEYS}
    assign_table(config, own, source, ("optimizer",), extra_keys=_GROUP_KEYS)
    for group in config.param_groups:
        if isinstance(group.optimizer_kwargs.get("betas"), list):
            group.optimizer_kwargs["betas"] = tuple(group.optimizer_kwargs["betas"])
    for key, kind in _GROUP_KEYS.items():
        if key not in table:
            continue
        path = ("optimizer", key)
        value = convert(kind, table[key], None, source, path)
        now = [_settings_of(group).get(key) for group in config.param_groups]
        if not now:
            raise source.error(path, f"{describe(path)} needs [[optimizer.param_groups]], and there are none")
        if any(item != now[0] for item in now):
            listed = ", ".join("none" if item is None else shown(item) for item in now)
            raise source.error(
                path,
                f"{describe(path)} cannot apply to all {len(now)} parameter groups, which have {listed}: "
                "write [[optimizer.param_groups]] instead",
            )
        if "param_groups" in table and now[0] not in (None, value):
            raise source.error(path, f"{describe(path)} = {shown(value)}, but its param_groups have {shown(now[0])}")
        for group in config.param_groups:
            _set_in_group(group, key, value)


def _settings_of(group: Any) -> dict[str, Any]:
    """Return the settings of a parameter group by the keys of `_GROUP_KEYS`."""
    beta1, beta2 = group.optimizer_kwargs.get("betas") or (None, None)
    return {**group.optimizer_kwargs, "name": group.optimizer_name, "beta1": beta1, "beta2": beta2}


def _set_in_group(group: Any, key: str, value: Any) -> None:
    beta1, beta2 = group.optimizer_kwargs.get("betas", (0.9, 0.999))  # PyTorch's defaults for Adam
    if key == "name":
        group.optimizer_name = value
    elif key in ("beta1", "beta2"):
        group.optimizer_kwargs["betas"] = (value, beta2) if key == "beta1" else (beta1, value)
    else:
        group.optimizer_kwargs[key] = value


def _override(config: Any, arguments: Sequence[str]) -> Any:
    """Return the config with command line arguments applied as torchtitan does, without its help screens."""
    ConfigManager()  # registers torchtitan's rules for lists with custom_registry
    screen, flags = io.StringIO(), [*_flags(config), *(f"optimizer.{key}" for key in _GROUP_KEYS)]
    try:
        with contextlib.redirect_stderr(screen), contextlib.redirect_stdout(screen):
            return parse(type(config), arguments, default=config, registry=custom_registry, known=flags)[0]
    except ConfigError as error:
        raise ConfigError(f"command line: {error}") from None
    except SystemExit:
        raise ConfigError("command line: --help is `everstep COMMAND --help` or `torchtitan.train --help`") from None


def _flags(config: Any, above: str = "") -> Iterator[str]:
    """Yield the names of all flags of a config, such as `training.steps`."""
    for key in field_types(type(config)):
        value = getattr(config, key)
        if dataclasses.is_dataclass(value):
            yield from _flags(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"
