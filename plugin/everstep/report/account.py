"""What a run's events say, folded into one account in one pass.

The report, its page, `everstep watch`, `status`, the metrics and the webhook follow a run with it. It takes events as
`everstep.run.events` reads them, roughly in order of time: those of other nodes may come late. Rank 0 and the agents
speak for a group.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.report.attempts import Attempts
from everstep.report.checking import Checking
from everstep.report.faults import Faults
from everstep.report.lineage import Commit, Lineage
from everstep.report.protection import Protection
from everstep.report.times import STATES, Lane, Session
from everstep.report.troubles import Troubles


@dataclass
class Account:
    """What the events of a run tell: where it is, and what it did."""

    groups: int = 0
    """As its start says."""
    steps: int | None = None
    """The last step, if it is known."""
    tokens: float = 0.0
    """In all commits."""
    ending: Mapping[str, Any] | None = None
    """The `run_ended` of the newest start; None while it goes."""
    taking_part: set[int] = field(default_factory=set)
    """Groups of the newest commit that have not died since."""
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    diverged: set[tuple[Any, Any]] = field(default_factory=set)
    """Step and group of each replica that an audit found to differ: every group says so."""
    sessions: list[Session] = field(default_factory=list)
    """A run that was stopped and started again in the same directory has several."""
    spent: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(STATES, 0.0)))
    """By group, its seconds in each state up to its newest event."""
    attempts: Attempts = field(default_factory=Attempts)
    checking: Checking = field(default_factory=Checking)
    protection: Protection = field(default_factory=Protection)
    troubles: Troubles = field(default_factory=Troubles)
    _lanes: dict[int, Lane] = field(default_factory=dict)
    """Of this session."""
    lineage: Lineage = field(default_factory=Lineage)
    faults: Faults = field(default_factory=Faults)
    heals: set[int] = field(default_factory=set)
    """Steps in which a group healed."""
    skipped: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By step, the slots that were left out as poison (`fault_tolerance.on_poison`)."""
    validations: dict[int, float] = field(default_factory=dict)
    """Validation loss by step; of a step that was made again, what came out last."""
    batch: int | None = None
    """Samples of a whole step."""
    give_ups: dict[str, str] = field(default_factory=dict)
    """Why groups were given up, in any session."""
    error: str | None = None
    """The newest exception of a worker: its type and first line."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """Of semi-synchronous training: what commits say of what was sent and kept."""

    def take(self, event: dict[str, Any]) -> list[str]:
        """Take note of one event; the sentences on what is wrong that are new with it."""
        kind, t = event["kind"], event["t"]
        if not self.sessions or (kind == "run_started" and self.counts["run_started"]):
            self._begin(t)
        session = self.sessions[-1]
        session.last = max(session.last, t)
        self.counts[kind] += 1
        self.checking.take(event)
        self.protection.take(event)
        self.faults.take(event)
        self.batch = event.get("global_batch_size", self.batch)
        match kind:
            case "run_started":
                self.groups, self.steps, self.ending = event["groups"], event.get("steps"), None
            case "run_ended":
                self.ending, session.ended = event, t
            case "training_started" if session.trains is None:
                session.trains = t
            case "training_done":
                session.done = t
            case "audit" if not event["agreed"]:
                self.diverged |= {(event["step"], group) for group in event["differing"]}
            case "heal":
                self.heals.add(event["step"])
            case "slot_skipped":
                self.skipped[event["step"]].add(event["slot"])
            case "validation":
                self.validations[event["step"]] = event["loss"]
            case "workers_died":
                self.error = event.get("error") or self.error
            case "agent_ended" if event["status"] == "failed":
                self.give_ups[str(event.get("group"))] = event.get("reason", "")
            case "commit" if event.get("inner_steps") and event.get("gradient_bytes"):
                names = ("step", "inner_steps", "gradient_bytes", "payload_bytes", "kept_bytes")
                self.rounds.append({name: event.get(name) or 0 for name in names})
        group = event.get("group")
        if group is not None and not event.get("rank"):
            self._of_rank_0(event, group)
        return self.troubles.take(event)

    def _begin(self, t: float) -> None:
        self._close_lanes()
        self.sessions.append(Session(t, t))
        self._lanes = {}
        self.taking_part.clear()

    def _close_lanes(self) -> None:
        for lane in self._lanes.values():
            lane.close(self.sessions[-1].end)

    def _of_rank_0(self, event: dict[str, Any], group: int) -> None:
        kind = event["kind"]
        self.attempts.take(event)
        if group not in self._lanes:
            self._lanes[group] = Lane(self.sessions[-1].begin, self.spent[group])
        self._lanes[group].take(event)
        if kind in ("workers_died", "agent_ended"):
            self.taking_part.discard(group)
        if self.lineage.take(event, len(self.sessions) - 1):
            self.tokens += event["tokens"]
            self.taking_part = set(event["groups"])

    @property
    def newest(self) -> Commit | None:
        """Its step is less than before when the run went back to an older state."""
        return self.lineage.commits[-1] if self.lineage.commits else None

    @property
    def progress_t(self) -> float:
        """Wall time in seconds of the newest commit, or of this session's begin."""
        begin = self.sessions[-1].begin if self.sessions else 0.0
        return max(begin, self.newest.t) if self.newest else begin

    @property
    def alive(self) -> set[int]:
        """Groups whose workers run."""
        return {group for group, lane in self._lanes.items() if lane.alive}

    @property
    def given_up(self) -> set[int]:
        """Groups that are not started again in this session."""
        return {group for group, lane in self._lanes.items() if lane.given_up}

    def times(self) -> dict[str, Any]:
        """Of report.json: the seconds in each state up to now, of all groups together and of each."""
        self._close_lanes()
        each = {str(group): dict(self.spent[group]) for group in sorted(self.spent)}
        totals = {f"{state.replace('-', '_')}_s": sum(times[state] for times in each.values()) for state in STATES}
        return totals | {"time_by_group": each}

    def commits_of(self, commits: Iterable[Commit]) -> list[list[Commit]]:
        """Those made in each session, each list in order of time."""
        found: list[list[Commit]] = [[] for _ in self.sessions]
        for commit in sorted(commits, key=lambda commit: commit.t):
            found[commit.session].append(commit)
        return found


def read(events: Iterable[dict[str, Any]]) -> Account:
    """The account of events in order of time, as `read_events` gives them."""
    account = Account()
    for event in events:
        account.take(event)
    return account
