"""report.html: one file that shows what a run did and what its faults cost, for a browser, without a network.

    python -m everstep.report.page RUN_DIR TELLING

is the process that tells of a run while it goes (`everstep.report.live`): it writes the page again and again.
"""

import json
import os
import re
import select
import socket
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2

from everstep import __version__
from everstep.report import series
from everstep.report.checking import ACTIONS, covered, judged
from everstep.report.score import (
    READ,
    Measured,
    counted,
    load_events,
    loss_delta,
    measure,
    reduced,
    uncollected,
    verdict,
)
from everstep.report.sessions import stated
from everstep.report.times import STATES
from everstep.report.troubles import Troubles
from everstep.run.events import EventTail
from everstep.run.files import LARGEST, write_whole
from everstep.run.regular import read_regular

MOST_FAILURES = 6
PAUSE_S, FIRST_PAUSE_S, POLL_S = 2.0, 0.5, 0.5
SHARE = 0.5
"""Of one core that writing the page again and again may take, below all other processes."""
NICENESS = 10
RELOAD_MS = 2500
"""How often the page of a run that goes on is loaded again, unless somebody points at a curve."""
LARGEST_PAGE = 256 << 20
NO_PAGE_YET = b'<!doctype html><meta http-equiv="refresh" content="1"><p>The page is being made.'
SECRET = re.compile(r"^\s*notify\s*=.*$", re.MULTILINE)
"""The line of a config with the address of a webhook."""
COLOURS = {
    "productive": "#009e73",
    "recomputed": "#f0e442",
    "stalled": "#d55e00",
    "healing": "#cc79a7",
    "start-up": "#9d7bd8",
    "restarting": "#56b4e9",
    "waiting": "#8a94a3",
    "lost": "#a83232",
    "idle": "#c9ced6",
}
"""Of states and causes, told apart by every kind of colour blindness: Okabe and Ito, Color Universal Design (2008)."""


def write_page(run_dir: Path, against: Path | None = None) -> Path:
    """Write RUN_DIR/report.html and report.json; the page's path. The page of a run that goes on loads itself again.

    against: the directory of another run of the same config, drawn beneath this one's curves, its figures beside this
    one's. Raises FileNotFoundError when a directory holds no event log.
    """
    return _write(run_dir, load_events(run_dir), against)


def _write(
    run_dir: Path, events: list[dict[str, Any]], against: Path | None = None, troubles: Troubles | None = None
) -> Path:
    """`troubles`: what follows from the events, if it was followed already."""
    as_of = time.time()
    found = measure(events)
    other = measure(load_events(against)) if against is not None else None
    figures = found.figures | loss_delta(found.losses, other.losses if other is not None else {})
    if troubles is None:
        troubles = Troubles()
        for event in events:
            troubles.take(event)
    drawn = {
        "states": STATES,
        "colours": COLOURS,
        "curves": series.curves(found.final, found.validations),
        "other": series.curves(other.final, {}) if other is not None else {},
        "faults": sorted({(row["step"], row["fault"]) for row in found.rows if row["step"] is not None}),
        "lanes": series.lanes(found.stretches),
    }
    environment = jinja2.Environment(loader=jinja2.PackageLoader("everstep.report"), autoescape=True)
    environment.filters["duration"] = duration
    text = environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        facts=_facts(run_dir, found),
        troubles=troubles.sentences,
        checked=covered(figures),
        judged=judged(figures),
        doubts=list(found.checking.doubts)[-MOST_FAILURES:],
        actions=ACTIONS,
        as_of=as_of,
        reload_ms=RELOAD_MS,
        colours=COLOURS,
        states=STATES,
        percent=percent,
        clock=clock,
        figures=figures,
        other=other.figures if other is not None else {},
        broken=verdict(figures, may_stop=True),
        drawn=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        curves=[name for name in drawn["curves"] if name != "validation"],
        rows=_fault_table(run_dir, found),
        config=SECRET.sub('notify = "…"', _text_of(run_dir / "config.toml")),
        version=__version__,
        compared=against.resolve().name if against is not None else "",
    )
    page = run_dir / "report.html"
    write_whole(page, text.encode())
    write_whole(run_dir / "report.json", json.dumps(figures, indent=2).encode() + b"\n")
    return page


def percent(share: float | None) -> str:
    """A share for a reader: 87 %."""
    return "\N{EN DASH}" if share is None else f"{100 * share:.0f} %" if share < 0.9995 else "100 %"


