"""What the parts of an attempt pass to each other."""

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everstep.step import ledger
from everstep.step.interfaces import Commit, Fetch
from everstep.step.quorum import Quorum


class Turn(enum.Enum):
    """What an attempt came to, besides a commit; the same on all ranks of the group."""

    RETRY = "the step is tried again"
    CAUGHT_UP = "this group has taken over a state"
    FOLLOWED = "the others committed a step, which this group will apply when it has the state before it"
    BLANK = "no member of the quorum has any state: it has to come from somewhere else"
    LEFT = "asked to leave, and there is no step to wait for"
    FENCED = "another start of this group counts now"
    OUT_OF_DATA = "the data ended before this step"
    OVER = "the others, with the same state, make no more steps"
    TOO_LATE = "the run ended, with a later state than this group's"


class Beginning(NamedTuple):
    """What one rank brings to an attempt. What the run directory says to all ranks alike, rank 0 looks for.
    All but step and history are flags, 0 or 1."""

    step: int
    history: int
    fenced: int
    too_late: int
    asked_to_leave: int
    gives_up: int
    lost_peers: int
    state_is_here: int
    heal_failed: int
    adopts: int


@dataclass(slots=True)
class Held:
    """What this group's gradients contain, of the step after one state, and how often its checks refused a slot.

    Attributes:
        slots: what they contain.
        lost: slots that they contained and that were given up.
        computed: slots computed since the last event `attempt`, in order.
        recomputed: those of them that were in `lost`.
    """

    step: int
    history: int
    slots: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    computed: list[int] = field(default_factory=list)
    recomputed: set[int] = field(default_factory=set)
    refused: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Healing:
    """A state on its way here: after `step` of `history`, from group `source`, and the commits made since.
    `suspect`: an audit has named the source's state, and nobody had another."""

    source: int
    suspect: bool
    step: int
    history: int
    fetch: Fetch
    commits: list[tuple[Commit, Any]] = field(default_factory=list)

    @property
    def follows(self) -> tuple[int, int]:
        """Step and history that this group will be at once it has caught up."""
        last = self.commits[-1][0] if self.commits else self
        return last.step, last.history


@dataclass(slots=True)
class Attempt:
    """One attempt: what was found out in it so far."""

    number: int
    begun: float
    quorum: Quorum
    waited_s: float
    rows: list[ledger.Row] = field(default_factory=list)
    plan: ledger.Plan = field(default_factory=lambda: ledger.Plan({}, frozenset(), frozenset()))
    exhausted: bool = False
    compute_s: float = 0.0
    reduce_s: float = 0.0

    @property
    def step(self) -> int:
        return self.quorum.step + 1
