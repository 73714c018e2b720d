"""The account of a run: what its events say, folded in one pass.

The report, its page, `everstep watch`, `everstep status`, the metrics and the webhook all read the account. It takes
events as `everstep.run.events` reads them, roughly in order of time: events of other nodes may come late. Only a
group's rank 0 and its agents speak for the group.
"""

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.report.attempts import Attempts
from everstep.report.faults import Faults
from everstep.report.groups import ENDS, STATES, Group, Session
from everstep.report.lineage import Commit, Lineage
from everstep.report.protection import Protection
from everstep.report.troubles import Troubles


@dataclass
class Account:
    """What the events of a run say: where the run is, and what it did."""

    steps: int | None = None
    """Number of the run's last step, if it is known."""
    begin: int | None = None
    """The lowest step from which a start trained, not counting groups that copied another's state. It is above 1 if the
    run began with a checkpoint of another run; None if no event says."""
    taking_part: set[int] = field(default_factory=set)
    """Groups of the newest commit that have not died since."""
    counts: Counter[str] = field(default_factory=Counter)
    """Kind of event -> number of events; `findings_` and an action of the attention check -> number of findings."""
    distinct: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))
    """Kind of event -> (step, slot) pairs; of `audit`, (step, differing group). Several groups can report one pair."""
    sessions: list[Session] = field(default_factory=list)
    """Starts of the run, in order. A run that was stopped and started again in the same directory has several."""
    spent: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: dict.fromkeys(STATES, 0.0)))
    """Group id -> state -> seconds in that state, up to the group's newest event."""
    attempts: Attempts = field(default_factory=Attempts)
    protection: Protection = field(default_factory=Protection)
    troubles: Troubles = field(default_factory=Troubles)
    lineage: Lineage = field(default_factory=Lineage)
    faults: Faults = field(default_factory=Faults)
    validations: dict[int, float] = field(default_factory=dict)
    """Step -> validation loss; if the step was made again, the newest one."""
    batch: int | None = None
    """Samples in a whole step (global batch size), if known."""
    rounds: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Semi-synchronous training: history of a commit -> the bytes that a rank sent and that all ranks kept."""

    def take(self, event: dict[str, Any]) -> list[str]:
        """Process one event. Return the sentences of troubles that are new with it."""
        kind, t = event["kind"], event["t"]
        match kind:
            case "run_started":
                again = self.counts[kind] > 0
            case "agent_up":  # there is no supervisor
                again = self.current.supervised or self.status != "running"
            case _:  # torchrun starts no agent either
                again = kind == "worker_ready" and self.current.ending is not None
        if again or not self.sessions:
            self._begin(t)
        session = self.sessions[-1]
        if session.supervised or event.get("group") is not None:  # on Slurm others speak also while no group runs
            session.last = max(session.last, t)
        self.counts[kind] += 1
        self.protection.take(event)
        self.faults.take(event, session)
        self.batch = event.get("global_batch_size", self.batch)
        self.steps = event.get("steps") or self.steps
        session.nominal = session.nominal or event.get("nominal_groups", 0)
        match kind:
            case "run_started":
                session.nominal, session.ending, session.supervised = event["groups"], None, True
            case "scaled":
                session.scales.append((t, event["count"]))
            case "run_ended":
                session.ending = event
            case "training_started":
                session.trains = t if session.trains is None else session.trains
                if event["source"] != "peer":
                    self.begin = min(event["step"], self.begin or event["step"])
            case "training_done":
                session.done, session.finished = t, max(session.finished, event["step"] or 0)
            case "audit":
                self.distinct[kind] |= {(event["step"], group) for group in event["differing"]}
            case "slot_skipped" | "slot_accepted" | "not_finite":
                self.distinct[kind].add((event["step"], event["slot"]))
            case "finding":
                self.counts[f"findings_{event['action']}"] += 1
            case "attention_schedule":
                session.schedules[event["group"], event.get("rank") or 0] = event
            case "validation":
                self.validations[event["step"]] = event["loss"]
            case "commit" if event.get("inner_steps") and event.get("gradient_bytes"):
                sent = {name: event.get(name) or 0 for name in ("inner_steps", "gradient_bytes", "payload_bytes")}
                one = self.rounds.setdefault(event["history"], {"kept_bytes": 0, **sent})
                one["kept_bytes"] += event.get("kept_bytes") or 0
        group = event.get("group")
        follows = self._of_rank_0(event, group) if group is not None and not event.get("rank") else {}
        told = self.troubles.take(event)
        return told + self.troubles.take({**event, **follows}) if follows else told

    def _begin(self, t: float) -> None:
        self.current.close()
        self.sessions.append(Session(t, t))
        self.taking_part.clear()
        self.troubles, self.protection = Troubles(), Protection()

    def _of_rank_0(self, event: dict[str, Any], number: int) -> Mapping[str, Any]:
        """Process an event that speaks for a group. Return the `data_ended`, `events_missing` or `clocks`
        event that follows, or {}."""
        session = self.sessions[-1]
        if number not in session.groups:
            joins = 0 < session.nominal <= number
            session.groups[number] = Group(event["t"] if joins else session.begin, self.spent[number])
        group = session.groups[number]
        group.take(event)
        match event["kind"]:
            case "workers_died":
                self.taking_part.discard(number)
            case "agent_ended" if event["status"] == "done" and session.trains is not None:  # else the run was over
                if self.protection.committed < (steps := self.steps or 0):
                    kind = "data_ended" if 0 <= session.finished < steps else "events_missing"
                    step = session.finished if kind == "data_ended" else self.protection.committed
                    made = next((one["inner_steps"] for one in reversed(self.rounds.values())), 1)  # steps of a commit
                    return {"kind": kind, "step": made * step, "steps_asked": made * steps}
            case "attempt":
                self.attempts.add(event, group)
            case "commit":
                before = self.newest
                commit = self.lineage.add(event, group.history)
                commit.continued |= group.committed
                group.history, group.committed = commit.history, True
                if self.newest is not before:
                    self._made(commit, before, session)
                apart = commit.apart()
                return {} if session.supervised else apart  # one machine has one clock, though it may have been set
        return {}

    def _made(self, commit: Commit, before: Commit | None, session: Session) -> None:
        """Process the first report of a commit. `before`: the commit that was the newest until now."""
        for number, group in session.groups.items():
            if before is not None and number in before.groups and number not in commit.groups:
                group.lose(commit.t, before.t)
        for number in commit.taking_part & session.groups.keys():
            session.groups[number].take_part(commit.t)
        if commit.step <= self.protection.step:  # the run went back behind it, so that snapshot is lost
            self.protection.step, self.protection.committed = 0, commit.step
        session.done = None
        insort(session.commits, commit, key=lambda one: one.t)
        self.taking_part = set(commit.groups)

    @property
    def status(self) -> str:
        """One of ENDS, or `running`. If a supervisor wrote `run_started`, its `run_ended` has the status; if it was
        killed before that, the run stays `running`. Without a supervisor the run is over when a group is done, or when
        all groups of the newest commit (before the first commit: all known groups) have ended."""
        session = self.current
        if session.ending is not None or session.supervised:
            return session.ending["status"] if session.ending else "running"
        trained = session.commits[-1].groups if session.commits else session.groups.keys()
        said = {session.groups[group].end for group in trained if group in session.groups}
        over = "done" in said or said <= {*ENDS}
        return next((end for end in ENDS if over and end in said), "running")

    @property
    def newest(self) -> Commit | None:
        """The newest commit. Its step is lower than that of the one before if the run went back to an older state."""
        return self.lineage.commits[-1] if self.lineage.commits else None

    @property
    def current(self) -> Session:
        """The newest session; an empty one before the first event."""
        return self.sessions[-1] if self.sessions else Session(0.0, 0.0)


def read(events: Iterable[dict[str, Any]]) -> Account:
    """Return the account of events that come in order of time, as from `read_events`."""
    account = Account()
    for event in events:
        account.take(event)
    return account
