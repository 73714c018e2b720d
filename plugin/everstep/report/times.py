"""What each group did with its time: one state at every moment from a session's begin to its end.

The definitions are those of docs/report.md. A group that takes part alternates between attempts, which say how long
they took and how they ended, and what lies between them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.report.sessions import Session

STATES = ("productive", "recomputed", "stalled", "healing", "start-up", "restarting", "waiting")
"""`productive`: what led to a commit, and what follows one. `recomputed`: the share of it that computed slots which
this group had held before. `stalled`: attempts that did not commit, and what a death cut off. `healing`: receiving a
state. `start-up`: until a group is first ready in a session. `restarting`: no process that trains, later on.
`waiting`: for a quorum."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in one state; wall time in seconds."""

    begin: float
    end: float
    state: str


class Lane:
    """One group's stretches in one session, from its events in order. `begin`: when that began, wall time in s."""

    def __init__(self, begin: float) -> None:
        self.stretches: list[Stretch] = []
        self._at = begin
        self._begun = False
        self._alive = False
        self._ended = False

    def until(self, t: float, state: str) -> None:
        """What has not been accounted for up to `t` was `state`."""
        if t > self._at:
            self.stretches.append(Stretch(self._at, t, state))
            self._at = t

    def take(self, event: dict[str, Any]) -> None:
        t = event["t"]
        match event["kind"]:
            case "worker_ready":
                self.until(t, self._away)
                self._begun = self._alive = True
                self._ended = False
            case "workers_died" | "workers_started":
                self.until(t, "stalled" if self._alive else self._away)
                self._alive = False
            case "quorum":
                self.until(t - (event.get("wait_s") or 0.0), self._usual)
                self.until(t, "waiting")
            case "quorum_failed" | "waiting_for_state":
                self.until(t, "waiting")
            case "heal":
                self.until(t - (event.get("took_s") or 0.0), self._usual)
                self.until(t, "healing")
            case "attempt" if event.get("committed"):
                computed, again = len(event.get("computed") or ()), len(event.get("recomputed") or ())
                if again and computed:
                    self.until(self._at + (t - self._at) * again / computed, "recomputed")
                self.until(t, "productive")
            case "attempt":
                self.until(t, "stalled")
            case "commit":
                self.until(t, "productive")
            case "left" | "training_done" | "agent_ended":
                self.until(t, self._usual)
                self._alive, self._ended = False, True

    def close(self, end: float) -> None:
        """The session ends; a group that is down by then was never brought back."""
        if not self._alive and not self._ended:
            self.until(end, self._away)

    @property
    def _usual(self) -> str:
        return "productive" if self._alive else self._away

    @property
    def _away(self) -> str:
        """What a group does that has no process that trains."""
        return "restarting" if self._begun else "start-up"


def group_of(event: dict[str, Any]) -> int | None:
    """The group that an event tells about, as far as its time is concerned: rank 0 speaks for all."""
    group = event.get("group")
    return group if isinstance(group, int) and event.get("rank") in (None, 0) else None


def stretches(events: Iterable[dict[str, Any]], sessions: Sequence[Session]) -> dict[int, list[Stretch]]:
    """By group, its stretches in order. Those of a session fill it from its begin to the group's last word, or to the
    session's end when the group is down by then and nobody has ended it."""
    found: dict[int, list[Stretch]] = defaultdict(list)
    for session in sessions:
        lanes: dict[int, Lane] = {}
        for event in events:
            group = group_of(event)
            if group is not None and event["t"] in session:
                lanes.setdefault(group, Lane(session.begin)).take(event)
        for group, lane in lanes.items():
            lane.close(session.end)
            found[group] += lane.stretches
    return dict(sorted(found.items()))


def split(by_group: dict[int, list[Stretch]]) -> dict[str, Any]:
    """Seconds in each state: of all groups together, and of each."""
    each = {group: dict.fromkeys(STATES, 0.0) for group in by_group}
    for group, parts in by_group.items():
        for part in parts:
            each[group][part.state] += part.end - part.begin
    totals = {f"{state.replace('-', '_')}_s": sum(times[state] for times in each.values()) for state in STATES}
    return totals | {"time_by_group": {str(group): times for group, times in each.items()}}
