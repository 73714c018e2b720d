"""What a fault is: of which kind (`kinds`), whom it hits and when. What is expected of the run is in docs/faults.md.

A fault is planned before anything happens: its kind's `plan` decides whom to hit and returns an Injection. The runner
then writes the `fault` event, and then does it. So there is never a death that no event explains.
"""

import random
from dataclasses import dataclass, field
from signal import SIGKILL, Signals
from typing import Any

from everstep.chaos.view import Proc, View
from everstep.snapshot.segment import Segment


@dataclass(kw_only=True)
class Injection:
    """A fault about to happen."""

    procs: list[Proc]
    """They get `signum`."""
    signum: Signals = SIGKILL
    groups: list[int] = field(default_factory=list)
    """The groups it hits; none when it hits something else."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Whatever else its event should say."""
    lasts_s: float = 0.0
    """After so long the processes, which it stops, go on. 0: it does not end."""
    segments: list[Segment] = field(default_factory=list)
    """Memory that is lost with them."""


@dataclass(kw_only=True)
class Fault:
    """One fault of a run. All but the name is what a campaign may set."""

    name: str
    """Of its kind."""
    group: int | None = None
    """Hit this group. None: one that is drawn from those that take part."""
    rank: int | None = None
    """Of a worker: hit this rank. None: one that is drawn."""
    count: int = 1
    """kill-group: how many groups at once; more than one are drawn."""
    duration_s: float = 4.0
    """stop-worker: seconds until it goes on. 0: it never does."""
    at_step: int | None = None
    """In a campaign: due once this step is committed."""
    at_s: float | None = None
    """In a campaign: due so many seconds after the first step that was seen."""
    patience_s: float = 60.0
    """In a campaign: how long it may wait for the run to be in a state in which it can be done."""

    @property
    def when(self) -> str:
        return f"step {self.at_step}" if self.at_step is not None else f"{self.at_s:g} s"

    def is_due(self, step: int, since_first_s: float) -> bool:
        """Whether its time in a campaign has come."""
        by_step = self.at_step is not None and step >= self.at_step
        return by_step or (self.at_s is not None and since_first_s >= self.at_s)

    def why_no_group(self, run: View, lost: int = 1) -> str | None:
        """Why `lost` groups cannot be hit at once without hitting the last holder of the state; None: they can."""
        allowed = run.candidates(lost)
        if self.group is not None and self.group not in allowed:
            return f"group {self.group} does not take part, or is the last that does"
        if len(allowed) < lost:
            return f"{len(allowed)} groups take part that may be hit"
        return None

    def victim(self, run: View, choose: random.Random) -> int:
        """The group to hit."""
        return choose.choice(run.candidates()) if self.group is None else self.group
