"""What a person sees of a run while it goes, computed from its events."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from everstep.launch.supervisor import RunSettings


def describe(event: dict) -> str | None:
    """One event as a line for people; None for those that would only fill the screen."""
    kind, group = event["kind"], event.get("group")
    target = event.get("target_group")
    lines: dict[str, Callable[[], str]] = {
        "run_started": lambda: f"{event['groups']} groups of {event['ranks_per_group']}",
        "run_ended": lambda: f"run {event['status']}: {event['reason']}",
        "lighthouse_started": lambda: f"lighthouse at {event['address']}",
        "lighthouse_died": lambda: f"lighthouse died ({event['exitcode']}), starting again",
        "agent_died": lambda: f"agent of group {target} died ({event['exitcode']}), starting again",
        "workers_started": lambda: f"group {group}: workers started, incarnation {event['incarnation']}",
        "workers_died": lambda: f"group {group}: {event['reason']}",
        "workers_stalled": lambda: (
            f"group {group}: stalled in {event['phase']} for {event['idle_s']:.0f} s, killed"
        ),
        "agent_ended": lambda: f"group {group}: {event['status']}, {event['reason']}",
        "training_started": lambda: f"group {group}: training from step {event['step']} ({event['source']})",
        "fault": lambda: f"fault: {event['fault']} on group {target}",
        "commit": lambda: (
            f"step {event['step']}  loss {event['loss']:.5f}  groups {event['groups']}  {event['took_s']:.2f} s"
        ),
    }
    if kind not in lines or (kind == "training_started" and event.get("rank")):
        return None
    return lines[kind]()


@contextmanager
def open_view(settings: RunSettings) -> Iterator[Callable[[list[dict]], None]]:
    """Plain lines; each step once, whichever group says it first."""
    last_step = 0

    def show(events: list[dict]) -> None:
        nonlocal last_step
        for event in events:
            if event["kind"] == "commit":
                if event["step"] <= last_step:
                    continue
                last_step = event["step"]
            line = describe(event)
            if line:
                print(
                    f"{time.strftime('%H:%M:%S', time.localtime(event['t']))} {line}",
                    flush=True,
                    file=sys.stdout,
                )

    yield show
