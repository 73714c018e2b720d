"""Attempts at a step, as all groups together made them, and the work that failures made them do again."""

from dataclasses import dataclass, field
from typing import Any

from everstep.report.groups import Group

KEPT = 256
"""Attempts, and steps, that are remembered: what is tried again is tried soon."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One pass of quorum, compute, reduce and vote: the `attempt` events of the groups that took part.

    Groups' events belong to one attempt unless they name different quorums, or one of them began after another had
    ended: a lighthouse that was started again counts its quorums anew.
    """

    ended: float
    """Wall time in seconds of the first group's event."""
    members: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    threw_away: bool = False
    """Whether a survivor computed again a slot that it had held."""


@dataclass
class Attempts:
    """Follows the `attempt` events of rank 0 of each group."""

    count: int = 0
    thrown_away: int = 0
    """Attempts after which a survivor computed again a slot it had held: it says so, or the same process computed it
    twice for one step."""
    slots_recomputed: int = 0
    """How often a slot of a step was computed again, by whichever group and for whichever reason.

    The first attempt that computes anything hands out all the slots of its step, so each slot computed in a later
    attempt at that step is computed again: its first holder died with it, or a checkpoint took the run back. A slot
    that the dead group had been given but not begun counts too, as its events cannot tell."""
    disturbed: set[int] = field(default_factory=set)
    """Steps with more than one attempt, or with a heal in them or just before."""
    _tried: int = 0
    """The highest step that was tried."""
    _first: dict[int, Attempt] = field(default_factory=dict)
    """By step, the first attempt that computed anything."""
    _newest: dict[tuple[int, Any], Attempt] = field(default_factory=dict)
    """By step and quorum."""

    def add(self, event: dict[str, Any], group: Group) -> None:
        """Take note of a group's event."""
        step, slots = event["step"], event.get("computed") or []
        attempt = self._attempt_of(event, max(event["t"] - (event.get("took_s") or 0.0), group.ready_t))
        attempt.members.add(event["group"])
        if group.step != step:
            group.step, group.computed = step, set()
        if group.dropped != step and (event["recomputed"] or group.computed.intersection(slots)):
            self.thrown_away += not attempt.threw_away
            attempt.threw_away = True
        group.computed.update(slots)
        is_first = not slots or self._first.setdefault(step, attempt) is attempt
        self.slots_recomputed += len(attempt.computed.intersection(slots) if is_first else slots)
        attempt.computed.update(slots)

    def _attempt_of(self, event: dict[str, Any], began: float) -> Attempt:
        step = event["step"]
        name = step, event.get("quorum_id")
        attempt = self._newest.get(name)
        if attempt is None or event["group"] in attempt.members or began > attempt.ended:
            if step <= self._tried:
                self.disturbed.add(step)
            self._tried = max(self._tried, step)
            self.count += 1
            attempt = self._newest[name] = Attempt(event["t"])
            remembered: tuple[dict[Any, Attempt], ...] = (self._newest, self._first)
            for known in remembered:
                if len(known) > KEPT:
                    del known[next(iter(known))]
        return attempt
