"""Refuses combinations of settings that cannot work, before anything starts.

Each check is a function of the whole config that yields rows: whether something is wrong, with which key, and what.
torchtitan's sections check their own values. The checks here concern several sections, or Everstep's own. Settings that
nothing reads, because their section is off, are not checked.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .assign import shown
from .source import describe

_TIMEOUTS = (
    ("connect_timeout_s", "reduce_timeout_s", "groups wait in the gradient sum while another still connects"),
    ("reduce_timeout_s", "quorum_timeout_s", "groups wait for a quorum while another still waits in the sum"),
    ("heartbeat_timeout_s", "quorum_timeout_s", "a quorum waits until a silent group is left out"),
    ("join_timeout_s", "quorum_timeout_s", "a quorum waits until a group that hangs is left out"),
    ("quorum_timeout_s", "stall_timeout_s", "a group that waits for a quorum must not count as stalled"),
    ("stall_timeout_s", "startup_timeout_s", "a start also includes imports and building the model"),
)
"""(shorter, longer, why): pairs of timeouts of [fault_tolerance] of which the first must be less than the second."""

SMALLEST_EPS = 1e-10
"""Smallest eps of Adam with exact sums. With it, the part of a gradient that is lost below the sums' quantum of 2^-40
changes no parameter by 1 % of a step."""
_LONGEST_S = 3e8
"""Longest timeout: ten years. The libraries that wait count milliseconds in 64 bits or fewer."""
_SMALLEST, _BELOW_1 = 1e-9, 1 - 1e-9
_BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "fault_tolerance": {
        "groups": (1, 1_000_000),
        "min_groups": (1, math.inf),
        "spares": (0, math.inf),
        "group_id": (0, 999_999),
        "node_failures": (0, math.inf),
        "metrics_port": (0, 65535),
        "audit_interval": (0, math.inf),
        "audit_slots": (0, 1),
        **{key: (_SMALLEST, _LONGEST_S) for row in _TIMEOUTS for key in row[:2]},
    },
    "semi_sync": {
        "sync_steps": (1, math.inf),
        "fragments": (1, math.inf),
        "outer_lr": (_SMALLEST, 1000),
        "outer_momentum": (0, _BELOW_1),
        "mixing": (0, _BELOW_1),
    },
    "checkpoint": {"load_step": (-1, math.inf)},
    "metrics": {"log_freq": (1, math.inf)},
    "validator": {"freq": (1, math.inf)},
    "training": {
        "local_batch_size": (1, math.inf),
        "seq_len": (1, math.inf),
        "steps": (1, math.inf),
        "gc_freq": (1, math.inf),
        "max_norm": (_SMALLEST, math.inf),
    },
    "lr_scheduler": {"warmup_steps": (0, math.inf), "min_lr_factor": (0, 1)},
    "parallelism": {
        f"{name}_degree": (1, math.inf)
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel_replicate")
    },
}
"""Section -> key -> (smallest, largest) value. A group_id has at most six digits."""


@dataclass(frozen=True)
class Problem:
    """A combination that cannot work."""

    key: tuple[str, ...]
    """The key to change first."""

    what: str
    """The rest of the message after the key: what is wrong, with values and what to do."""

    @property
    def message(self) -> str:
        return f"{describe(self.key)} {self.what}"


Row = tuple[bool, str, str]
"""(whether something is wrong, the key as `section.key`, what is wrong with it)."""


def sharing(parallelism: Any) -> int:
    """Return how many ranks of a group compute one microbatch together: tensor x context x pipeline degrees."""
    return (
        parallelism.tensor_parallel_degree * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree
    )


def fewest_ranks(parallelism: Any) -> int:
    """Return the smallest number of ranks of a group that the parallel degrees fit."""
    return sharing(parallelism) * max(1, parallelism.data_parallel_shard_degree)


def problems(config: Any, ranks: int = 0) -> Iterator[Problem]:
    """Yield everything that is wrong with a trainer config, the most basic problem first.

    Args:
        ranks: ranks of a group; 0: unknown, so assume the fewest that the parallel degrees fit.
    """
    if out_of_bounds := list(_bounds(config)):  # the checks below calculate with these values
        yield from out_of_bounds
        return
    for check in _CHECKS:
        yield from _wrong(check(config))
    laid_out = list(_wrong(_ranks(config, ranks)))
    yield from laid_out or _wrong(_batch(config, ranks))


def _wrong(rows: Iterable[Row]) -> Iterator[Problem]:
    for is_wrong, key, what in rows:
        if is_wrong:
            yield Problem(tuple(key.split(".")), what)


def _bounds(config: Any) -> Iterator[Problem]:
    unread = {
        "fault_tolerance": not config.fault_tolerance.enable,
        "semi_sync": not config.semi_sync.enabled,
        "validator": not config.validator.enable,
        "checkpoint": not config.checkpoint.enable,
    }
    for section, keys in _BOUNDS.items():
        if unread.get(section):
            continue
        for key, (least, most) in keys.items():
            value = getattr(getattr(config, section), key)
            if not value >= least:
                bound = f"at least {least:g}" if least in (-1, 0, 1) else "more than 0"
            elif not value <= most:
                bound = "less than 1" if most == _BELOW_1 else f"at most {most:.0f}"
            else:
                continue
            yield Problem((section, key), f"must be {bound}, got {value}")


def _fault_tolerance(config: Any) -> Iterator[Row]:
    ft, replicas = config.fault_tolerance, config.parallelism.data_parallel_replicate_degree
    if not ft.enable:
        return
    few = f"= {ft.min_groups} must be at most groups = {ft.groups}"
    yield ft.groups < ft.min_groups, "fault_tolerance.min_groups", few
    none = f"= {ft.spares} must be less than groups = {ft.groups}: spares compute nothing"
    yield ft.spares >= ft.groups, "fault_tolerance.spares", none
    place = re.fullmatch(r"https?://(?:\[[0-9a-fA-F:.%]+\]|[^]/\s?#:[]+):([0-9]{1,5})/?", ft.lighthouse)
    nowhere = bool(ft.lighthouse) and (place is None or not 0 < int(place[1]) <= 65535)
    yield nowhere, "fault_tolerance.lighthouse", f'must be http://host:port, got "{ft.lighthouse}"'
    no_hook = bool(ft.notify) and not re.fullmatch(r"https?://[!-~]+", ft.notify)
    yield no_hook, "fault_tolerance.notify", "must be the https:// address of a webhook"
    for shorter, longer, why in _TIMEOUTS:
        said = f"= {getattr(ft, shorter)} must be less than {longer} = {getattr(ft, longer)}: {why}"
        yield getattr(ft, shorter) >= getattr(ft, longer), f"fault_tolerance.{shorter}", said
    yield (
        replicas != 1,
        "parallelism.data_parallel_replicate_degree",
        f"= {replicas} must be 1 with fault tolerance, whose replicas are groups: set [fault_tolerance] groups = "
        f"{replicas}, or --groups {replicas}",
    )
    yield (
        getattr(config.checkpoint, "create_seed_checkpoint", False),
        "checkpoint.create_seed_checkpoint",
        "= true must be false with fault tolerance: a seed checkpoint is written by one process that does not train; "
        "write it with [fault_tolerance] enable = false",
    )
    yield (
        config.training.enable_cpu_offload,
        "training.enable_cpu_offload",
        "= true must be false with fault tolerance: sums over groups have not been tested with gradients in host "
        "memory",
    )
    yield (
        config.comm.mode != "default",
        "comm.mode",
        f'= "{config.comm.mode}" must be "default" with fault tolerance: only real communication can fail and recover',
    )


def _without_groups(config: Any) -> Iterator[Row]:
    """Refuse sections that torchtitan's own trainer would ignore without a word."""
    for key, on in (
        ("semi_sync.method", config.semi_sync.enabled),
        ("attention_check.enable", config.attention_check.enable),
        ("snapshot.enable", config.snapshot.enable),
        ("fault_tolerance.exact", config.fault_tolerance.exact),
    ):
        section, name = key.split(".")
        value = shown(getattr(getattr(config, section), name))
        yield on and not config.fault_tolerance.enable, key, f"= {value} needs [fault_tolerance] enable = true"


