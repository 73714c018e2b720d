"""What the parts of an attempt pass to each other."""

import enum
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from everstep.quorum.heal import Door, Fetch
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import RankColumn
from everstep.quorum.ranks import GroupRanks
from everstep.quorum.request import Quorum, State
from everstep.run.events import EventLog
from everstep.step import ledger
from everstep.step.interfaces import Clock, Commit, RunFiles, Timeouts
from everstep.step.reduction import GradientReducer


@dataclass(frozen=True, slots=True)
class Group:
    """A start of a replica group, as one of its ranks knows it.

    Attributes:
        id: of the group.
        life: differs after every start of the group; the same on all its ranks.
        store: `host:port` of a TCPStore of this group that other groups reach.
        ranks: the group's own collectives.
        membership: rank 0's voice at the lighthouse; None on the other ranks.
        sums: collectives over the rank column.
        door: where joiners heal from.
    """

    id: int
    life: str
    store: str
    ranks: GroupRanks
    membership: Membership | None
    sums: RankColumn
    door: Door


@dataclass(frozen=True, slots=True)
class Host:
    """What a rank has around it."""

    clock: Clock
    files: RunFiles
    events: EventLog


@dataclass(frozen=True, slots=True)
class Rules:
    """What all groups of a run have alike.

    Attributes:
        slots: S.
        dealing: see `ledger.Dealing`.
        timeouts: the protocol's waits.
        audit_slots, seed: see `ledger.audited_slots`.
        more: `name = value` of what else is to be alike, such as how the parameters are laid out over ranks.
    """

    slots: int
    dealing: ledger.Dealing
    timeouts: Timeouts
    audit_slots: float = 0.0
    seed: int = 0
    more: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """`name = value` of what decides who computes what and what is summed. Timeouts may differ."""
        dealt = replace(self.dealing, groups=self.dealing.groups if self.dealing.spares else 0)
        named = asdict(dealt) | {"slots": self.slots, "audit_slots": self.audit_slots, "seed": self.seed}
        return (*(f"{name} = {value}" for name, value in named.items()), *self.more)


class Turn(enum.Enum):
    """What an attempt came to, besides a commit, and so a run; the same on all ranks of the group."""

    RETRY = "the step is tried again"
    CAUGHT_UP = "this group has taken over a state"
    FOLLOWED = "the others committed a step, which this group will apply when it has the state before it"
    LEFT = "this group was asked to leave, and there is no step to wait for"
    FENCED = "another start of this group counts now"
    OUT_OF_DATA = "the data ended before this step"
    OVER = "no more steps are made on this group's state"
    TOO_LATE = "the run ended, with a later state than this group's"


class Beginning(NamedTuple):
    """What one rank brings to an attempt. `over`: see `Asker.over`; `heal_failed`: why, or empty; `slot_us`: see
    `ledger.Row`."""

    step: int
    history: int
    over: str
    asked_to_leave: bool
    gives_up: bool
    lost_peers: bool
    state_is_here: bool
    heal_failed: str
    slot_us: int


@dataclass(slots=True)
class Healing:
    """A state on its way here, from groups `sources`, and the commits made since. `full`: a commit could not be
    kept."""

    sources: tuple[int, ...]
    state: State
    fetch: Fetch
    commits: list[tuple[Commit, Any]] = field(default_factory=list)
    full: bool = False

    def keep(self, commit: Commit, reducer: GradientReducer) -> None:
        """Keep a commit with a copy of its sums, unless this host has no memory for that: then this healing is over."""
        with self.fetch.room(reducer.nbytes) as has_room:
            self.full = self.full or not has_room
            if not self.full:
                self.commits.append((commit, reducer.stash()))

    @property
    def error(self) -> str:
        """Why it failed for good; empty while it has not."""
        return "no memory on this host for the sums of another step" if self.full else self.fetch.error

    @property
    def follows(self) -> State:
        """What this group will have once it has caught up."""
        return State(self.commits[-1][0].step, self.commits[-1][0].history) if self.commits else self.state


@dataclass(slots=True)
class Attempt:
    """One attempt: what was found out in it so far."""

    number: int
    begun: float
    quorum: Quorum
    computes: bool
    """Whether this group has the state that the step is made on."""
    waited_s: float
    rows: list[ledger.Row] = field(default_factory=list)
    plan: ledger.Plan = ledger.NO_PLAN
    exhausted: bool = False
    refused: bool = False
    """Whether this group refused a slot that it computed."""
    wanted: bool = False
    """Whether somebody wants a quorum before the next step."""
    compute_s: float = 0.0
    reduce_s: float = 0.0

    @property
    def step(self) -> int:
        return self.quorum.state.step + 1
