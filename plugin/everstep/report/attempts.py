"""Attempts at a step, as all groups together made them, and the work that failures made them do again."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Attempt:
    """One pass of quorum, compute, reduce and vote: the `attempt` events of the groups that took part."""

    step: int
    ended: float
    """Wall time in seconds of the first group's event."""
    members: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)
    """Slots computed in this attempt by all groups; a slot that two groups computed is here twice."""
    recomputed: set[tuple[int, int]] = field(default_factory=set)
    """(group, slot): the group had held this slot for the step and computed it again."""


def collect_attempts(events: Iterable[dict[str, Any]]) -> list[Attempt]:
    """The attempts of a run from its events in order of time.

    Groups' events belong to one attempt unless they name different quorums, or one of them began after another had
    ended: a lighthouse that was started again counts its quorums anew. A slot counts as
    computed again when the group says so, and also when the same process computed it twice for one step. A group of
    which a slot was refused has dropped what it held, like one that died: what it computes again was not thrown away.
    Reads attempt, heal, slot_refused and worker_ready of rank 0.
    """
    attempts: list[Attempt] = []
    newest: dict[tuple[int, Any], Attempt] = {}
    started: dict[int, float] = {}
    computed_before: dict[int, tuple[int, set[int]]] = {}
    dropped: dict[int, int] = {}
    """By group: the step in which it dropped what it held."""
    for event in events:
        kind, group, step = event["kind"], event.get("group"), event.get("step")
        if event.get("rank") or not isinstance(group, int):
            continue
        if kind == "worker_ready":
            started[group] = event["t"]
            computed_before.pop(group, None)
        elif kind == "heal":
            computed_before.pop(group, None)
        elif kind == "slot_refused" and isinstance(step, int):
            dropped[group] = step
        elif kind == "attempt" and isinstance(step, int):
            began = max(event["t"] - (event.get("took_s") or 0.0), started.get(group, 0.0))
            named = (step, event.get("quorum_id"))
            attempt = newest.get(named)
            if attempt is None or group in attempt.members or began > attempt.ended:
                attempt = newest[named] = Attempt(step, event["t"])
                attempts.append(attempt)
            slots = event.get("computed") or []
            last_step, earlier = computed_before.get(group, (step, set()))
            if last_step != step:
                earlier = set()
            attempt.members.add(group)
            attempt.computed.extend(slots)
            if dropped.get(group) != step:
                attempt.recomputed.update((group, slot) for slot in event.get("recomputed") or [])
                attempt.recomputed.update((group, slot) for slot in slots if slot in earlier)
            computed_before[group] = (step, earlier.union(slots))
    return attempts


def thrown_away(attempts: Iterable[Attempt]) -> int:
    """Attempts after which a survivor computed again a slot it had held."""
    return sum(1 for attempt in attempts if attempt.recomputed)


def slots_recomputed(attempts: Iterable[Attempt]) -> int:
    """How often a slot of a step was computed again, by whichever group and for whichever reason.

    The first attempt that computes anything hands out all the slots of its step, so each slot computed in a
    later attempt at that step is computed again: its first holder died with it, or a checkpoint took the run
    back. A slot that the dead group had been given but not begun counts too, as its events cannot tell.
    """
    first_done: set[int] = set()
    again = 0
    for attempt in attempts:
        again += len(attempt.computed)
        if attempt.computed and attempt.step not in first_done:
            first_done.add(attempt.step)
            again -= len(set(attempt.computed))
    return again
