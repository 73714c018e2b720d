"""Combinations of settings that cannot work, refused before anything starts.

Each check is a function of the whole config that yields what is wrong. torchtitan's sections check their own
values; here stands what takes two sections, or is ours. What nothing reads is not checked.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

from .errors import ConfigError

_TIMEOUTS = (
    ("connect_timeout_s", "reduce_timeout_s", "peers wait in the gradient sum while one still connects"),
    ("reduce_timeout_s", "quorum_timeout_s", "peers wait for a quorum while one is held up in the sum"),
    ("heartbeat_timeout_s", "quorum_timeout_s", "a quorum waits for a dead group to be noticed"),
    ("join_timeout_s", "quorum_timeout_s", "a quorum waits until a group that hangs is left out"),
    ("quorum_timeout_s", "stall_timeout_s", "a group that waits for a quorum is not a stalled one"),
    ("stall_timeout_s", "startup_timeout_s", "starting takes imports and the model besides"),
)
"""(shorter, longer, why) of [fault_tolerance]'s timeouts."""

SMALLEST_EPS = 1e-10
"""Of Adam, with exact sums: beside it, what their quantum of 2^-40 cannot hold moves no parameter by 1 % of a step."""
_LONGEST_S = 3e8
"""Ten years; the libraries that wait count milliseconds in 64 bits or fewer."""
_SMALLEST, _BELOW_1 = 1e-9, 1 - 1e-9
_BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "fault_tolerance": {
        "groups": (1, 1_000_000),
        "min_groups": (1, math.inf),
        "group_id": (0, 999_999),
        "max_restarts": (0, math.inf),
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
    "training": {"local_batch_size": (1, math.inf), "seq_len": (1, math.inf), "steps": (1, math.inf)},
    "parallelism": {
        f"{name}_degree": (1, math.inf)
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel_replicate")
    },
}
"""The least and the largest value of keys that are read; ids have six digits."""


@dataclass(frozen=True)
class Problem:
    """A combination that cannot work."""

    key: tuple[str, ...]
    """The key to change first."""

    message: str
    """What is wrong, with values and what to do."""


def sharing(parallelism: Any) -> int:
    """How many ranks of a group compute one microbatch together: tensor x context x pipeline parallel degrees."""
    return (
        parallelism.tensor_parallel_degree * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree
    )


def fewest_ranks(parallelism: Any) -> int:
    """The fewest ranks of a group that the parallel degrees can be laid out on."""
    return sharing(parallelism) * max(1, parallelism.data_parallel_shard_degree)


def problems(config: Any, ranks: int = 0) -> Iterator[Problem]:
    """Everything that is wrong with a trainer config, the most basic first.

    Args:
        ranks: of a group; 0: not known, the fewest that the config can be computed on.
    """
    if out_of_bounds := list(_bounds(config)):  # what follows computes with these values
        yield from out_of_bounds
        return
    for check in _CHECKS:
        yield from check(config)
    laid_out = list(_ranks(config, ranks))
    yield from laid_out or _batch(config, ranks)


_deferred = ContextVar("deferred", default=False)


