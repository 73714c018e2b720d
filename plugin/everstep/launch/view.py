"""What a person sees of a run while it goes: a live panel on a terminal, plain lines elsewhere.

Both are computed from the run's events and from nothing else.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

RATE_WINDOW = 20
"""Committed steps over which tokens/s are averaged."""
KEPT_EVENTS = 8
REFRESH_S = 0.2

OnEvents = Callable[[list[dict]], None]


def describe(event: dict) -> str:
    """One event as a line for people; empty for those that would only fill the screen."""
    event = defaultdict(lambda: "?", event)  # a field that its kind need not have
    kind, group, target = event["kind"], event.get("group"), event.get("target_group")
    match kind:
        case "run_started":
            return f"{event['groups']} groups of {event['ranks_per_group']}, seed {event['seed']}"
        case "run_ended":
            return f"run {event['status']}: {event['reason']}"
        case "stopping":
            return "stopping: workers finish their step and save; Ctrl-C again ends the run at once"
        case "lighthouse_started":
            return f"lighthouse at {event['address']}"
        case "lighthouse_died":
            return f"lighthouse died ({event['exitcode']}), starting again"
        case "agent_died":
            return f"agent of group {target} died ({event['exitcode']}), starting again"
        case "workers_started":
            return f"group {group}: workers started, incarnation {event['incarnation']}"
        case "workers_died":
            return f"group {group}: {event['reason']}"
        case "workers_stalled":
            return f"group {group}: no progress in {event['phase']} for {event['idle_s']:.0f} s"
        case "agent_ended":
            return f"group {group}: {event['status']}, {event['reason']}"
        case "training_started" if not event.get("rank"):
            return f"group {group}: trains from step {event['step']} ({event['source']})"
        case "fault":
            return f"fault: {event['fault']} on group {target}"
        case "fault_undone":
            return f"fault undone: {event.get('fault', '')} on group {target}"
        case "audit" if not event.get("agreed", True):
            return f"step {event['step']}: groups {event['differing']} differ and heal"
        case "finding" if not event.get("rank"):
            return f"group {group}: finding {event.get('outcome', '')}"
        case _:
            return ""


@dataclass
class RunState:
    """Where a run is, from the events so far."""

    groups: int
    steps: int | None = None
    """The last step, when it is known."""
    step: int = 0
    loss: float | None = None
    taking_part: set[int] = field(default_factory=set)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    _commits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW + 1))

    def apply(self, event: dict) -> str:
        """Take one event in; returns its line for people, or nothing. A step is told by whoever says it
        first.
        """
        if event["kind"] == "run_started":
            self.steps = event.get("steps")
        if event["kind"] in ("workers_died", "agent_ended"):
            self.taking_part.discard(event["group"])
        if event["kind"] == "training_started" and event["source"] != "peer" and event["step"] <= self.step:
            self.step = event["step"] - 1  # everybody had died: the steps after this come again
            self._commits.clear()
        if event["kind"] == "commit":
            if event["step"] <= self.step:
                return ""
            self.step, self.loss = event["step"], event.get("loss")
            self.taking_part = set(event["groups"])
            self._commits.append((event["t"], event.get("tokens") or 0.0))
            return self._step_line()
        line = describe(event)
        if line:
            line = f"{time.strftime('%H:%M:%S', time.localtime(event['t']))} {line}"
            self.recent.append(line)
        return line

    def tokens_per_s(self) -> float | None:
        """Tokens per second over the last steps; None before the second step."""
        if len(self._commits) < 2 or self._commits[-1][0] <= self._commits[0][0]:
            return None
        tokens = sum(count for _, count in list(self._commits)[1:])
        return tokens / (self._commits[-1][0] - self._commits[0][0])

    def _step_line(self) -> str:
        rate = self.tokens_per_s()
        return (
            f"step {self.step}{f'/{self.steps}' if self.steps else ''}  loss {_number(self.loss, '.5f')}"
            f"  tokens/s {_number(rate, ',.0f')}  groups {_names(self.taking_part)}"
        )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _names(groups: set[int]) -> str:
    return " ".join(map(str, sorted(groups))) or "none"


def panel(state: RunState) -> Group:
    """The live panel."""
    facts = Table.grid(padding=(0, 3))
    facts.add_row(
        f"step [bold]{state.step}[/]" + (f" / {state.steps}" if state.steps else ""),
        f"loss [bold]{_number(state.loss, '.5f')}[/]",
        f"tokens/s [bold]{_number(state.tokens_per_s(), ',.0f')}[/]",
        "groups "
        + " ".join(
            f"[green]{group}[/]" if group in state.taking_part else f"[dim]{group}[/]"
            for group in sorted(set(range(state.groups)) | state.taking_part)
        ),
    )
    bar = ProgressBar(total=state.steps or 1, completed=state.step if state.steps else 0, width=60)
    return Group(facts, bar, *(Text(line, style="dim", no_wrap=True) for line in state.recent))


@contextmanager
def open_view(groups: int, console: Console | None = None) -> Iterator[OnEvents]:
    """Shows a run; call what it gives with each batch of new events, and with an empty one now and then."""
    console = console or Console()
    state = RunState(groups)
    if not console.is_terminal:

        def print_lines(events: list[dict]) -> None:
            for line in filter(None, map(state.apply, events)):
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield print_lines
        return

    last = 0.0
    # Drawn by us between two ticks: a thread of rich's own would have the supervisor fork with two.
    with Live(panel(state), console=console, auto_refresh=False) as live:

        def draw(events: list[dict]) -> None:
            nonlocal last
            for event in events:
                state.apply(event)
            if time.monotonic() - last > REFRESH_S or any(event["kind"] == "run_ended" for event in events):
                last = time.monotonic()
                live.update(panel(state), refresh=True)

        yield draw
