"""What a fault is: its kind (`kinds`), what it hits and when. docs/faults.md says what the run should then do.

A fault is planned before anything happens: `plan` of its kind decides which processes to hit and returns an Injection.
The runner first writes the `fault` event and then acts, so every death has an event that explains it.
"""

import random
from dataclasses import dataclass, field
from signal import SIGKILL, Signals
from typing import Annotated, Any

from pydantic import Field

from everstep.chaos.view import Proc, View
from everstep.snapshot.segment import Segment


@dataclass(kw_only=True)
class Injection:
    """A planned fault."""

    procs: list[Proc]
    """The processes that get `signum`."""
    signum: Signals = SIGKILL
    groups: list[int] = field(default_factory=list)
    """The groups that it hits; empty if it hits something else."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of its event."""
    lasts_s: float = 0.0
    """Seconds after which the processes that it stops are continued; 0: never."""
    segments: list[Segment] = field(default_factory=list)
    """Shared memory of snapshots that is removed."""


@dataclass(kw_only=True)
class Fault:
    """One fault. Its fields are what a campaign file may set."""

    name: str
    """The name of its kind, a key of `kinds.FAULTS`."""
    group: int | None = None
    """The group to hit, unless `count` is above 1. None: one of those that take part is drawn."""
    rank: int | None = None
    """kill-worker, stop-worker: the rank to hit. None: it is drawn."""
    count: Annotated[int, Field(ge=1)] = 1
    """kill-group: number of groups to hit at once. If there are several, they are drawn."""
    duration_s: Annotated[float, Field(ge=0)] = 4.0
    """stop-worker: seconds until the worker is continued; 0: never."""
    at_step: int | None = None
    """In a campaign: it is due once this step is committed."""
    at_s: float | None = None
    """In a campaign: it is due so many seconds after the first step that the injector saw."""
    patience_s: Annotated[float, Field(ge=0)] = 60.0
    """In a campaign: seconds that it may wait, once due, until the state of the run allows it."""

    @property
    def when(self) -> str:
        """Its time in a campaign, in words: a step, or seconds after the first commit."""
        return f"step {self.at_step}" if self.at_step is not None else f"{self.at_s:g} s"

    def is_due(self, step: int, since_first_s: float) -> bool:
        """Whether its time in a campaign has come."""
        by_step = self.at_step is not None and step >= self.at_step
        return by_step or (self.at_s is not None and since_first_s >= self.at_s)

    def why_no_group(self, run: View, lost: int = 1) -> str | None:
        """Return why `lost` groups cannot be hit at once without losing the state's last holder; None if they can."""
        allowed = run.candidates(lost)
        if self.group is not None and self.group not in allowed:
            return f"group {self.group} does not take part, or is the last group that does"
        if len(allowed) < lost:
            return f"only {len(allowed)} groups may be hit now"
        return None

    def victim(self, run: View, choose: random.Random) -> int:
        """Return `group`, or draw one of the groups that may be hit."""
        return choose.choice(run.candidates()) if self.group is None else self.group
