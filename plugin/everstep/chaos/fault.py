"""What a fault is: a small class that says what it breaks, how that is undone, and what recovery is expected.

A fault is planned before anything happens: `plan` decides whom to hit and returns an Injection. The runner then makes
sure of its end (the guard notes how it is undone), writes the `fault` event, and strikes. So there is never a fault
that nobody would end, nor a death that no event explains.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from everstep.chaos.target import Target
from everstep.chaos.undo import Undo
from everstep.chaos.view import View


@dataclass(kw_only=True)
class Injection:
    """A fault about to happen."""

    strike: Callable[[], object]
    """Does it."""
    target_group: int | list[int] | None = None
    """The group or groups it hits; None when it hits something else."""
    pids: list[int] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    """Whatever else its event should say."""
    undo: Undo | None = None
    """How its effect ends after `Fault.duration_s`; None: nothing to end, or the run itself ends it."""

    @property
    def groups(self) -> list[int]:
        if isinstance(self.target_group, int):
            return [self.target_group]
        return list(self.target_group or ())


@dataclass(kw_only=True)
class Fault(ABC):
    """A way to break a run. Its fields are what a campaign may set; a subclass is registered in
    `everstep.chaos.registry`.

    Names that begin with `kill` count as kills: they take processes away that the group then has to start again.
    """

    name: ClassVar[str]
    breaks: ClassVar[str]
    """What it does to the run, one sentence."""
    undone: ClassVar[str]
    """How it ends, one sentence."""
    expected: ClassVar[str]
    """What recovery is expected, one sentence."""
    on: ClassVar[frozenset[str]] = frozenset({"local", "slurm"})
    """Kinds of targets it can be done to."""

    duration_s: float = 0.0
    """Seconds until it is undone. 0: an instant, nothing to undo."""
    group: int | None = None
    """Hit this group. None: one that is drawn from those that take part."""

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
