"""The starts of a run, and each group in one of them: how it spends its time, and which training state it holds.

From the begin to the end of a session each group is in exactly one of STATES, which docs/report.md defines. Most events
say what the time since the group's event before was spent on.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.report.lineage import Commit

ENDS = ("done", "stopped", "failed")
"""How a run or a group can end for good. A group that ends in another way is started again."""
STATES = ("productive", "recomputed", "stalled", "healing", "start-up", "restarting", "waiting")
"""`productive`: attempts that commit, and what follows a commit. `recomputed`: the share of such an attempt that
computed slots which this group had held before. `stalled`: attempts that did not commit, and what a death cut off.
`healing`: receiving a state. `start-up`: until the group is first ready in a session. `restarting`: later times without
a process that trains. `waiting`: for a quorum."""


@dataclass
class Group:
    """One group in one session, from the events of its rank 0 and its agents in order."""

    at: float
    """Wall time in seconds up to which its time is accounted for."""
    spent: dict[str, float]
    """State -> seconds. A period is added when it ends."""
    alive: bool = False
    """Whether one of its processes trains."""
    given_up: str | None = None
    """Why it was given up; None if it was not."""
    end: str | None = None
    """How it ended: `done`, `stopped`, `failed`, or in a way after which it is started again; None if it has not."""
    away: str = "start-up"
    """The state that its time counts as while none of its processes trains."""
    ready_t: float = 0.0
    """Wall time in seconds at which its newest process was ready."""
    returns: list[tuple[float, float]] = field(default_factory=list)
    """Wall times in seconds at which each process was ready, and first took part in a commit. Of those that did."""
    step: int = 0
    computed: set[int] = field(default_factory=set)
    """Slots of `step` that its newest process computed."""
    dropped: int | None = None
    """The newest step in which one of its slots was refused. The group then drops all that it holds, like a group that
    died, so what it computes again was not thrown away."""
    history: str | None = None
    """History of the training state that it says it holds."""
    committed: bool = False
    """Whether it committed that state itself, instead of loading or receiving it."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one of its events, of any kind."""
        t = event["t"]
        match event["kind"]:
            case "worker_ready":
                self._until(t, self.away)
                self.alive, self.away = True, "restarting"
                self.end = self.given_up = None
                self.computed = set()
                self.ready_t = t
                self.history, self.committed = None, False
            case "workers_started" if self.end in ENDS:  # nobody asked for it meanwhile
                self.at, self.end = t, None
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
            case "left" | "training_done" | "agent_ended" if event.get("status") != "fenced":  # its successor lives
                if self.end is None:
                    self._until(t, self._usual)
                self.alive = False
                self.end = event.get("status") or ("stopped" if event["kind"] == "left" else "done")
                self.given_up = event.get("reason", "") if event.get("status") == "failed" else None

    def take_part(self, t: float) -> None:
        """Note that it took part in the commit at `t`."""
        if not self.returns or self.returns[-1][0] != self.ready_t:
            self.returns.append((self.ready_t, t))

    def lose(self, t: float, before: float) -> None:
        """Mark the group as gone, because the others committed at `t` without it, after a commit at `before` with it:
        if its host is gone, no event says so. A group that was started again since `before` is not gone."""
        if self.alive and self.ready_t < before:
            self._until(t, "stalled")
            self.alive = False

    def close(self, end: float) -> None:
        """Account for the time until `end` if the group is down and has not ended for good."""
        if not self.alive and self.end is None:
            self._until(end, self.away)

    def _have(self, history: str | None) -> None:
        if history:
            self.history, self.committed = history, False

    def _until(self, t: float, state: str) -> None:
        """Add the time that is not accounted for, up to `t`, to a state."""
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
    supervised: bool = False
    """Whether `everstep run` started it."""
    nominal: int = 0
    """Number of groups with which it started."""
    scales: list[tuple[float, int]] = field(default_factory=list)
    """For each `everstep scale`, its wall time in seconds and the number of groups that it asked for."""
    ending: Mapping[str, Any] | None = None
    """Its `run_ended` event. None while it goes, and if its supervisor was killed."""
    trains: float | None = None
    """Wall time in seconds of the first `training_started`; None if training never began."""
    done: float | None = None
    finished: int = -1
    """The newest step of a `training_done`; -1 if there is none."""
    commits: list[Commit] = field(default_factory=list)
    """Commits in order of time."""
    groups: dict[int, Group] = field(default_factory=dict)
    schedules: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """(group id, rank) -> its newest `attention_schedule` event."""

    @property
    def end(self) -> float:
        """Time of its `run_ended`, or else of its newest event."""
        return self.last if self.ending is None else self.ending["t"]

    @property
    def wall_s(self) -> float:
        return self.end - self.begin

    @property
    def training_s(self) -> float:
        """Seconds from the first `training_started` to the last `training_done`, or else to the end."""
        if self.trains is None:
            return 0.0
        return max(0.0, (self.end if self.done is None else self.done) - self.trains)

    @property
    def asked(self) -> int:
        """Number of groups that were asked for last; 0 if that is not known."""
        return self.asked_at(math.inf)

    def asked_at(self, t: float) -> int:
        """Return the number of groups last asked for before this wall time in seconds; 0 if it is not known."""
        return next((count for begin, count in reversed(self.scales) if begin < t), self.nominal)

    @property
    def asked_s(self) -> float:
        """Seconds until the end of all groups together that were asked for."""
        times = [self.begin, *(t for t, _ in self.scales), self.end]
        counts = [self.nominal or len(self.groups), *(count for _, count in self.scales)]
        return sum(count * (b - a) for count, (a, b) in zip(counts, itertools.pairwise(times), strict=True))

    def close(self) -> None:
        for group in self.groups.values():
            group.close(self.end)
