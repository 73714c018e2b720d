"""Writes report.html: one file that shows in a browser what a run did and what its faults cost. It needs no network."""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from everstep.report.account import Account
from everstep.report.faults import Pace
from everstep.report.groups import STATES
from everstep.report.lineage import Commit
from everstep.report.score import KEPT, account_of, broken_promises, figures_of, lines_of, to_json
from everstep.run.files import write_whole

MOST_POINTS = 1500
"""Largest number of points in a curve, few enough for a browser."""
WIDE, HIGH = 1000, 200
"""Size of a chart in units of its own."""
Points = list[tuple[int, float | None]]
"""(step, value) pairs; the value is None if it is not finite."""


def write_report(run_dir: Path, against: Path | None = None) -> dict[str, Any]:
    """Write RUN_DIR/report.html and report.json, and return the figures of report.json. See `report_of`."""
    page, figures = report_of(run_dir, against)
    write_pages(run_dir, page, figures)
    return figures


def write_pages(run_dir: Path, page: bytes, figures: Mapping[str, Any]) -> None:
    """Write a page and its figures into the run directory. Raises OSError."""
    write_whole(run_dir / "report.html", page)
    write_whole(run_dir / "report.json", to_json(figures).encode() + b"\n")


def report_of(
    run_dir: Path, against: Path | None = None, account: Account | None = None
) -> tuple[bytes, dict[str, Any]]:
    """Return a run's page and its figures. The page of a live run reloads itself.

    against: Directory of another run of the same config, whose curves are drawn beneath this run's. account: The
    account of `run_dir`, if its events have been read. Raises LaunchError if a directory holds no event log.
    """
    as_of = time.time()
    account = account_of(run_dir) if account is None else account
    other = account_of(against) if against is not None else None
    pace = Pace(account.lineage)
    figures = figures_of(account, other, pace)
    rows = [fault.row(pace) for fault in account.faults.found]
    mine = curves(account.lineage.final(), account.validations)
    theirs = curves(other.lineage.final(), other.validations) if other is not None else {}
    struck = sorted({row["step"] for row in rows if row["step"] is not None})
    steps = [step for points in (*mine.values(), *theirs.values()) for step, _ in points]
    first, last = min(steps, default=0), max(steps, default=0)
    text = _template().render(
        name=run_dir.resolve().name,
        lines=lines_of(figures),
        as_of=as_of,
        states=STATES,
        clock=clock,
        figures=figures,
        broken=broken_promises(figures),
        kept=KEPT,
        charts={name: chart(name, {"other": theirs.get(name, []), "mine": mine[name]}, first, last) for name in mine},
        marks="".join(f"M{x(step, first, last)} {HIGH}v-14" for step in struck if first <= step <= last),
        wide=WIDE,
        high=HIGH,
        first=first,
        last=last,
        rows=rows,
        compared=against.resolve().name if against is not None else "",
    )
    return text.encode(errors="replace"), figures


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("everstep.report"), autoescape=True)
    return environment.get_template("report.html.jinja")


def clock(t: float) -> str:
    """Format a wall time in this machine's time zone: 2026-01-31 12:00:05."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def curves(final: Sequence[Commit], validations: Mapping[int, float]) -> dict[str, Points]:
    """Return name -> points of each curve of a run's final state that has points. Seconds a step and tokens per second
    are measured from one commit to the next, so a step has none if the run was down or went back before it."""
    gaps = [(one, gap_s) for one in final if (gap_s := one.gap_s)]
    found: dict[str, Mapping[int, float]] = {
        "loss": {one.step: one.loss for one in final},
        "tokens per second": {one.step: one.tokens / gap_s for one, gap_s in gaps},
        "seconds a step": {one.step: gap_s for one, gap_s in gaps},
        "gradient norm": {one.step: one.grad_norm for one in final if one.grad_norm is not None},
        "validation loss": validations,
    }
    return {name: thinned(points) for name, points in found.items() if points}


def chart(name: str, lines: Mapping[str, Points], first: int, last: int) -> dict[str, Any]:
    """Return what draws curves over each other, from step `first` to `last`: `range`, the values at its bottom and top
    as text, and `paths`, the SVG path of each line. It has a gap where a value is not finite."""
    finite = [value for points in lines.values() for _, value in points if value is not None]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    low = low if name == "loss" else min(low, 0.0)
    paths = {}
    for who, points in lines.items():
        path, pen = "", "M"
        for step, value in points:
            if value is not None:
                path += f"{pen}{x(step, first, last)} {HIGH - HIGH * (value - low) / (high - low or 1.0):.1f}"
            pen = "M" if value is None else "L"
        paths[who] = path
    return {"range": f"{low:g} to {high:g}", "paths": paths}


def x(step: int, first: int, last: int) -> str:
    """Return where a step is drawn."""
    return f"{WIDE * (step - first) / max(1, last - first):.1f}"


def thinned(points: Mapping[int, float]) -> Points:
    """Return at most MOST_POINTS points in order: of each stretch of steps, its lowest and its highest."""
    steps = sorted(points)
    size = -(-2 * len(steps) // MOST_POINTS)
    stretches = [steps[first : first + size] for first in range(0, len(steps), size)]
    kept = {pick(part, key=points.__getitem__) for part in stretches for pick in (min, max)}
    return [(step, float(f"{points[step]:.6g}") if math.isfinite(points[step]) else None) for step in sorted(kept)]
