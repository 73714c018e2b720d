"""The types of events' fields, and the fields that an event of each kind must have.

An event that lacks a field, or has one of another type, was damaged or comes from elsewhere. Readers skip it, as they
skip a torn line. Kinds and fields that are not listed here are not checked.
"""

from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from everstep.run.typed import Count, Number, Whole

MOST_GROUPS = 1_000_000
Group = Annotated[int, Field(ge=0, le=MOST_GROUPS)]
Pid = Annotated[int, Field(ge=1, le=1 << 31)]
Seconds = Annotated[float, Field(ge=-1e11, le=1e11)]
"""Seconds since 1970, within the range that can be shown as a date (up to the year 5138)."""
_NOTES = ("action", "outcome", "version", "checksum", "folder", "file", "history", "parent", "summary")
_DURATIONS = ("took_s", "wait_s", "waited_s", "idle_s", "compute_s", "reduce_s", "blocked_s", "again_s", "apart_s")
_COUNTS = (
    "survives", "bytes", "count", "inner_steps", "payload_bytes", "kept_bytes", "gradient_bytes", "rounds_again",
    "attempt", "ranks_per_group", "nominal_groups", "survived",
)  # fmt: skip

FIELDS: dict[str, Any] = {
    **dict.fromkeys(("group", "rank", "step"), Annotated[int, Field(ge=-1, le=1 << 53)] | None),
    **dict.fromkeys(("t", "mono", "until"), Seconds),
    **dict.fromkeys(_DURATIONS, Annotated[float, Field(ge=0, le=1e11)] | None),
    **dict.fromkeys(("loss", "grad_norm", "lr"), Number | None),
    "metrics": dict[str, Number],
    "bits": dict[Annotated[str, Field(pattern=r"^[0-9]{1,19}$")], str],
    "groups": list[Group] | Annotated[int, Field(ge=1, le=MOST_GROUPS)] | None,
    **dict.fromkeys(("tokens", "overhead", "rate", "pace"), Annotated[float, Field(ge=0)] | None),
    **dict.fromkeys(("computed", "recomputed"), list[Count] | None),
    **dict.fromkeys(("joiners", "differing", "members", "exposed", "source_groups"), list[Group] | None),
    "cut": list[list[Group]],
    **dict.fromkeys(("reason", "status", "source", "kind", "role", "address", "node", "phase", "fault"), str),
    **dict.fromkeys(("section", "anomaly", "coverage"), str),
    **dict.fromkeys((*_NOTES, "text", "error"), str | None),
    **dict.fromkeys(("committed", "coverage_ok", "by_itself"), bool),
    "layer": Whole,
    **dict.fromkeys(("slot", "at_step", "exitcode", "quorum_id", "seed"), Whole | None),
    "owners": list[Whole] | None,
    "target_group": Group | list[Group] | None,
    "traceback": list[str],
    "pid": Pid,
    "pids": list[Pid],
    "exitcodes": dict[str, Whole],
    "incarnation": str | Whole,
    **dict.fromkeys(_COUNTS, Count),
    **dict.fromkeys(("steps", "slots", "ranks", "global_batch_size"), Count | None),
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
    "worker_failed": ("pid", "error", "traceback"),
    "training_started": (*_STEP, "source"),
    "attempt": (*_STEP, "attempt", "committed", "recomputed"),
    "commit": (*_STEP, "groups", "loss", "tokens", "history", "parent"),
    "slot_bits": (*_STEP, "bits"),
    "heal": (*_GROUP, "step", "bytes", "took_s"),
    "heal_failed": (*_STEP, "reason"),
    "stranger_refused": ("count", "reason"),
    "worker_moved": (*_STEP, "worker", "rounds_again"),
    "workers_unprotected": (*_STEP, "reason", "risk"),
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
    "audit": (*_STEP, "differing"),
    "fault": ("fault",),
}
"""Kind -> fields that must be there and not None."""
OF_RANK_0 = frozenset(("quorum", "attempt", "commit"))
"""Kinds that occur in every step and that only rank 0 writes for its group."""
OF_EVERY_STEP = OF_RANK_0 | {"slot_bits", "snapshot", "snapshot_protected", "attention_schedule"}
"""Kinds of which a long run has millions. To show the current state of a run, only the last of each is needed."""

_KEYS = cast(Any, TypedDict)("Event", FIELDS, total=False)  # type checkers know no TypedDict of computed fields
_EVENT = TypeAdapter(with_config(ConfigDict(strict=True, extra="allow", allow_inf_nan=False))(_KEYS))


def event_in(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of JSON; None if it lacks a field that its kind needs, or has one of another type."""
    try:
        event: dict[str, Any] = _EVENT.validate_json(line)
    except ValidationError:
        return None
    if any(event.get(name) is None for name in ("t", "kind", *NEEDED.get(event.get("kind", ""), ()))):
        return None
    counts_groups = isinstance(event.get("groups"), int)  # else they are the groups of a step
    return event if counts_groups == (event["kind"] == "run_started") else None