def _exact(config: Any) -> Iterator[Row]:
    ft, semi, key = config.fault_tolerance, config.semi_sync, "fault_tolerance.audit_slots"
    if not ft.enable:
        return
    exact, audits = ft.exact, ft.audit_slots > 0
    must_be = "so the result depends on failures: with [fault_tolerance] exact = true it must be"
    yield audits and not exact, key, f"= {ft.audit_slots} needs exact = true, because an audit compares bits"
    yield audits and semi.enabled, key, f'must be 0 with [semi_sync] method = "{semi.method}": not implemented yet'
    yield (
        exact and ft.on_loss == "shrink",
        "fault_tolerance.on_loss",
        f'= "shrink" leaves out the slots of a lost group, {must_be} "redistribute"',
    )
    yield (
        exact and ft.on_poison == "skip",
        "fault_tolerance.on_poison",
        f'= "skip" leaves out slots that end groups, {must_be} "stop"',
    )
    for group in config.optimizer.param_groups:
        eps = group.optimizer_kwargs.get("eps", SMALLEST_EPS)
        yield (
            exact and eps < SMALLEST_EPS,
            "optimizer.eps",
            f"= {eps} lets gradients below 1e-12 make whole steps, but exact sums round them to 0: with "
            f"[fault_tolerance] exact = true it must be at least {SMALLEST_EPS:g}",
        )


