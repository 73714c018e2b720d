"""What the fields of an event are, and which of them an event of a kind must have for its readers.

An event that lacks one, or has another type in its place, was damaged or written by somebody else: readers skip it as
they skip a torn line. Kinds and fields that stand nowhere here pass as they are.
"""

import math
from collections.abc import Callable
from typing import Any

LATEST = 1e11
"""Seconds since 1970 that a date can still be made of (the year 5138)."""
MOST_GROUPS = 1_000_000
_LARGEST = 1 << 63


def _int(value: Any, least: int = -_LARGEST, most: int = _LARGEST - 1) -> bool:
    return type(value) is int and least <= value <= most


def _count(value: Any) -> bool:
    return _int(value, 0)


def _group(value: Any) -> bool:
    return _int(value, 0, MOST_GROUPS)


def _pid(value: Any) -> bool:
    return _int(value, 1, 1 << 31)


def _finite(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or _int(value)


def _seconds(value: Any) -> bool:
    return _finite(value) and abs(value) <= LATEST


def _number(value: Any) -> bool:
    """A loss may be NaN."""
    return type(value) is float or _int(value)


def _text(value: Any) -> bool:
    return type(value) is str


def _flag(value: Any) -> bool:
    return type(value) is bool


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(check, value))


def _target(value: Any) -> bool:
    return value is None or _group(value) or _list_of(_group)(value)


def _exitcodes(value: Any) -> bool:
    return type(value) is dict and all(_int(code) for code in value.values())


def _numbers(value: Any) -> bool:
    return type(value) is dict and all(map(_number, value.values()))


def _by_slot(value: Any) -> bool:
    return type(value) is dict and all(slot.isdecimal() and _text(bits) for slot, bits in value.items())


def _name(value: Any) -> bool:
    return _text(value) or _int(value)


FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("group", "rank", "step"), _or_none(lambda value: _int(value, -1, 1 << 53))),
    **dict.fromkeys(("t", "mono"), _seconds),
    **dict.fromkeys(
        (
            "took_s",
            "wait_s",
            "waited_s",
            "idle_s",
            "compute_s",
            "reduce_s",
            "startup_s",
            "cpu_s",
            "copy_s",
            "blocked_s",
            "again_s",
        ),
        _or_none(lambda value: _seconds(value) and value >= 0),
    ),
    **dict.fromkeys(("loss", "grad_norm", "lr"), _or_none(_number)),
    "metrics": _numbers,
    "bits": _by_slot,
    "tokens": _or_none(lambda value: _finite(value) and value >= 0),
    **dict.fromkeys(("computed", "recomputed", "held_before"), _or_none(_list_of(_count))),
    **dict.fromkeys(("joiners", "differing", "members", "exposed"), _or_none(_list_of(_group))),
    "cut": _list_of(_list_of(_group)),
    "survives": _count,
    **dict.fromkeys(("reason", "status", "source", "kind", "role", "address", "node", "phase", "fault"), _text),
    **dict.fromkeys(
        ("action", "outcome", "version", "checksum", "at_phase", "folder", "file", "history", "parent"), _or_none(_text)
    ),
    **dict.fromkeys(("section", "anomaly", "coverage"), _text),
    **dict.fromkeys(("overhead", "rate"), _or_none(lambda value: _finite(value) and value >= 0)),
    "layer": _int,
    **dict.fromkeys(("committed", "agreed", "coverage_ok", "by_itself"), _flag),
    **dict.fromkeys(("summary", "text", "error"), _or_none(_text)),
    **dict.fromkeys(("slot", "at_step", "at_slot"), _or_none(_int)),
    "owners": _or_none(_list_of(_int)),
    "target_group": _target,
    "until": _seconds,
    "pid": _pid,
    "pids": _list_of(_pid),
    "exitcode": _or_none(_int),
    "exitcodes": _exitcodes,
    "incarnation": _name,
    "bytes": _count,
    "count": _count,
    **dict.fromkeys(("inner_steps", "payload_bytes", "kept_bytes", "gradient_bytes", "rounds_again"), _count),
    "inner_losses": _list_of(_number),
    "attempt": _count,
    "quorum_id": _or_none(_int),
    "source_group": _int,
    "ranks_per_group": _count,
    "steps": _or_none(_count),
    "slots": _or_none(_count),
    "seed": _or_none(_int),
}

_GROUP, _STEP = ("group",), ("group", "step")
NEEDED: dict[str, tuple[str, ...]] = {
    "run_started": ("groups",),
    "run_ended": ("status", "reason"),
    "scaled": ("count",),
    "lighthouse_started": ("address", "pid"),
    "agent_up": (*_GROUP, "pid"),
    "group_failing": (*_GROUP, "count", "reason"),
    "resource_shortage": ("reason", "again_s"),
    "agent_ended": (*_GROUP, "status", "reason"),
    "node_bad": (*_GROUP, "node", "reason"),
    "workers_started": (*_GROUP, "pids"),
    "workers_died": (*_GROUP, "reason", "exitcodes"),
    "workers_stalled": (*_GROUP, "phase", "idle_s"),
    "poison_slot": ("step", "slot", "groups"),
    "slot_skipped": (*_STEP, "slot"),
    "left_out": (*_STEP, "groups", "cut"),
    "straggler": (*_STEP, "pace"),
    "page": ("address",),
    "warning": ("text",),
    "worker_up": (*_GROUP, "incarnation"),
    "training_started": (*_STEP, "source"),
    "attempt": (*_STEP, "attempt", "committed", "recomputed"),
    "commit": (*_STEP, "groups", "loss", "tokens", "history", "parent"),
    "heal": (*_GROUP, "step", "bytes", "took_s"),
    "worker_moved": (*_STEP, "worker", "rounds_again"),
    "workers_unprotected": (*_STEP, "reason"),
    "checkpoint_saved": _STEP,
    "checkpoint_failed": (*_STEP, "reason"),
    "snapshot_skipped": (*_STEP, "reason"),
    "validation": (*_STEP, "loss"),
    "snapshot": _STEP,
    "snapshot_unprotected": (*_STEP, "reason"),
    "snapshot_protected": (*_STEP, "members", "survives", "exposed"),
    "snapshot_failed": (*_GROUP, "reason"),
    "finding": ("action",),
    "slot_refused": (*_STEP, "slot", "reason"),
    "unfit": (*_GROUP, "reason"),
    "slot_accepted": (*_STEP, "slot", "reason"),
    "slot_wrong": (*_STEP, "slot", "groups"),
    "not_finite": (*_STEP, "slot", "reason"),
    "attention_schedule": (*_GROUP, "coverage"),
    "audit": (*_STEP, "agreed", "differing"),
    "fault": ("fault",),
}
"""By kind, the fields that must be there and not None."""


def fits(event: dict[str, Any]) -> bool:
    """Whether an event is what its kind and its fields' names say."""
    kind = event["kind"]
    for name, value in event.items():
        check = FIELDS.get(name)
        if check is not None and not check(value):
            return False
    if any(event.get(name) is None for name in NEEDED.get(kind, ())):
        return False
    # The number of groups of a run, and the groups of a step.
    groups = event.get("groups")
    if kind == "run_started":
        return _int(groups, 1, MOST_GROUPS)
    return groups is None or _list_of(_group)(groups)
