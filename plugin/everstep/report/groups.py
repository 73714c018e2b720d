"""The starts of a run, and what each group does in one of them: how it spends its time, and what state it has.

A group is in one state at every moment from a session's begin to its end; docs/report.md defines them. It alternates
between attempts, which say how long they took and how they ended, and what lies between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.report.lineage import Commit

STATES = ("productive", "recomputed", "stalled", "healing", "start-up", "restarting", "waiting")
"""`productive`: what led to a commit, and what follows one. `recomputed`: the share of it that computed slots which
this group had held before. `stalled`: attempts that did not commit, and what a death cut off. `healing`: receiving a
state. `start-up`: until a group is first ready in a session. `restarting`: no process that trains, later on.
`waiting`: for a quorum."""


@dataclass
class Group:
    """One group in one session, from the events of its rank 0 and its agents in order."""

    at: float
    """Up to when its time is accounted for, wall time in seconds."""
    spent: dict[str, float]
    """Seconds by state, to which each time that has ended is added."""
    alive: bool = False
    """Whether a process of it trains."""
    given_up: str | None = None
    """Why it is not started again, if it is not."""
    ended: bool = False
    away: str = "start-up"
    """The state of a group that has no process that trains."""
    ready_t: float = 0.0
    """When its newest process was ready."""
    step: int = 0
    computed: set[int] = field(default_factory=set)
    """Slots of that step, by this process."""
    dropped: int | None = None
    """The step in which a slot of it was refused, so that it dropped what it held, like a group that died: what it
    computes again was not thrown away."""
    history: str | None = None
    """Of the state that it says it has."""
    committed: bool = False
    """Whether it committed that itself."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of one event of it, of any kind."""
        t = event["t"]
        match event["kind"]:
            case "worker_ready":
                self._until(t, self.away)
                self.alive, self.away = True, "restarting"
                self.ended, self.given_up = False, None
                self.ready_t, self.computed = t, set()
                self.history, self.committed = None, False
            case "workers_died" | "workers_started":
                self._until(t, "stalled" if self.alive else self.away)
                self.alive = False
            case "training_started":
                self._have(event.get("history"))
            case "quorum":
                self._until(t - (event.get("wait_s") or 0.0), self._usual)
                self._until(t, "waiting")
                self.alive = True
            case "quorum_failed" | "waiting_for_state":
                self._until(t, "waiting")
            case "heal":
                self._until(t - (event.get("took_s") or 0.0), self._usual)
                self._until(t, "healing")
                self._have(event.get("history"))
                self.computed = set()
            case "slot_refused":
                self.dropped = event["step"]
            case "attempt" if event.get("committed"):
                computed, again = len(event.get("computed") or ()), len(event.get("recomputed") or ())
                if again and computed:
                    self._until(self.at + (t - self.at) * again / computed, "recomputed")
                self._until(t, "productive")
            case "attempt":
                self._until(t, "stalled")
            case "commit":
                self._until(t, "productive")
            case "left" | "training_done" | "agent_ended":
                if not self.ended:
                    self._until(t, self._usual)
                self.alive, self.ended = False, True
                self.given_up = event.get("reason", "") if event.get("status") == "failed" else None

    def lose(self, t: float, before: float) -> None:
        """The others went on from their step of `before` to that of `t` without it: its host may be gone, and then
        nobody says so. One that was started meanwhile is not lost."""
        if self.alive and self.ready_t < before:
            self._until(t, "stalled")
            self.alive = False

    def close(self, end: float) -> None:
        """The session ends: a group that is down by then, and that nobody has ended, is away until then."""
        if not self.alive and not self.ended:
            self._until(end, self.away)

    def _have(self, history: str | None) -> None:
        if history:
            self.history, self.committed = history, False

    def _until(self, t: float, state: str) -> None:
        """What has not been accounted for up to `t` was `state`."""
        if t > self.at:
            self.spent[state] += t - self.at
            self.at = t

    @property
    def _usual(self) -> str:
        return "productive" if self.alive else self.away


@dataclass
class Session:
    """One start of a run."""

    begin: float
    """Wall time in seconds of its first event."""
    last: float
    nominal: int = 0
    """Groups, as its start says."""
    scaled_to: int = 0
    """Groups that were asked for since; 0: it was not scaled."""
    ending: Mapping[str, Any] | None = None
    """Its `run_ended`; None while it goes, and if nobody was left to write one."""
    trains: float | None = None
    """The first training_started; None: it never began."""
    done: float | None = None
    ends: dict[int, str] = field(default_factory=dict)
    """By group, how it ended since the newest commit."""
    commits: list[Commit] = field(default_factory=list)
    """In order of time."""
    groups: dict[int, Group] = field(default_factory=dict)
    schedules: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """By group and rank: the newest `attention_schedule`."""

    @property
    def end(self) -> float:
        return self.last if self.ending is None else self.ending["t"]

    @property
    def wall_s(self) -> float:
        return self.end - self.begin

    @property
    def training_s(self) -> float:
        """From the first training_started to the last training_done, or else to the end."""
        if self.trains is None:
            return 0.0
        return max(0.0, (self.end if self.done is None else self.done) - self.trains)

    def close(self) -> None:
        for group in self.groups.values():
            group.close(self.end)
