"""Counts the attempts at steps over all groups, and the slots that failures made the groups compute again."""

from dataclasses import dataclass, field
from typing import Any

from everstep.report.groups import Group

KEPT = 256
"""Number of steps whose attempts are remembered. A step is retried soon, so older ones are not needed."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One pass of quorum, compute, reduce and vote, joined from the `attempt` events of the groups that took part: each
    has one event that names the step and the quorum."""

    quorum_id: Any
    members: set[int] = field(default_factory=set)
    computed: set[int] = field(default_factory=set)
    threw_away: bool = False
    """Whether a surviving group computed a slot again that it held already."""


@dataclass
class Attempts:
    """Counts attempts from the `attempt` events of each group's rank 0."""

    count: int = 0
    thrown_away: int = 0
    """Attempts in which a surviving group computed a slot again that it held already: its event says so, or the same
    process computed the slot twice for one step."""
    slots_recomputed: int = 0
    """How often a slot was computed again, by any group and for any reason; an upper bound.

    The first attempt at a step that computes anything hands out all slots of the step. So each slot computed in a later
    attempt is computed again: its first holder died, or a checkpoint took the run back. A slot that the dead group had
    been given but had not begun counts too, as the events cannot tell.
    """
    _at: dict[int, list[Attempt]] = field(default_factory=dict)
    """Step -> the attempts at it in order, of the KEPT steps that were tried last."""
    _forgotten: int = 0  # the highest step that is not remembered any more

    def add(self, event: dict[str, Any], group: Group) -> None:
        """Count one group's `attempt` event."""
        step, slots = event["step"], event.get("computed") or []
        attempt = self._attempt_of(event)
        attempt.members.add(event["group"])
        if group.step != step:
            group.step, group.computed = step, set()
        if group.dropped != step and (event["recomputed"] or group.computed.intersection(slots)):
            self.thrown_away += not attempt.threw_away
            attempt.threw_away = True
        group.computed.update(slots)
        first = next((one for one in self._at[step] if one.computed), attempt)
        is_first = first is attempt and step > self._forgotten
        self.slots_recomputed += len(attempt.computed.intersection(slots) if is_first else slots)
        attempt.computed.update(slots)

    def _attempt_of(self, event: dict[str, Any]) -> Attempt:
        step, quorum_id = event["step"], event.get("quorum_id")
        known = self._at.setdefault(step, [])
        attempt = next((one for one in reversed(known) if one.quorum_id == quorum_id), None)
        if attempt is None or event["group"] in attempt.members:
            self.count += 1
            attempt = Attempt(quorum_id)
            known.append(attempt)
            if len(self._at) > KEPT:
                self._forgotten = max(self._forgotten, oldest := next(iter(self._at)))
                del self._at[oldest]
        return attempt