def duration(seconds: float | None) -> str:
    """Seconds for a reader: 1.42 s, 29 min, 3.4 h, 12.0 d."""
    if seconds is None:
        return "\N{EN DASH}"
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def clock(t: float) -> str:
    """A wall time in this machine's zone: 2026-01-31 12:00:05."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _facts(run_dir: Path, found: Measured) -> dict[str, str]:
    """What was run: model, groups, ranks, tokens, when it began."""
    figures, facts = found.figures, {}
    try:
        job = tomllib.loads(_text_of(run_dir / "config.toml")).get("job", {})
    except tomllib.TOMLDecodeError:
        job = {}
    named = [str(job[key]) for key in ("module", "config", "flavor") if job.get(key)]
    if named:
        facts["model"] = " ".join(named)
    ranks = stated(found.events, "ranks", "training_started") or stated(found.events, "ranks_per_group", "run_started")
    if figures["groups"] is not None:
        facts["groups"] = f"{figures['groups']}" + (f" of {counted(ranks, 'rank')}" if ranks else "")
    if figures["tokens"] is not None:
        facts["tokens"] = f"{figures['tokens']:,.0f}"
    if figures["tokens_per_s"] is not None:
        facts["tokens/s"] = f"{figures['tokens_per_s']:,.0f}"
    if found.validations:
        last = max(found.validations)
        facts["validation loss"] = f"{found.validations[last]:.4f} (step {last})"
    if found.events:
        facts["started"] = clock(found.events[0]["t"])
    if figures["snapshots"]:
        facts["snapshots"] = figures["snapshots"]
    return facts


def _fault_table(run_dir: Path, found: Measured) -> list[dict[str, Any]]:
    """The faults, with a link to the hit group's log."""
    rows = []
    for row in found.rows:
        log = f"logs/group-{row['group']}/rank-0.log"
        rows.append(row | {"link": log if (run_dir / log).exists() else ""})
    return rows


def _text_of(path: Path) -> str:
    """A file of the run directory; "" for none, and for what is no file: a link could be to anything."""
    try:
        return read_regular(path, LARGEST).decode(errors="replace")
    except OSError:
        return ""


# While the run goes


def tell(run_dir: Path, what: dict[str, Any]) -> None:
    """Tell of a run as `live.Telling` (here as JSON, with the sockets' `fds`) asks for, until stdin ends, and then once
    more. Events are read once; for the page those that it needs are kept."""
    from everstep.report.curves import Curves, open_sinks
    from everstep.report.metrics import Metrics
    from everstep.report.notify import Notifier
    from everstep.report.serve import Server

    os.nice(NICENESS)
    metrics = Metrics(what["groups"], what["min_groups"])
    curves = Curves(run_dir, open_sinks(run_dir, what))
    notifier = Notifier(_webhook(run_dir), run_dir.resolve().name) if what["notify"] else None
    kinds: dict[str, Callable[[], tuple[str, bytes]]] = {
        "page": lambda: ("text/html; charset=utf-8", served_page(run_dir)),
        "metrics": lambda: ("text/plain; version=0.0.4; charset=utf-8", metrics.text()),
    }
    for name, fd in what["fds"].items():
        Server(socket.socket(fileno=fd), dict.fromkeys(("/", f"/{name}", "/report.html"), kinds[name]))
    events: list[dict[str, Any]] = []
    unwritten: list[dict[str, Any]] = []
    tail, over, due = EventTail(run_dir), False, time.monotonic()
    while not over:
        over = bool(select.select([0], [], [], POLL_S if events else FIRST_PAUSE_S)[0])
        new = [*tail.new(), *unwritten]
        unwritten = []
        metrics.follow(new)
        if notifier is not None:
            notifier.follow(new)
        try:
            curves.follow(new)
            if what["page"]:
                events += [reduced(event) for event in new if event["kind"] in READ]
                if over or (events and time.monotonic() >= due):
                    began = time.process_time()
                    events.sort(key=lambda event: event["t"])  # a log on another node may be seen late
                    with uncollected():
                        _write(run_dir, events, troubles=metrics.troubles)
                    due = time.monotonic() + max(PAUSE_S, (time.process_time() - began) / SHARE)
        except OSError as error:  # a full disk
            unwritten = [_shortage(run_dir, error)]
            print(f"everstep: what is told of the run is not written: {error}", flush=True)
    curves.close()
    if notifier is not None:
        notifier.close()


def _webhook(run_dir: Path) -> str:
    """Its address, as the config says."""
    return str(tomllib.loads(_text_of(run_dir / "config.toml")).get("fault_tolerance", {}).get("notify", ""))


def _shortage(run_dir: Path, error: OSError) -> dict[str, Any]:
    """The event that says why nothing can be written, for those that need no disk: a full one takes no event either."""
    head = {"t": time.time(), "mono": time.monotonic(), "group": None, "rank": None, "step": None}
    return head | {"kind": "resource_shortage", "reason": f"{run_dir}: {error.strerror}", "again_s": PAUSE_S}


def served_page(run_dir: Path) -> bytes:
    """The page as it was written last."""
    try:
        return read_regular(run_dir / "report.html", LARGEST_PAGE)
    except OSError:
        return NO_PAGE_YET


if __name__ == "__main__":
    tell(Path(sys.argv[1]), json.loads(sys.argv[2]))
