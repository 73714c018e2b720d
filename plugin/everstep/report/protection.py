"""Which snapshot is coded, how old it is and what it survives, from events; for `everstep status` and the metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NAMED = 8
"""Number of hosts that a line names; the others are counted."""


@dataclass
class Protection:
    """Collects the protection of the newest snapshot from a run's events."""

    step: int = 0
    """Step of the newest snapshot that is coded in all its members; 0 if none is."""
    survives: int = 0
    """Number of hosts holding it that may be lost at once, not counting the exposed ones."""
    _failed: bool = False
    """Whether a snapshot failed, or was not coded, in this start of the run."""
    _saved: int = 0
    """Step of the newest checkpoint in this start of the run."""
    committed: int = 0
    """The highest step that was committed in this start of the run."""
    _members: tuple[int, ...] = ()
    _exposed: tuple[int, ...] = ()
    _hosts: dict[int, str] = field(default_factory=dict)
    """Group id -> host of its keeper."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Process one event, of any kind and rank."""
        group, step = event.get("group"), event.get("step") or 0
        match event["kind"]:
            case "snapshot_failed" | "snapshot_unprotected":
                self._failed = True
            case "checkpoint_saved":
                self._saved = step
            case "run_ended":
                saved = event["status"] == "stopped" and self._saved >= self.committed
                if saved or event["status"] == "done":  # keepers have removed their memory
                    self.step, self._failed = 0, False
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
        """Describe the newest coded snapshot; "" if no event tells of any. Troubles say why one is not coded."""
        if not self.step:
            return "UNPROTECTED: no snapshot is coded" if self._failed else ""
        found = f"protected: step {self.step:,}, {self.age_steps} steps old, survives "
        safe = [group for group in self._members if group not in self._exposed]
        if safe and self.survives:
            found += f"any {self.survives} of hosts {self._named(safe)}"
        else:
            found += "the death of all trainers"
        if self._exposed:
            found += f", NOT the loss of {self._named(self._exposed)}"
        return found

    def _named(self, groups: Iterable[int]) -> str:
        names = sorted({self._hosts.get(group) or f"(group {group})" for group in groups})
        return " ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
