"""The lines that a live run prints for people. They are computed from the run's events alone."""

import itertools
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.report.account import Account
from everstep.report.lineage import Commit
from everstep.report.score import checks, duration, lines_of
from everstep.report.troubles import Fields, trouble
from everstep.run.events import named

RATE_WINDOW = 20
"""Number of committed steps over which tokens/s and the time of a step are computed."""
KEPT_LINES, KEPT_COMMITS = 8, 10_000

OnEvents = Callable[[list[dict]], None]
"""A function that is called with each batch of new events."""

LINES = {
    "run_started": "{groups} groups of {ranks_per_group}, seed {seed}",
    "run_ended": "run {status}: {reason}",
    "scaled": "the run is to have {count} groups",
    "slot_skipped": "group {group}: slot {slot} of step {step} is skipped",
    "page": "the run's page: {address}",
    "warning": "{text}",
    "stopping": "stopping: workers finish their step and save; Ctrl-C again ends the run at once",
    "lighthouse_started": "lighthouse at {address}",
    "workers_started": "group {group}: workers started, incarnation {incarnation}",
    "workers_died": "group {group}: {reason}",
    "agent_ended": "group {group}: {status}, {reason}",
    "training_started": "group {group}: trains from step {step} ({source})",
    "fault": "fault: {fault}{target}",
    "fault_failed": "fault could not be done: {fault}: {reason}",
    "fault_undone": "fault undone: {fault}{target}",
    "fault_undo_failed": "fault could not be undone: {fault}{target}: {reason}",
    "workers_protected": "group {group}: its workers' states survive the loss of a host again",
    "validation": "step {step}: validation loss {loss:.5f}",
    "slot_refused": "group {group}: slot {slot} of step {step} was refused: {reason}",
    "left_out": "all groups reach each other again",  # if it names groups, it is a trouble
    "finding": "group {group} rank {rank}: layer {layer} {section}, slot {slot} of step {step}: {anomaly}, {action}",
    "slot_accepted": "group {group}: slot {slot} of step {step} is accepted: {reason}",
}
"""Kind -> template of the line for an event that begins no trouble, filled with the event's fields. Events of other
kinds have no line."""
RANK_0 = ("slot_skipped", "training_started", "workers_protected", "slot_refused", "slot_accepted")
"""Kinds that all ranks of a group emit, of which only rank 0's is shown."""


def describe(event: dict) -> str:
    """Return the line for one event: the sentence of the trouble that it begins, else its line of LINES, if any."""
    found = trouble(event)
    if found is not None:
        return found.sentence
    if event["kind"] in RANK_0 and event.get("rank"):
        return ""
    target = event.get("keeper_of", event.get("target_group"))
    groups = [target] if isinstance(target, int) else target
    fields = Fields(event | {"target": f" on {named(groups)}" if groups else ""})
    return LINES.get(event["kind"], "").format_map(fields)


def show_plainly(events: list[dict]) -> None:
    """Print the lines of events on stdout, each described by itself: an agent shows only those that its log refused."""
    for line in filter(None, map(describe, events)):
        print(line, flush=True)


@dataclass
class RunState(Account):
    """The current state of a run, updated event by event, and the lines that people see of it. It forgets all but the
    newest KEPT_COMMITS commits, as it lives in processes that last as long as the run."""

    starts: Counter[int] = field(default_factory=Counter)
    """Group id -> number of times the batch system has started the group."""
    left_nodes: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Group id -> one text for each node that the group left, with the reason."""
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    """The newest lines, without those of progress."""

    def apply(self, event: dict) -> str:
        """Update the state by one event, and return its lines, "" for none. A trouble that was told already has none.
        A new step adds a line of progress; the commits of other groups for the same step do not."""
        had_schedules, before = bool(self.current.schedules), self.newest
        lines = self.take(event)
        match event["kind"]:
            case "agent_up":
                self.starts[event["group"]] += 1
            case "node_bad":
                self.left_nodes[event["group"]].append(f"left node {event['node']}: {event['reason']}")
        if self.current.schedules and not had_schedules:
            lines.append(f"attention: {dict(lines_of(checks(self)))['attention']}")
        lines = lines or ([describe(event)] if trouble(event) is None else [])
        lines = [f"{_clock(event['t'])} {line}" for line in lines if line]
        self.recent.extend(lines)
        if self.newest is not before:
            lines.append(self.progress())
            while len(self.lineage.commits) > KEPT_COMMITS:
                self.rounds.pop(self.lineage.commits[0].history, None)
                del self.lineage.by_history[self.lineage.commits.pop(0).history]
            del self.current.commits[:-KEPT_COMMITS]
        return "\n".join(lines)

    def show(self, events: list[dict]) -> None:
        """Update the state by `events`, and print their lines."""
        for line in filter(None, map(self.apply, events)):
            print(line, flush=True)

    def recent_commits(self) -> list[Commit]:
        """Return the last RATE_WINDOW + 1 commits of this session, or fewer: if the run went back to an older step
        meanwhile, as after the death of all groups, only those since."""
        commits = self.current.commits[-RATE_WINDOW - 1 :]
        back = [place for place, (a, b) in enumerate(itertools.pairwise(commits), start=1) if b.step <= a.step]
        return commits[back[-1] if back else 0 :]

    def group_ids(self) -> str:
        """Return the ids of the groups that take part, as text."""
        return " ".join(map(str, sorted(self.taking_part))) or "none"

    def progress(self) -> str:
        """Return the line of progress: step, loss, speed over `recent_commits`, groups, times and kills."""
        newest, commits = self.newest, self.recent_commits()
        step = newest.step if newest else 0
        took_s = commits[-1].t - commits[0].t if commits else 0.0
        rate = sum(one.tokens for one in commits[1:]) / took_s if took_s > 0 else None
        step_s = statistics.median(b.t - a.t for a, b in itertools.pairwise(commits)) if len(commits) > 1 else None
        words = [
            f"step {step}{f'/{self.steps}' if self.steps else ''}",
            f"loss {_number(newest.loss if newest else None, '.5f')}",
            f"tokens/s {_number(rate, ',.0f')}",
            f"groups {self.group_ids()}",
            f"{_number(step_s, '.2f')} s/step",
        ]
        if self.sessions:
            words.append(f"{duration(self.sessions[-1].wall_s)} elapsed")
        if self.steps and len(commits) > 1:
            words.append(f"{duration(max(0, self.steps - step) * took_s / (len(commits) - 1))} left")
        if self.faults.kills:
            words.append(f"{self.faults.kills} kill{'s' if self.faults.kills > 1 else ''}")
        return "  ".join(words)


def _clock(t: float) -> str:
    """Return a wall time as text, with its date unless that is today's."""
    then, today = time.localtime(t), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == today[:3] else "%Y-%m-%d %H:%M:%S", then)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
