"""report.html: one file that shows what a run did and what its faults cost, for a browser, without a network."""

import itertools
import sys
import time
import tomllib
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from everstep.report import plots
from everstep.report.checking import covered, judged
from everstep.report.score import ACTIONS, Measured, checking_of, counted, curve, loss_delta, measure, verdict
from everstep.report.sessions import stated
from everstep.report.times import STATES
from everstep.run.files import LARGEST, write_whole
from everstep.run.regular import read_regular

FEW_FAULTS = 20
"""Up to so many are drawn as dots."""
MOST_FAILURES = 6
LIVE_MS = 3000
"""How often a live page asks again."""
PACKAGES = ("everstep", "torch", "torchtitan", "torchft", "numpy")


def write_page(run_dir: Path, against: Path | None = None) -> Path:
    """Write RUN_DIR/report.html; its path.

    against: the directory of another run of the same config, drawn beneath the losses. Raises FileNotFoundError when a
    directory holds no event log.
    """
    text = render(run_dir, against)
    page = run_dir / "report.html"
    write_whole(page, text.encode())
    return page


def render(run_dir: Path, against: Path | None = None, *, live: bool = False) -> str:
    """The page's text. `live`: it fetches itself again every few seconds. Raises FileNotFoundError as `write_page`."""
    found = measure(run_dir)
    reference = curve(against) if against is not None else {}
    figures = found.figures | loss_delta(found.losses, reference)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("everstep.report"), autoescape=True)
    environment.filters["duration"] = duration
    return environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        facts=_facts(run_dir, found),
        failures=_failures(found),
        checked=covered(figures),
        judged=judged(figures),
        doubts=list(checking_of(found.events).doubts)[-MOST_FAILURES:],
        actions=ACTIONS,
        live=live,
        live_ms=LIVE_MS,
        causes=plots.STATE_COLOURS | {"start-up": "#9d7bd8", "lost": "#7a1f1f", "idle": "#c9ced6"},
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
        versions=_versions(),
        compared=against.resolve().name if against is not None else "",
    )


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
    pictures = {}
    for size, wide in (("wide", True), ("narrow", False)):
        pictures[f"loss {size}"] = plots.loss(found.losses, reference, found.validations, hit, wide)
        pictures[f"lanes {size}"] = plots.lanes(found.stretches, begin, wide)
        pictures[f"steps {size}"] = plots.step_times(gaps, found.figures["step_s_median"], hit, wide)
        for name, label in (("grad_norm", "gradient norm"), ("lr", "learning rate")):
            values = {commit.step: getattr(commit, name) for commit in final if getattr(commit, name) is not None}
            if values:
                pictures[f"{name} {size}"] = plots.curve(values, label, wide)
    for name, what in (("delay_s", "delay"), ("rejoin_s", "rejoin")):
        values = [row[name] for row in found.rows if row[name] is not None]
        if values:
            draw = plots.dots if len(values) <= FEW_FAULTS else plots.distribution
            pictures[what] = draw(values, what)
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
        elif event["kind"] == "unfit":
            said[event["reason"]] = None
    if found.figures["error"] and not found.figures["give_ups"]:
        said[found.figures["error"]] = None
    return list(said)[-MOST_FAILURES:]


def _fault_table(run_dir: Path, found: Measured) -> list[dict[str, Any]]:
    """The faults with a link to where the hit group's log goes on: the header line of its next start."""
    starts: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for event in found.events:
        if event["kind"] == "worker_up" and event.get("rank") == 0:
            header = f"group {event['group']} rank 0 incarnation {event['incarnation']}"
            starts[event["group"]].append((event["t"], header))
    rows = []
    for row in found.rows:
        group, link = row["group"], ""
        if group is not None and (run_dir / "logs" / f"group-{group}" / "rank-0.log").exists():
            header = next((text for t, text in starts[group] if t > row["t"]), "")
            link = f"logs/group-{group}/rank-0.log" + (f"#:~:text={header.replace(' ', '%20')}" if header else "")
        rows.append(row | {"link": link})
    return rows


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _text_of(path: Path) -> str:
    """A file of the run directory; "" for none, and for what is no file: a link could be to anything."""
    try:
        return read_regular(path, LARGEST).decode(errors="replace")
    except OSError:
        return ""