@contextmanager
def deferred_checks() -> Iterator[None]:
    """Let configs be made that cannot work, by a caller that checks them itself when they are complete."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def check_config(config: Any) -> None:
    """Refuse a config that cannot work.

    Raises:
        ConfigError: names the keys and what to do.
    """
    if _deferred.get():
        return
    for problem in problems(config):
        raise ConfigError(problem.message)


def _bounds(config: Any) -> Iterator[Problem]:
    unread = {"fault_tolerance": not config.fault_tolerance.enable, "semi_sync": not config.semi_sync.enabled}
    for section, keys in _BOUNDS.items():
        if unread.get(section):
            continue
        for key, (least, most) in keys.items():
            value = getattr(getattr(config, section), key)
            if not value >= least:
                bound = f"at least {least:g}" if least in (0, 1) else "more than 0"
            elif not value <= most:
                bound = "less than 1" if most == _BELOW_1 else f"at most {most:.0f}"
            else:
                continue
            yield Problem((section, key), f"[{section}] {key} must be {bound}, got {value}")


def _groups(config: Any) -> Iterator[Problem]:
    ft = config.fault_tolerance
    if not ft.enable:
        return
    if ft.groups < ft.min_groups:
        yield Problem(
            ("fault_tolerance", "min_groups"),
            f"[fault_tolerance] min_groups = {ft.min_groups} can never be met by groups = {ft.groups}",
        )
    place = re.fullmatch(r"https?://[^/\s]+:([0-9]{1,5})/?", ft.lighthouse)
    if ft.lighthouse and (place is None or int(place[1]) > 65535):
        yield Problem(
            ("fault_tolerance", "lighthouse"),
            f'[fault_tolerance] lighthouse must be http://host:port, got "{ft.lighthouse}"',
        )

    if ft.notify and not re.fullmatch(r"https?://[!-~]+", ft.notify):
        key = ("fault_tolerance", "notify")
        yield Problem(key, "[fault_tolerance] notify must be the https:// address of a webhook")


def _timeouts(config: Any) -> Iterator[Problem]:
    ft = config.fault_tolerance
    if not ft.enable:
        return
    for shorter, longer, why in _TIMEOUTS:
        if getattr(ft, shorter) >= getattr(ft, longer):
            yield Problem(
                ("fault_tolerance", shorter),
                f"[fault_tolerance] {shorter} = {getattr(ft, shorter)} must be less than "
                f"{longer} = {getattr(ft, longer)}: {why}",
            )


def _fault_tolerant_training(config: Any) -> Iterator[Problem]:
    if not config.fault_tolerance.enable:
        return
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas != 1:
        yield Problem(
            ("parallelism", "data_parallel_replicate_degree"),
            f"[parallelism] data_parallel_replicate_degree = {replicas} means replica groups with fault tolerance: "
            f"set [fault_tolerance] groups = {replicas} (or --groups {replicas})",
        )
    if getattr(config.checkpoint, "create_seed_checkpoint", False):
        yield Problem(
            ("checkpoint", "create_seed_checkpoint"),
            "[checkpoint] create_seed_checkpoint = true must be false with fault tolerance: one process writes it, "
            "without training; write it with [fault_tolerance] enable = false",
        )
    if config.training.enable_cpu_offload:
        yield Problem(
            ("training", "enable_cpu_offload"),
            "[training] enable_cpu_offload = true must be false with fault tolerance: sums over groups of gradients "
            "that are kept in host memory have never been tried",
        )
    if config.comm.mode != "default":
        yield Problem(
            ("comm", "mode"),
            f'[comm] mode = "{config.comm.mode}" must be "default" with fault tolerance: only real '
            "communication can fail and recover",
        )


def _exact(config: Any) -> Iterator[Problem]:
    ft, semi = config.fault_tolerance, config.semi_sync
    key = ("fault_tolerance", "audit_slots")
    if ft.audit_slots and not (ft.enable and ft.exact):
        yield Problem(key, f"[fault_tolerance] audit_slots = {ft.audit_slots} compares bits: it needs exact = true")
    elif ft.audit_slots and semi.enabled:
        yield Problem(
            key, f'[fault_tolerance] audit_slots must be 0 with [semi_sync] method = "{semi.method}": not built yet'
        )
    if not (ft.enable and ft.exact):
        return
    if ft.on_loss == "shrink":
        yield Problem(
            ("fault_tolerance", "on_loss"),
            '[fault_tolerance] on_loss = "shrink" leaves out what a lost group had, so the result depends on what '
            "failed: with [fault_tolerance] exact = true nothing may be left out",
        )
    if ft.on_poison == "skip":
        yield Problem(
            ("fault_tolerance", "on_poison"),
            '[fault_tolerance] on_poison = "skip" leaves out slots that end groups, so the result depends on what '
            "failed: with exact = true nothing may be left out",
        )
    for group in config.optimizer.param_groups:
        eps = group.optimizer_kwargs.get("eps", SMALLEST_EPS)
        if eps < SMALLEST_EPS:
            yield Problem(
                ("optimizer", "eps"),
                f"[optimizer] eps = {eps} makes whole steps of gradients below 1e-12, which exact sums round to 0: "
                f"with [fault_tolerance] exact = true it must be at least {SMALLEST_EPS:g}",
            )


def _precision(config: Any) -> Iterator[Problem]:
    spec = config.model_spec
    if spec is not None and spec.name == "gpt_oss" and config.training.mixed_precision_param == "float32":
        yield Problem(
            ("training", "mixed_precision_param"),
            '[training] mixed_precision_param = "float32" must be "bfloat16" with gpt_oss, whose experts compute in '
            "bfloat16 whatever they are given",
        )


def _ranks(config: Any, ranks: int) -> Iterator[Problem]:
    """Whether a group's ranks can be laid out in the parallel degrees."""
    parallelism = config.parallelism
    names = ("tensor_parallel_degree", "context_parallel_degree", "pipeline_parallel_degree")
    shard = parallelism.data_parallel_shard_degree
    if shard != -1 and shard < 1:
        yield Problem(
            ("parallelism", "data_parallel_shard_degree"),
            f"[parallelism] data_parallel_shard_degree must be at least 1, or -1 for all that is left, got {shard}",
        )
        return
    together = sharing(parallelism) * parallelism.data_parallel_replicate_degree
    if ranks and (ranks % together or shard not in (-1, ranks // together)):
        degrees = {name: getattr(parallelism, name) for name in (*names, "data_parallel_shard_degree")}
        written = [name for name, degree in degrees.items() if degree > 1] or ["data_parallel_shard_degree"]
        needed = f"{together * shard} ranks" if shard > 0 else f"a multiple of {together} ranks"
        yield Problem(
            ("parallelism", written[0]),
            f"[parallelism] {' x '.join(f'{name} = {degrees[name]}' for name in written)} takes {needed} in a group, "
            f"and a group has {ranks}: change the degrees, or give another --ranks-per-group",
        )


def _batch(config: Any, ranks: int) -> Iterator[Problem]:
    training, parallelism, ft = config.training, config.parallelism, config.fault_tolerance
    batch = training.global_batch_size
    if batch < 0:
        if ft.enable and ft.groups > 1:
            yield Problem(
                ("training", "global_batch_size"),
                f"[training] global_batch_size must be set to share it out among {ft.groups} groups: at "
                f"least local_batch_size x DP ranks of a group x {ft.groups}",
            )
        return
    readers = (ranks or fewest_ranks(parallelism)) // sharing(parallelism)
    rows = training.local_batch_size * readers
    if batch == 0 or batch % rows:
        yield Problem(
            ("training", "global_batch_size"),
            f"[training] global_batch_size = {batch} must be a multiple of local_batch_size x DP ranks of a group = "
            f"{training.local_batch_size} x {readers}",
        )
    elif ft.enable and batch // rows < ft.groups:
        yield Problem(
            ("training", "global_batch_size"),
            f"[training] global_batch_size = {batch} has {batch // rows} slots of {rows} rows (local_batch_size = "
            f"{training.local_batch_size} x {readers} DP ranks) for {ft.groups} groups: every group needs one at least",
        )


def _optimizer(config: Any) -> Iterator[Problem]:
    """A learning rate below 0 climbs, one that is no number ruins the first step."""
    for group in config.optimizer.param_groups:
        lr = group.optimizer_kwargs.get("lr")
        if isinstance(lr, int | float) and not 0 <= lr < float("inf"):
            yield Problem(("optimizer", "lr"), f"[optimizer] lr must be 0 or more, got {lr}")
            return


def _injection(config: Any) -> Iterator[Problem]:
    kind = config.attention_check.inject.kind
    if kind and not config.fault_tolerance.allow_faults:
        yield Problem(
            ("attention_check", "inject", "kind"),
            f'[attention_check.inject] kind = "{kind}" needs [fault_tolerance] allow_faults = true: it breaks the run '
            "on purpose",
        )


def _data(config: Any) -> Iterator[Problem]:
    data = config.data
    if data.source == "tokens":
        if not data.path:
            yield Problem(("data", "source"), '[data] source = "tokens" needs path, the token file of `everstep pack`')
        elif not FilePath(data.path).is_file():
            yield Problem(("data", "path"), f'[data] path = "{data.path}": there is no such file')
    elif data.path:
        yield Problem(
            ("data", "path"),
            f'[data] path = "{data.path}" is read with source = "tokens" only, but source is "{data.source}"',
        )


def _semi_sync(config: Any) -> Iterator[Problem]:
    semi, training, ft = config.semi_sync, config.training, config.fault_tolerance
    if not semi.enabled:
        return

    def wrong(section: str, key: str, message: str) -> Problem:
        return Problem((section, key), f"[{section}] {key} {message}")

    if not ft.enable:
        yield wrong("semi_sync", "method", f'= "{semi.method}" needs [fault_tolerance] enable = true')
        return
    workers, batch = semi.workers or ft.groups, training.global_batch_size
    if workers < ft.groups:
        yield wrong("semi_sync", "workers", f"= {workers} must be at least groups = {ft.groups}: each carries one")
    elif batch > 0 and batch % (workers * training.local_batch_size):
        yield wrong(
            "semi_sync",
            "workers",
            f"= {workers} must divide the batch: global_batch_size = {batch} is no multiple of {workers} workers x "
            f"local_batch_size = {training.local_batch_size}",
        )
    yield from _outer(semi)
    yield from _fragments(semi, len(getattr(getattr(config.model_spec, "model", None), "layers", ())))
    for section, key, value in (
        ("training", "steps", training.steps),
        ("checkpoint", "interval", config.checkpoint.interval if config.checkpoint.enable else 0),
        ("validator", "freq", config.validator.freq if config.validator.enable else 0),
    ):
        if value % semi.sync_steps:
            yield wrong(
                section,
                key,
                f"= {value} must be a multiple of [semi_sync] sync_steps = {semi.sync_steps}: between two rounds "
                "there are no global parameters",
            )
    with_semi = f'with [semi_sync] method = "{semi.method}"'
    for is_wrong, section, key, message in (
        (ft.on_loss == "shrink", "fault_tolerance", "on_loss", 'must be "redistribute"'),
        (ft.on_poison == "skip", "fault_tolerance", "on_poison", 'must be "stop"'),
        (config.snapshot.enable, "snapshot", "enable", "must be false"),
        (not training.disable_cuda_graphs, "training", "disable_cuda_graphs", "must be true"),
        (config.parallelism.pipeline_parallel_degree > 1, "parallelism", "pipeline_parallel_degree", "must be 1"),
        (
            config.checkpoint.enable and config.checkpoint.enable_first_step_checkpoint,
            "checkpoint",
            "enable_first_step_checkpoint",
            "must be false",
        ),
    ):
        if is_wrong:
            yield wrong(section, key, f"{message} {with_semi}: the other is not built yet")


def _outer(semi: Any) -> Iterator[Problem]:
    """The settings of the outer step, which only diloco reads."""
    defaults = type(semi)()
    for key in ("outer_lr", "outer_momentum", "fragments", "overlap_steps", "mixing"):
        if semi.method == "local_sgd" and getattr(semi, key) != getattr(defaults, key):
            yield Problem(
                ("semi_sync", key),
                f'[semi_sync] {key} is read with method = "diloco" only, but method is "local_sgd"',
            )


def _fragments(semi: Any, layers: int) -> Iterator[Problem]:
    """What is synchronised when."""

    def wrong(key: str, message: str) -> Problem:
        return Problem(("semi_sync", key), f"[semi_sync] {key} = {getattr(semi, key)} must be {message}")

    if semi.fragments > 1 and semi.fragments > layers:
        yield wrong("fragments", f"at most the model's {layers} layers, each of which is in one fragment")
    elif semi.sync_steps % semi.fragments:
        yield wrong(
            "sync_steps",
            f"a multiple of fragments = {semi.fragments}: they are synchronised in turn, equally far apart",
        )
    elif not 0 <= semi.overlap_steps < semi.round_steps:
        yield wrong(
            "overlap_steps",
            f"at least 0 and less than sync_steps / fragments = {semi.round_steps}: a sum ends before the next begins",
        )


_CHECKS: tuple[Callable[[Any], Iterator[Problem]], ...] = (
    _groups,
    _timeouts,
    _fault_tolerant_training,
    _exact,
    _precision,
    _optimizer,
    _data,
    _injection,
    _semi_sync,
)
