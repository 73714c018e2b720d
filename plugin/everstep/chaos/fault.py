"""What a fault is: a small class that says what it breaks, whom it can hit and when. What is
expected of the run is in docs/faults.md.

A fault is planned before anything happens: `plan` decides whom to hit and returns an Injection. The runner then writes
the `fault` event, and then does it. So there is never a death that no event explains.
"""

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from signal import SIGKILL, Signals
from typing import Any, ClassVar

from everstep.chaos.target import Target
from everstep.chaos.view import Proc, View
from everstep.snapshot.segment import Segment


@dataclass(kw_only=True)
class Injection:
    """A fault about to happen."""

    procs: list[Proc]
    """They get `signum`."""
    signum: Signals = SIGKILL
    target_group: int | list[int] | None = None
    """The group or groups it hits; None when it hits something else."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Whatever else its event should say."""
    lasts_s: float = 0.0
    """After so long the processes, which it stops, go on. 0: it does not end."""
    segments: list[Segment] = field(default_factory=list)
    """Memory that is lost with them."""

    @property
    def groups(self) -> list[int]:
        if isinstance(self.target_group, int):
            return [self.target_group]
        return list(self.target_group or ())


@dataclass(kw_only=True)
class Fault(ABC):
    """A way to break a run. Its fields are what a campaign may set.

    Names that begin with `kill` count as kills: they take processes away that the group then has to start again.
    """

    name: ClassVar[str]
    breaks: ClassVar[str]
    """What it does to the run, one sentence."""
    on: ClassVar[frozenset[str]] = frozenset({"local", "slurm"})
    """Kinds of targets it can be done to."""

    duration_s: float = 0.0
    """Seconds until it ends. 0: an instant, or for ever."""
    group: int | None = None
    """Hit this group. None: one that is drawn from those that take part."""
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

    def never(self, run: View) -> str | None:
        """Why it can never be done to this run, because of its settings; None: it can, at times."""
        return None

    def why_not(self, run: View) -> str | None:
        """Why it cannot be done to the run now; None: it can. Here: no group may be hit."""
        return self.why_no_group(run)

    @abstractmethod
    def plan(self, target: Target, choose: random.Random) -> Injection:
        """Decide whom to hit, drawing from `choose` alone, so that a seed repeats it. Changes nothing. Only called
        while `why_not` is None."""

    def why_no_group(self, run: View, lost: int = 1) -> str | None:
        """Why `lost` groups cannot be hit at once without hitting the last holder of the state; None: they can."""
        allowed = run.candidates(lost)
        if self.group is not None and self.group not in allowed:
            return f"group {self.group} does not take part, is spared, or is the last that does"
        if len(allowed) < lost:
            return f"{len(allowed)} groups take part that may be hit"
        return None

    def victim(self, run: View, choose: random.Random) -> int:
        """The group to hit."""
        return choose.choice(run.candidates()) if self.group is None else self.group


def why_never(fault: Fault, target: Target) -> str | None:
    """Why a fault can never be done to the target; None: it can, at times."""
    if target.kind not in fault.on:
        return f"{fault.name} cannot be done to a run on {target.kind}, only on {', '.join(sorted(fault.on))}"
    reason = fault.never(target.run)
    return f"{fault.name} cannot be done to {target.run_dir}: {reason}" if reason else None


def why_not(fault: Fault, target: Target) -> str | None:
    """Why a fault cannot be done to the target now; None: it can."""
    return why_never(fault, target) or fault.why_not(target.run)
