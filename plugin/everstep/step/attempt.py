"""Values that the parts of an attempt pass to each other."""

import enum
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from everstep.quorum.heal import Fetch, StateServer
from everstep.quorum.membership import Membership
from everstep.quorum.process_group import RankColumn
from everstep.quorum.ranks import GroupRanks
from everstep.quorum.request import Quorum, State
from everstep.run.events import EventLog
from everstep.run.memory import room_for
from everstep.step import ledger
from everstep.step.interfaces import Clock, Commit, RunFiles, Timeouts
from everstep.step.reduction import GradientReducer


@dataclass(frozen=True, slots=True)
class Group:
    """One start of a replica group, as one of its ranks knows it.

    Attributes:
        id: group id.
        life: name of this start: another one after every restart, the same on all ranks.
        store: `host:port` of a TCPStore of this group that other groups can connect to.
        ranks: collectives between the ranks of the group.
        membership: rank 0's connection to the lighthouse; None on the other ranks.
        sums: collectives between the ranks of this rank column.
        state_server: serves this rank's state to joiners, and fetches another group's.
    """

    id: int
    life: str
    store: str
    ranks: GroupRanks
    membership: Membership | None
    sums: RankColumn
    state_server: StateServer


@dataclass(frozen=True, slots=True)
class Host:
    """Clock, run directory and event log of a rank."""

    clock: Clock
    files: RunFiles
    events: EventLog


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of the protocol. All but the timeouts must be equal on all groups of a run.

    Attributes:
        slots: S.
        dealing: see `ledger.Dealing`.
        timeouts: timeouts of the protocol.
        audit_slots, seed: see `ledger.audited_slots`.
        more: `name = value` of what else must be equal on all groups, such as how parameters are sharded over ranks.
    """

    slots: int
    dealing: ledger.Dealing
    timeouts: Timeouts
    audit_slots: float = 0.0
    seed: int = 0
    more: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """`name = value` of each setting that must be equal on all groups, as it decides what is computed and summed.
        Timeouts may differ."""
        dealt = replace(self.dealing, groups=self.dealing.groups if self.dealing.spares else 0)
        named = asdict(dealt) | {"slots": self.slots, "audit_slots": self.audit_slots, "seed": self.seed}
        return (*(f"{name} = {value}" for name, value in named.items()), *self.more)


class Outcome(enum.Enum):
    """Outcome of an attempt without a commit to apply, or of a run; the same on all ranks of the group."""

    RETRY = "the step is tried again"
    CAUGHT_UP = "this group has taken over a state"
    FOLLOWED = "the others committed a step, which this group will apply when it has the state before it"
    LEFT = "this group was asked to leave, and there is no step to wait for"
    FENCED = "another start of this group has replaced this one"
    OUT_OF_DATA = "the data ended before this step"
    OVER = "no more steps are made on this group's state"
    TOO_LATE = "the run ended, with a later state than this group's"


class Beginning(NamedTuple):
    """What one rank tells the others of its group when an attempt begins. `ending`: see `Asker.ending`. `heal_failed`:
    why healing failed, or empty. `slot_us`: see `ledger.Row`."""

    step: int
    history: int
    ending: str
    asked_to_leave: bool
    gives_up: bool
    lost_peers: bool
    state_is_here: bool
    heal_failed: str
    slot_us: int


@dataclass(slots=True)
class Healing:
    """A state that is being fetched from the groups `sources`, and the commits made since that state, without those
    that are applied. `loaded`: whether this group has taken over the state. `failed`: why a commit was not kept."""

    sources: tuple[int, ...]
    state: State
    fetch: Fetch
    commits: list[tuple[Commit, Any]] = field(default_factory=list)
    loaded: bool = False
    failed: str = ""

    def keep(self, commit: Commit, reducer: GradientReducer) -> None:
        """Keep a commit with a copy of its summed gradients. If there is no host memory for that, healing has failed;
        also if no source has answered yet, as by now all have another state."""
        with room_for(reducer.nbytes) as has_room:
            if not has_room:
                self.failed = "this host has no memory for the sums of another step"
            elif not self.fetch.is_answered:
                self.failed = "no source had answered when the next step was committed"
            else:
                self.commits.append((commit, reducer.stash()))

    @property
    def error(self) -> str:
        """Why healing has failed for good; empty if it has not."""
        return self.fetch.error or self.failed

    @property
    def follows(self) -> State:
        """The state that this group will have once it has caught up."""
        return State(self.commits[-1][0].step, self.commits[-1][0].history) if self.commits else self.state


@dataclass(slots=True)
class Attempt:
    """What is known of an attempt so far."""

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
    """Whether a rank wants a new quorum before the next step."""
    compute_s: float = 0.0
    reduce_s: float = 0.0

    @property
    def step(self) -> int:
        return self.quorum.state.step + 1
