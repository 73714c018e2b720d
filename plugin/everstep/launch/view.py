"""What a person sees of a run while it goes: lines, computed from the run's events and from nothing else."""

import itertools
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.launch.forking import keep_on_without_output
from everstep.report.account import Account
from everstep.report.checking import covered, wrong
from everstep.report.score import duration
from everstep.report.troubles import Fields, trouble

RATE_WINDOW = 20
"""Committed steps over which tokens/s and the time of a step are taken."""
KEPT_EVENTS = 8

OnEvents = Callable[[list[dict]], None]


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
    "fault": "fault: {fault} on group {target_group}",
    "fault_undone": "fault undone: {fault} on group {target_group}",
    "workers_protected": "group {group}: its workers' states are on storage again",
    "validation": "step {step}: validation loss {loss:.5f}",
    "slot_refused": "group {group}: slot {slot} of step {step} was refused: {reason}",
    "slot_accepted": "group {group}: {reason}",
}
"""By kind, an event as a line for people."""
RANK_0 = ("slot_skipped", "training_started", "workers_protected", "slot_refused")
"""Kinds that all ranks of a group emit, and one tells."""


def describe(event: dict) -> str:
    """One event, seen alone, as a line for people; empty for those that would only fill the screen."""
    found = trouble(event)
    return told(event) if found is None else found.sentence


def told(event: dict) -> str:
    """The same of an event as it is, whatever is degraded by it."""
    event, kind = Fields(event), event["kind"]
    if kind in RANK_0 and event.get("rank"):
        return ""
    match kind:
        case "left_out":
            return "all groups reach each other again"
        case "audit":
            return (
                "" if event["agreed"] else f"step {event['step']}: groups {event['differing']} differ; they start again"
            )
        case "finding":
            return wrong(event)
        case _:
            return LINES.get(kind, "").format_map(event)


def show_plainly(events: list[dict]) -> None:
    """Events as lines on stdout."""
    for line in filter(None, map(describe, events)):
        print(line, flush=True)


@dataclass
class RunState(Account):
    """Where a run is, and what a person is told of it."""

    starts: Counter[int] = field(default_factory=Counter)
    """By group, how often a batch system has started it."""
    left_nodes: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By group, which nodes it left, and why."""
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    _newest: float | None = None
    _commits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW + 1))

    def apply(self, event: dict) -> str:
        """Take one event in; returns its line for people, or nothing. A step is told by whoever says it
        first.
        """
        self._newest = event["t"]
        known, commits, step = self.checking.coverage, self.commits, self.step
        lines = self.take(event)
        match event["kind"]:
            case "run_started":
                self._commits.clear()
            case "agent_up":
                self.starts[event["group"]] += 1
            case "node_bad":
                self.left_nodes[event["group"]].append(f"left node {event['node']}: {event['reason']}")
        if self.checking.coverage not in (None, known):
            lines.append(f"attention: {covered(self.checking.figures())}")
        lines = lines or [line for line in [told(event)] if line]
        lines = [f"{time.strftime('%H:%M:%S', time.localtime(event['t']))} {line}" for line in lines]
        self.recent.extend(lines)
        if self.commits > commits:
            if self.step <= step:  # everybody had died: steps come again
                self._commits.clear()
            self._commits.append((event["t"], event["tokens"]))
            lines.append(self.progress())
        return "\n".join(lines)

    @property
    def ended(self) -> str:
        """How the run ended; empty while it goes."""
        return f"{self.ending['status']}, {self.ending['reason']}" if self.ending else ""

    def tokens_per_s(self) -> float | None:
        """Tokens per second over the last steps; None before the second step."""
        if len(self._commits) < 2 or self._commits[-1][0] <= self._commits[0][0]:
            return None
        tokens = sum(count for _, count in list(self._commits)[1:])
        return tokens / (self._commits[-1][0] - self._commits[0][0])

    def step_s(self) -> float | None:
        """Median seconds between the last commits; None before the second step."""
        times = [t for t, _ in self._commits]
        return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else None

    def eta_s(self) -> float | None:
        """Seconds until the last step at the mean rate of the last steps; None when that is not known."""
        if not self.steps or len(self._commits) < 2:
            return None
        rate_s = (self._commits[-1][0] - self._commits[0][0]) / (len(self._commits) - 1)
        return max(0, self.steps - self.step) * rate_s

    def elapsed_s(self, now: float | None = None) -> float | None:
        """Seconds since the run was started, up to the newest event or to `now`."""
        end = self._newest if now is None else now
        return None if not self.sessions or end is None else max(0.0, end - self.sessions[-1].begin)

    def names(self) -> str:
        """The groups that take part."""
        return " ".join(map(str, sorted(self.taking_part))) or "none"

    def progress(self) -> str:
        """One line for where the run is."""
        words = [
            f"step {self.step}{f'/{self.steps}' if self.steps else ''}",
            f"loss {_number(self.loss, '.5f')}",
            f"tokens/s {_number(self.tokens_per_s(), ',.0f')}",
            f"groups {self.names()}",
            f"{_number(self.step_s(), '.2f')} s/step",
        ]
        if self.sessions:
            words.append(f"{duration(self.elapsed_s())} elapsed")
        if (eta_s := self.eta_s()) is not None:
            words.append(f"{duration(eta_s)} left")
        if self.kills:
            words.append(f"{self.kills} kill{'s' if self.kills > 1 else ''}")
        return "  ".join(words)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def open_view(groups: int = 0) -> OnEvents:
    """Shows a run, of `groups` until it says how many it has, as lines; call it with each batch of new events.

    A reader who goes away (a closed pipe, a terminal, a full disk) ends the view, not the run.
    """
    keep_on_without_output()
    state = RunState(groups)

    def show(events: list[dict]) -> None:
        for line in filter(None, map(state.apply, events)):
            print(line, flush=True)

    return show
