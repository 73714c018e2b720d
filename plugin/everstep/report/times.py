"""What each group did with its time: one state at every moment from a session's begin to its end.

The definitions are those of docs/report.md. A group that takes part alternates between attempts, which say how long
they took and how they ended, and what lies between them.
"""

from dataclasses import dataclass
from typing import Any

STATES = ("productive", "recomputed", "stalled", "healing", "start-up", "restarting", "waiting")
"""`productive`: what led to a commit, and what follows one. `recomputed`: the share of it that computed slots which
this group had held before. `stalled`: attempts that did not commit, and what a death cut off. `healing`: receiving a
state. `start-up`: until a group is first ready in a session. `restarting`: no process that trains, later on.
`waiting`: for a quorum."""


@dataclass
class Session:
    """One start of a run."""

    begin: float
    """Wall time in seconds of its first event."""
    last: float
    ended: float | None = None
    trains: float | None = None
    """The first training_started; None: it never began."""
    done: float | None = None

    @property
    def end(self) -> float:
        """Its run_ended, or the last event where nobody was left to write one."""
        return self.last if self.ended is None else self.ended

    @property
    def wall_s(self) -> float:
        return self.end - self.begin

    @property
    def training_s(self) -> float:
        """From the first training_started to the last training_done, or else to the end."""
        if self.trains is None:
            return 0.0
        return max(0.0, (self.end if self.done is None else self.done) - self.trains)


class Lane:
    """What one group does in one session, from the events of its rank 0 in order.

    Args:
        begin: when that began, wall time in seconds.
        spent: seconds by state, to which each time that has ended is added.
    """

    def __init__(self, begin: float, spent: dict[str, float]) -> None:
        self._at, self._spent = begin, spent
        self.alive = False
        """Whether a process of it trains."""
        self.given_up = False
        self._begun = False
        self._ended = False

    def _until(self, t: float, state: str) -> None:
        """What has not been accounted for up to `t` was `state`."""
        if t > self._at:
            self._spent[state] += t - self._at
            self._at = t

    def close(self, end: float) -> None:
        """The session ends: a group that is down by then, and that nobody has ended, is away until then."""
        if not self.alive and not self._ended:
            self._until(end, self._away)

    def take(self, event: dict[str, Any]) -> None:
        """Take note of one event of its group."""
        t = event["t"]
        match event["kind"]:
            case "worker_ready":
                self._until(t, self._away)
                self._begun = self.alive = True
                self._ended = self.given_up = False
            case "workers_died" | "workers_started":
                self._until(t, "stalled" if self.alive else self._away)
                self.alive = False
            case "quorum":
                self._until(t - (event.get("wait_s") or 0.0), self._usual)
                self._until(t, "waiting")
            case "quorum_failed" | "waiting_for_state":
                self._until(t, "waiting")
            case "heal":
                self._until(t - (event.get("took_s") or 0.0), self._usual)
                self._until(t, "healing")
            case "attempt" if event.get("committed"):
                computed, again = len(event.get("computed") or ()), len(event.get("recomputed") or ())
                if again and computed:
                    self._until(self._at + (t - self._at) * again / computed, "recomputed")
                self._until(t, "productive")
            case "attempt":
                self._until(t, "stalled")
            case "commit":
                self._until(t, "productive")
            case "left" | "training_done" | "agent_ended":
                self._until(t, self._usual)
                self.alive, self._ended = False, True
                self.given_up = event.get("status") == "failed"

    @property
    def _usual(self) -> str:
        return "productive" if self.alive else self._away

    @property
    def _away(self) -> str:
        """What a group does that has no process that trains."""
        return "restarting" if self._begun else "start-up"
