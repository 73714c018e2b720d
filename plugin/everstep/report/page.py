"""report.html: one file that shows what a run did and what its faults cost, for a browser, without a network."""

import itertools
import json
import os
import select
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import jinja2

from everstep import __version__
from everstep.report import plots
from everstep.report.checking import covered, judged
from everstep.report.protection import Protection
from everstep.report.score import (
    ACTIONS,
    READ_FIELDS,
    Measured,
    checking_of,
    counted,
    curve,
    load_events,
    loss_delta,
    measure,
    reduced,
    verdict,
)
from everstep.report.sessions import stated
from everstep.report.times import STATES
from everstep.run.events import EventTail
from everstep.run.files import LARGEST, write_whole
from everstep.run.regular import read_regular

MOST_FAILURES = 6
PAUSE_S, FIRST_PAUSE_S = 3.0, 0.5
SHARE = 0.5
"""Of one core that writing the page again and again may take, below all other processes."""
NICENESS = 10
RELOAD_MS = 4000
"""How often the page of a run that goes on is loaded again."""


def write_page(run_dir: Path, against: Path | None = None) -> Path:
    """Write RUN_DIR/report.html and report.json; the page's path. The page of a run that goes on loads itself again.

    against: the directory of another run of the same config, drawn beneath the losses. Raises FileNotFoundError when a
    directory holds no event log.
    """
    return _write(run_dir, load_events(run_dir), against)


def keep_writing(run_dir: Path) -> None:
    """Write the page of a run again and again until stdin ends, and then once more. Events are read once, and kept."""
    os.nice(NICENESS)
    events: list[dict[str, Any]] = []
    tail, took_s, over = EventTail(run_dir), 0.0, False
    while not over:
        over = bool(select.select([0], [], [], max(PAUSE_S, took_s / SHARE) if events else FIRST_PAUSE_S)[0])
        begin = time.process_time()
        events += [reduced(event) for event in tail.new() if event["kind"] in READ_FIELDS]
        events.sort(key=lambda event: event["t"])  # a log on another node may be seen late
        try:
            _write(run_dir, events, None)
        except OSError as error:  # a full disk
            print(f"everstep: the page is not written: {error}", flush=True)
        took_s = time.process_time() - begin


def _write(run_dir: Path, events: list[dict[str, Any]], against: Path | None) -> Path:
    as_of = time.time()
    found = measure(events)
    reference = curve(against) if against is not None else {}
    figures = found.figures | loss_delta(found.losses, reference)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("everstep.report"), autoescape=True)
    environment.filters["duration"] = duration
    text = environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        facts=_facts(run_dir, found),
        failures=_failures(found),
        checked=covered(figures),
        judged=judged(figures),
        doubts=list(checking_of(found.events).doubts)[-MOST_FAILURES:],
        actions=ACTIONS,
        as_of=as_of,
        reload_ms=RELOAD_MS,
        causes=plots.STATE_COLOURS | {"lost": "#a83232", "idle": "#c9ced6"},
        percent=percent,
        clock=clock,
        figures=figures,
        broken=verdict(figures, may_stop=True),
        pictures=_pictures(found, reference),
        states={state: plots.STATE_COLOURS[state] for state in STATES},
        colours={
            "mine": plots.MINE,
            "reference": plots.REFERENCE,
            "fault": plots.FAULT,
            "validation": plots.VALIDATION,
        },
        rows=_fault_table(run_dir, found),
        config=_text_of(run_dir / "config.toml"),
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


def _pictures(found: Measured, reference: dict[int, float]) -> dict[str, str]:
    hit = [row["step"] for row in found.rows if row["step"] is not None]
    final = sorted(found.final, key=lambda commit: commit.step)
    gaps = {b.step: b.t - a.t for a, b in itertools.pairwise(final) if b.parent is a}
    begin = min((parts[0].begin for parts in found.stretches.values() if parts), default=0.0)
    pictures = {
        "loss": plots.loss(found.losses, reference, found.validations, hit),
        "lanes": plots.lanes(found.stretches, begin),
        "steps": plots.step_times(gaps, found.figures["step_s_median"], hit),
    }
    for name, label in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
        values = {commit.step: getattr(commit, name) for commit in final if getattr(commit, name) is not None}
        if values:
            pictures[name] = plots.curve(values, label)
    for name, what in (("delay_s", "delay"), ("rejoin_s", "rejoin")):
        values = [row[name] for row in found.rows if row[name] is not None]
        if values:
            pictures[what] = plots.dots(values, what)
    return pictures


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
    protection = Protection()
    for event in found.events:
        protection.take(event)
    if snapshots := protection.line():
        facts["snapshots"] = snapshots
    return facts


def clock(t: float) -> str:
    """A wall time in this machine's zone: 2026-01-31 12:00:05."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _failures(found: Measured) -> list[str]:
    """What a person should read first about a run that fails, newest last, each kind once."""
    said: dict[str, None] = {}
    for event in found.events:
        if event["kind"] == "agent_ended" and event.get("status") == "failed":
            said[str(event.get("reason"))] = None
        elif event["kind"] == "workers_stacks":
            said[f"group {event['group']} hung: {event.get('summary')}"] = None
        elif event["kind"] in ("unfit", "group_failing"):
            said[event["reason"]] = None
    if found.figures["error"] and not found.figures["give_ups"]:
        said[found.figures["error"]] = None
    return list(said)[-MOST_FAILURES:]


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


if __name__ == "__main__":
    keep_writing(Path(sys.argv[1]))