def _training(config: Any) -> Iterator[Row]:
    """Refuse settings that torchtitan accepts but cannot train with."""
    spec = config.model_spec
    yield (
        spec is not None and spec.name == "gpt_oss" and config.training.mixed_precision_param == "float32",
        "training.mixed_precision_param",
        '= "float32" must be "bfloat16" with gpt_oss, whose experts always compute in bfloat16',
    )
    parallelism, length = config.parallelism, config.training.seq_len
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    parts = (tensor if parallelism.enable_sequence_parallel else 1) * (2 * context if context > 1 else 1)
    yield (
        length % parts > 0,
        "training.seq_len",
        f"= {length} must be a multiple of {parts}, into which tensor_parallel_degree = {tensor} and "
        f"context_parallel_degree = {context} divide a row",
    )
    layers, key = parallelism.pipeline_parallel_layers_per_stage, "parallelism.pipeline_parallel_layers_per_stage"
    pipelined = parallelism.pipeline_parallel_degree > 1
    yield pipelined and layers is not None and layers < 1, key, f"must be at least 1, got {layers}"
    decay, key = config.lr_scheduler.decay_ratio, "lr_scheduler.decay_ratio"
    yield decay is not None and not 0 <= decay <= 1, key, f"must be between 0 and 1, got {decay}"
    steps, total = config.training.steps, config.lr_scheduler.total_steps
    goes_wrong = "after it the learning rate falls below 0, or rises again (cosine)"
    short = f"= {total} must be at least [training] steps = {steps}: {goes_wrong}"
    yield total is not None and total < steps, "lr_scheduler.total_steps", short
    profiler, key = config.profiler, "profiler.profile_freq"
    least = profiler.profiler_warmup + profiler.profiler_active
    what = f"= {profiler.profile_freq} must be at least profiler_warmup + profiler_active = {least}"
    yield profiler.enable_profiling and profiler.profile_freq < max(1, least), key, what
    for group in config.optimizer.param_groups:
        for key in ("lr", "eps", "weight_decay"):
            value = group.optimizer_kwargs.get(key, 0.0)
            fits = type(value) in (int, float) and 0 <= value < math.inf
            yield not fits, f"optimizer.{key}", f"must be 0 or more, got {value!r}"
        betas = group.optimizer_kwargs.get("betas", (0.9, 0.95))
        fits = isinstance(betas, tuple) and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        yield not fits, "optimizer.betas", f"must be two numbers in [0, 1), got {betas!r}"
    states = ("optimizer", "lr_scheduler", "dataloader", "train_state")
    none = ", ".join(sorted({*config.checkpoint.exclude_from_loading}.difference(states)))
    what = f"has {none}: it may name {', '.join(states)} only"
    yield config.checkpoint.enable and bool(none), "checkpoint.exclude_from_loading", what


