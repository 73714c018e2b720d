"""Which groups' snapshots are not coded, and for how many steps: from events, for `everstep status` and the metrics."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NAMED = 6
"""Unprotected groups that a line names; the others are counted."""


@dataclass(frozen=True)
class Exposure:
    """A group of which the newest snapshots are not coded."""

    since_step: int
    """The first of them."""
    steps: int
    """Committed steps since then, that one included."""
    reason: str


@dataclass
class Protection:
    """Follows the events of a run. A group that takes no part holds nothing that is newer than the others': it is not
    counted."""

    snapshot_step: int = 0
    """The newest that was taken."""
    steps: Counter[int] = field(default_factory=Counter)
    """By group: steps that its snapshots were not coded for, of the stretches that are over."""
    coded: set[int] = field(default_factory=set)
    """The groups that said that theirs are."""
    _committed: int = 0
    _began: dict[int, int] = field(default_factory=dict)
    _open: dict[int, dict[int, str]] = field(default_factory=dict)
    """By group and rank: why its snapshots are not coded."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of one event, of any kind and rank."""
        group, rank, step = event.get("group"), event.get("rank") or 0, event.get("step") or 0
        match event["kind"]:
            case "run_started":
                self._committed = self.snapshot_step = 0
                for each in (*self._open, *self.coded):
                    self._leave(each)
            case "commit":
                self._committed = max(self._committed, step)
                for each in [g for g, since in self._began.items() if g not in event["groups"] and since < step]:
                    self._leave(each)
            case "agent_ended" if group is not None:
                self._leave(group)
            case "snapshot":
                self.snapshot_step = max(self.snapshot_step, step)
            case "snapshot_unprotected" if group is not None:
                self.coded.discard(group)
                self._began[group] = min(step, self._began.get(group, step))
                self._open.setdefault(group, {})[rank] = event["reason"]
            case "snapshot_protected" if group is not None:
                self._close(group, rank, step)

    def exposed(self) -> dict[int, Exposure]:
        """The groups that are unprotected now, in ascending order."""
        return {
            group: Exposure(since, max(1, self._committed - since + 1), self._open[group][min(self._open[group])])
            for group, since in sorted(self._began.items())
        }

    def line(self) -> str:
        """For people; empty as long as there is no snapshot."""
        if not self.snapshot_step:
            return ""
        exposed = self.exposed()
        if not exposed:
            return f"of step {self.snapshot_step}; " + ("all are coded" if self.coded else "none is coded yet")
        named = [
            f"group {group} for {found.steps} step{'s' if found.steps > 1 else ''} ({found.reason})"
            for group, found in list(exposed.items())[:NAMED]
        ]
        if len(exposed) > NAMED:
            named.append(f"{len(exposed) - NAMED} more groups")
        return f"of step {self.snapshot_step}; UNPROTECTED: " + ", ".join(named)

    def _close(self, group: int, rank: int, step: int) -> None:
        ranks = self._open.get(group, {})
        ranks.pop(rank, None)
        if ranks:
            return
        self._open.pop(group, None)
        if group in self._began:
            self.steps[group] += max(0, step - self._began.pop(group))
        self.coded.add(group)

    def _leave(self, group: int) -> None:
        self._open.pop(group, None)
        self._began.pop(group, None)
        self.coded.discard(group)
