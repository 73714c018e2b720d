"""`everstep watch`: show any run from its events while it goes."""

import time
from pathlib import Path

import tyro

from everstep.run.directory import require_events

POLL_S = 0.25


def watch(run_dir: tyro.conf.Positional[Path]) -> int:
    """Watch a run, on this machine or on a cluster: what happened last, then a line for each step and each other event.
    Ends when the run ends. Ctrl-C ends only the view. Exit status: 1 if the run failed, else 0.

    Args:
        run_dir: The run directory.
    """
    from everstep.launch.view import open_view
    from everstep.run.event_fields import OF_EVERY_STEP
    from everstep.run.events import EventTail

    require_events(run_dir)
    tail, view = EventTail(run_dir), open_view()
    for event in tail.past(lately=OF_EVERY_STEP):
        view.apply(event)
    print(*view.recent, view.progress(), sep="\n", flush=True)
    while True:
        view.show(tail.new())
        if view.status != "running":
            return int(view.status == "failed")
        time.sleep(POLL_S)