def _data(config: Any) -> Iterator[Row]:
    data = config.data
    tokens, path = data.source == "tokens", f'= "{data.path}"'
    yield tokens and not data.path, "data.source", '= "tokens" needs path, the token file of `everstep pack`'
    missing = tokens and bool(data.path) and not os.path.isfile(data.path)  # Path.is_file raises for some names
    what = "this is a folder" if missing and os.path.isdir(data.path) else "there is no such file"
    yield missing, "data.path", f"{path}: {what}"
    unread = f'{path} is read with source = "tokens" only: remove it, or set source = "tokens"'
    yield bool(data.path) and not tokens, "data.path", unread


def _ranks(config: Any, ranks: int) -> Iterator[Row]:
    """Refuse parallel degrees that do not fit the ranks of a group."""
    parallelism = config.parallelism
    shard = parallelism.data_parallel_shard_degree
    key = "parallelism.data_parallel_shard_degree"
    no_shard = shard != -1 and shard < 1
    yield no_shard, key, f"must be at least 1, or -1 for all remaining ranks, got {shard}"
    together = sharing(parallelism) * parallelism.data_parallel_replicate_degree
    names = (*_BOUNDS["parallelism"], "data_parallel_shard_degree")
    degrees = {name: getattr(parallelism, name) for name in names}
    written = [name for name, degree in degrees.items() if degree > 1] or ["data_parallel_shard_degree"]
    needed = f"{together * shard} ranks" if shard > 0 else f"a multiple of {together} ranks"
    product = " x ".join(f"{name} = {degrees[name]}" for name in written).removeprefix(f"{written[0]} ")
    yield (
        ranks > 0 and not no_shard and (ranks % together > 0 or shard not in (-1, ranks // together)),
        f"parallelism.{written[0]}",
        f"{product} needs {needed} in a group, but a group has {ranks}: change the degrees, or --ranks-per-group",
    )
    experts, key = parallelism.expert_parallel_degree, "parallelism.expert_parallel_degree"
    shards = shard if shard > 0 else ranks // together  # 0: not known
    sharers = shards * sharing(parallelism) // parallelism.pipeline_parallel_degree
    what = f"= {experts} must divide the {sharers} ranks of a group that share a pipeline stage's experts"
    yield experts < 1 or sharers % experts > 0, key, what


def _batch(config: Any, ranks: int) -> Iterator[Row]:
    training, parallelism, ft = config.training, config.parallelism, config.fault_tolerance
    batch, key, groups = training.global_batch_size, "training.global_batch_size", ft.groups - ft.spares
    readers = (ranks or fewest_ranks(parallelism)) // sharing(parallelism)
    rows = training.local_batch_size * readers
    yield (
        batch < 0 and ft.enable and ft.groups > 1,
        key,
        f"must be set if there are {groups} groups: at least local_batch_size x DP ranks of a group x {groups}",
    )
    uneven = batch == 0 or (batch > 0 and batch % rows > 0)
    yield (
        uneven,
        key,
        f"= {batch} must be a multiple of local_batch_size x DP ranks of a group = {training.local_batch_size} x "
        f"{readers}",
    )
    yield (
        batch > 0 and not uneven and ft.enable and batch // rows < groups,
        key,
        f"= {batch} has {batch // rows} slots of {rows} rows (local_batch_size = {training.local_batch_size} x "
        f"{readers} DP ranks) for {groups} groups: every group needs at least one",
    )


def _semi_sync(config: Any) -> Iterator[Row]:
    semi, training, ft = config.semi_sync, config.training, config.fault_tolerance
    diloco = ("outer_lr", "outer_momentum", "fragments", "overlap_steps", "mixing")
    for key in {"none": ("workers", "sync_steps", *diloco), "local_sgd": diloco}.get(semi.method, ()):
        what = f'is not read with method = "{semi.method}": remove it, or change the method'
        yield getattr(semi, key) != getattr(type(semi)(), key), f"semi_sync.{key}", what
    if not semi.enabled or not ft.enable:
        return
    workers, batch = semi.workers or ft.groups, training.global_batch_size
    few = workers < ft.groups
    yield few, "semi_sync.workers", f"= {workers} must be at least groups = {ft.groups}: every group carries one"
    yield (
        not few and batch > 0 and batch % (workers * training.local_batch_size) > 0,
        "semi_sync.workers",
        f"= {workers} must divide the batch: global_batch_size = {batch} is not a multiple of {workers} workers x "
        f"local_batch_size = {training.local_batch_size}",
    )
    yield from _outer(semi, len(getattr(getattr(config.model_spec, "model", None), "layers", ())))
    if not semi.round_steps:
        return
    for key, value in (
        ("training.steps", training.steps),
        ("checkpoint.interval", config.checkpoint.interval if config.checkpoint.enable else 0),
        ("validator.freq", config.validator.freq if config.validator.enable else 0),
    ):
        yield (
            value % semi.round_steps > 0,
            key,
            f"= {value} must be a multiple of [semi_sync] sync_steps / fragments = {semi.round_steps}: there are "
            "global parameters only after a round",
        )
    yield (
        training.steps < semi.sync_steps,
        "training.steps",
        f"= {training.steps} must be at least [semi_sync] sync_steps = {semi.sync_steps}, after which every fragment "
        "has been synchronised once",
    )
    yield (
        training.dtype != "float32",
        "training.dtype",
        f'= "{training.dtype}" must be "float32" with [semi_sync]: it is the dtype of the outer step and its sums. '
        "Compute in another with mixed_precision_param",
    )
    first_step = config.checkpoint.enable and config.checkpoint.enable_first_step_checkpoint
    own = sorted({"optimizer", "lr_scheduler"}.intersection(config.checkpoint.exclude_from_loading))
    remote = config.checkpoint.enable and "://" in f"{config.checkpoint.folder} {config.checkpoint.initial_load_path}"
    for is_wrong, key, what in (
        (ft.on_loss == "shrink", "fault_tolerance.on_loss", 'must be "redistribute"'),
        (ft.spares > 0, "fault_tolerance.spares", "must be 0"),
        (ft.on_poison == "skip", "fault_tolerance.on_poison", 'must be "stop"'),
        (config.snapshot.enable, "snapshot.enable", "must be false"),
        (not training.disable_cuda_graphs, "training.disable_cuda_graphs", "must be true"),
        (config.parallelism.pipeline_parallel_degree > 1, "parallelism.pipeline_parallel_degree", "must be 1"),
        (bool(own), "checkpoint.exclude_from_loading", f"must not name {', '.join(own)}, which each worker has"),
        (first_step, "checkpoint.enable_first_step_checkpoint", "must be false"),
        (remote, "checkpoint.folder", "and initial_load_path must be on a file system"),
    ):
        yield is_wrong, key, f'{what} with [semi_sync] method = "{semi.method}": other values are not implemented yet'


def _outer(semi: Any, layers: int) -> Iterator[Row]:
    """Refuse keys of the outer step and the schedule of fragments that cannot work."""
    many, uneven = 1 < semi.fragments > layers, semi.sync_steps % semi.fragments > 0
    yield (
        many,
        "semi_sync.fragments",
        f"= {semi.fragments} must be at most the model's {layers} layers, each of which is in one fragment",
    )
    yield (
        uneven and not many,
        "semi_sync.sync_steps",
        f"= {semi.sync_steps} must be a multiple of fragments = {semi.fragments}: fragments are synchronised in turn, "
        "at equal intervals",
    )
    yield (
        not many and not uneven and not 0 <= semi.overlap_steps < semi.round_steps,
        "semi_sync.overlap_steps",
        f"= {semi.overlap_steps} must be at least 0 and less than sync_steps / fragments = {semi.round_steps}: a sum "
        "must end before the next begins",
    )


_CHECKS: tuple[Callable[[Any], Iterator[Row]], ...] = (
    _fault_tolerance,
    _without_groups,
    _training,
    _exact,
    _data,
    _semi_sync,
)
