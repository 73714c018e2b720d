"""What a run's events say, folded into one account in one pass.

`Now` is what holds at this moment: its size does not grow with the run, so `everstep watch`, `status`, the metrics and
the webhook follow a run with it. `Account` keeps beside that what a report needs. Both take any event of any rank, in
order of time; rank 0 speaks for its group.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.report.attempts import Attempts
from everstep.report.checking import Checking
from everstep.report.faults import Faults
from everstep.report.lineage import Commit, Lineage
from everstep.report.protection import Protection
from everstep.report.times import Lane, Session, Stretch
from everstep.report.troubles import Troubles

LATE = 4096
"""Commits that are remembered to know them again: the files of groups on other nodes may be seen late."""


@dataclass
class Now:
    """Where a run is."""

    groups: int = 0
    """As its start says."""
    steps: int | None = None
    """The last step, if it is known."""
    step: int = 0
    """Of the newest commit: less than before when the run went back to an older state."""
    loss: float | None = None
    grad_norm: float | None = None
    commits: int = 0
    tokens: float = 0.0
    """In all commits."""
    progress_t: float = 0.0
    """Wall time in seconds of the newest commit, or of this session's begin."""
    ending: Mapping[str, Any] | None = None
    """The `run_ended` of the newest start; None while it goes."""
    taking_part: set[int] = field(default_factory=set)
    """Groups of the newest commit that have not died since."""
    alive: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    kills: int = 0
    diverged: set[tuple[Any, Any]] = field(default_factory=set)
    """Step and group of each replica that an audit found to differ: every group says so."""
    seconds: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    """What groups did with their time, by group and state."""
    attempts: Attempts = field(default_factory=Attempts)
    checking: Checking = field(default_factory=Checking)
    protection: Protection = field(default_factory=Protection)
    troubles: Troubles = field(default_factory=Troubles)
    lanes: dict[int, Lane] = field(default_factory=dict)
    """Of this session."""
    begin: float | None = None
    """Wall time in seconds at which this session began."""
    _known: dict[Hashable, None] = field(default_factory=dict)
    """The histories of the newest commits."""

    def take(self, event: dict[str, Any]) -> list[str]:
        """Take note of one event; the sentences on what is wrong that are new with it."""
        kind = event["kind"]
        if self.begin is None or (kind == "run_started" and self.counts["run_started"]):
            self._begin(event["t"])
        self.counts[kind] += 1
        self.checking.take(event)
        self.protection.take(event)
        match kind:
            case "run_started":
                self.groups, self.steps, self.ending = event["groups"], event.get("steps"), None
                self.progress_t = event["t"]
            case "run_ended":
                self.ending = event
            case "fault":
                self.kills += event["fault"].startswith("kill")
            case "audit" if not event["agreed"]:
                self.diverged |= {(event["step"], group) for group in event["differing"]}
        group = event.get("group")
        if group is not None and not event.get("rank"):
            self._of_rank_0(event, group)
        return self.troubles.take(event)

    def _begin(self, t: float) -> None:
        """A session begins: a run that was stopped and started again in the same directory has several."""
        self.begin = self.progress_t = t
        self.lanes = {}
        for known in (self.alive, self.given_up, self.taking_part):
            known.clear()

    def _of_rank_0(self, event: dict[str, Any], group: int) -> None:
        kind = event["kind"]
        self.attempts.take(event)
        if group not in self.lanes:
            self.lanes[group] = Lane(self.begin or 0.0)
        for part in self.lanes[group].take(event):
            self._spent(group, part)
        match kind:
            case "worker_ready":
                self.alive.add(group)
                self.given_up.discard(group)
            case "workers_died" | "left" | "training_done" | "agent_ended":
                self.alive.discard(group)
                if kind in ("workers_died", "agent_ended"):
                    self.taking_part.discard(group)
                if event.get("status") == "failed":
                    self.given_up.add(group)
            case "commit" if event["history"] not in self._known:
                self._known[event["history"]] = None
                if len(self._known) > LATE:
                    del self._known[next(iter(self._known))]
                self._new_commit(event)

    def _spent(self, group: int, part: Stretch) -> None:
        self.seconds[group, part.state] += part.end - part.begin

    def _new_commit(self, event: dict[str, Any]) -> None:
        """The first that is heard of a commit. A step that is made again is another commit."""
        self.step, self.loss, self.grad_norm = event["step"], event["loss"], event.get("grad_norm")
        self.commits += 1
        self.tokens += event["tokens"]
        self.progress_t, self.taking_part = event["t"], set(event["groups"])


@dataclass
class Account(Now):
    """All that the events of a run tell."""

    sessions: list[Session] = field(default_factory=list)
    lineage: Lineage = field(default_factory=Lineage)
    faults: Faults = field(default_factory=Faults)
    stretches: dict[int, list[Stretch]] = field(default_factory=dict)
    """By group, what it is known to have done, in order."""
    heals: set[int] = field(default_factory=set)
    """Steps in which a group healed."""
    skipped: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By step, the slots that were left out as poison (`fault_tolerance.on_poison`)."""
    validations: dict[int, float] = field(default_factory=dict)
    """Validation loss by step; of a step that was made again, what came out last."""
    batch: int | None = None
    """Samples of a whole step."""
    ranks: int | None = None
    give_ups: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    """The newest exception of a worker: its type and first line."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """Of semi-synchronous training: what commits say of what was sent and kept."""

    def take(self, event: dict[str, Any]) -> list[str]:
        new, group, kind, t = super().take(event), event.get("group"), event["kind"], event["t"]
        session = self.sessions[-1]
        session.last = max(session.last, t)
        self.faults.take(event)
        match kind:
            case "run_started" | "training_started":
                self.batch = event.get("global_batch_size", self.batch)
                self.ranks = event.get("ranks", event.get("ranks_per_group", self.ranks))
                if kind == "training_started" and session.trains is None:
                    session.trains = t
            case "run_ended":
                session.ended = t
            case "training_done":
                session.done = t
            case "heal":
                self.heals.add(event["step"])
            case "slot_skipped":
                self.skipped[event["step"]].add(event["slot"])
            case "validation":
                self.validations[event["step"]] = event["loss"]
            case "workers_died":
                self.error = event.get("error") or self.error
            case "agent_ended" if event["status"] == "failed":
                self.give_ups[str(group)] = event["reason"]
            case "commit" if event.get("inner_steps") and event.get("gradient_bytes"):
                names = ("step", "inner_steps", "gradient_bytes", "payload_bytes", "kept_bytes")
                self.rounds.append({name: event.get(name) or 0 for name in names})
        return new

    def _of_rank_0(self, event: dict[str, Any], group: int) -> None:
        super()._of_rank_0(event, group)
        self.lineage.take(event, len(self.sessions) - 1)

    def _begin(self, t: float) -> None:
        self.stretches = self.filled()
        super()._begin(t)
        self.sessions.append(Session(t, t))

    def _spent(self, group: int, part: Stretch) -> None:
        super()._spent(group, part)
        self.stretches.setdefault(group, []).append(part)

    def filled(self) -> dict[int, list[Stretch]]:
        """`stretches` up to the session's end: a group that is down by then, and that nobody has ended, is away."""
        found = {group: [*parts] for group, parts in sorted(self.stretches.items())}
        for group, lane in self.lanes.items():
            found.setdefault(group, []).extend(lane.rest(self.sessions[-1].end))
        return found

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
