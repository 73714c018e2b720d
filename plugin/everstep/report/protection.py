"""Which snapshot is coded, how old it is and what it survives: from events, for `everstep status` and the metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NAMED = 8
"""Hosts that a line names; the others are counted."""


@dataclass
class Protection:
    """Follows the events of a run."""

    step: int = 0
    """Of the newest snapshot that is coded in all its members; 0: none is."""
    survives: int = 0
    """How many of the hosts that hold it may be lost at once, the exposed ones aside."""
    _failed: bool = False
    """Whether a snapshot was not taken or not coded in this start of the run."""
    committed: int = 0
    """The highest step that was committed in this start."""
    _members: tuple[int, ...] = ()
    _exposed: tuple[int, ...] = ()
    _hosts: dict[int, str] = field(default_factory=dict)
    """By group, of the keepers that were found."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Take note of one event, of any kind and rank."""
        group, step = event.get("group"), event.get("step") or 0
        match event["kind"]:
            case "snapshot_failed" | "snapshot_unprotected":
                self._failed = True
            case "commit":
                self.committed = max(self.committed, step)
            case "keeper_found" if group is not None:
                self._hosts[group] = str(event.get("host", ""))
            case "snapshot_protected" if step >= self.step:
                self.step, self.survives = step, event["survives"]
                self._members, self._exposed = tuple(event["members"]), tuple(event["exposed"])

    @property
    def age_steps(self) -> int:
        """Committed steps since the newest coded snapshot, or since the start if there is none."""
        return max(0, self.committed - self.step)

    def line(self) -> str:
        """For people; empty as long as nothing is known of snapshots. Why one is not coded is a trouble."""
        if not self.step:
            return "UNPROTECTED: no snapshot is coded" if self._failed else ""
        found = f"protected: step {self.step:,}, {self.age_steps} steps old, survives "
        safe = [group for group in self._members if group not in self._exposed]
        if safe and self.survives:
            found += f"any {self.survives} of hosts {self._named(safe)}"
        else:
            found += "all trainers"
        if self._exposed:
            found += f", NOT the loss of {self._named(self._exposed)}"
        return found

    def _named(self, groups: Iterable[int]) -> str:
        names = sorted({self._hosts.get(group) or f"(group {group})" for group in groups})
        return " ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
