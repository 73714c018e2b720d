"""report.html: one file that shows what a run did and what its faults cost, for a browser, without a network."""

import functools
import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jinja2

from everstep.report.account import Account
from everstep.report.faults import fault_rows
from everstep.report.groups import STATES
from everstep.report.lineage import Commit
from everstep.report.score import KEPT, account_of, figures_of, lines_of, verdict
from everstep.run.files import write_whole

RELOAD_MS = 2500
"""How often the page of a run that goes on is loaded again, unless somebody points at a curve."""
MOST_POINTS = 1500
"""Of a curve, few enough for a browser."""

Points = list[tuple[int, float | None]]
"""(step, value); None for a value that is not finite."""


def write_report(run_dir: Path, against: Path | None = None) -> dict[str, Any]:
    """Write RUN_DIR/report.html and report.json; the figures of the latter. See `report_of`."""
    page, figures = report_of(run_dir, against)
    write_pages(run_dir, page, figures)
    return figures


def write_pages(run_dir: Path, page: bytes, figures: Mapping[str, Any]) -> None:
    """Raises OSError."""
    write_whole(run_dir / "report.html", page)
    write_whole(run_dir / "report.json", json.dumps(figures, indent=2).encode() + b"\n")


def report_of(
    run_dir: Path, against: Path | None = None, account: Account | None = None
) -> tuple[bytes, dict[str, Any]]:
    """A run's page and its figures. The page of a run that goes on loads itself again.

    against: the directory of another run of the same config, drawn beneath this one's curves, its figures beside this
    one's. account: what the run's events say, if they were read. Raises LaunchError when a directory holds no event
    log.
    """
    as_of = time.time()
    account = account_of(run_dir) if account is None else account
    other = account_of(against) if against is not None else None
    figures = figures_of(account, other)
    rows = fault_rows(account.faults.found, figures["step_s_median"])
    drawn = {
        "curves": curves(account.lineage.final(), account.validations),
        "other": curves(other.lineage.final(), other.validations) if other is not None else {},
        "faults": sorted({(row["step"], row["fault"]) for row in rows if row["step"] is not None}),
    }
    text = _template().render(
        name=run_dir.resolve().name,
        lines=lines_of(figures),
        as_of=as_of,
        reload_ms=RELOAD_MS,
        states=STATES,
        clock=clock,
        figures=figures,
        other=figures_of(other) if other is not None else {},
        broken=verdict(figures, may_stop=True),
        kept=KEPT,
        drawn=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        curves=drawn["curves"],
        rows=rows,
        compared=against.resolve().name if against is not None else "",
    )
    return text.encode(), figures


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("everstep.report"), autoescape=True)
    return environment.get_template("report.html.jinja")


def clock(t: float) -> str:
    """A wall time in this machine's zone: 2026-01-31 12:00:05."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def curves(final: Iterable[Commit], validations: Mapping[int, float]) -> dict[str, Points]:
    """By name, each curve of a run's final state that has points. Seconds a step and tokens per second go from one
    commit to the next, so they have none for a step before which the run was down or went back."""
    found: dict[str, dict[int, float]] = {
        name: {} for name in ("loss", "tokens per second", "MFU, %", "seconds a step", "gradient norm", "learning rate")
    }
    for commit in final:
        gap_s = commit.gap_s or 0.0
        values = {
            "loss": commit.loss,
            "tokens per second": commit.tokens / gap_s if gap_s > 0 else None,
            "MFU, %": commit.mfu,
            "seconds a step": gap_s if gap_s > 0 else None,
            "gradient norm": commit.grad_norm,
            "learning rate": commit.lr,
        }
        for name, value in values.items():
            if value is not None:
                found[name][commit.step] = value
    found["validation loss"] = dict(validations)
    return {name: thinned(points) for name, points in found.items() if points}


def thinned(points: Mapping[int, float]) -> Points:
    """At most MOST_POINTS points: of each stretch of steps its lowest and its highest, in order."""
    steps = sorted(points)
    if len(steps) > MOST_POINTS:
        size = -(-2 * len(steps) // MOST_POINTS)
        kept: list[int] = []
        for first in range(0, len(steps), size):
            part = steps[first : first + size]
            kept += sorted({min(part, key=points.__getitem__), max(part, key=points.__getitem__)})
        steps = kept
    return [(step, float(f"{points[step]:.6g}") if math.isfinite(points[step]) else None) for step in steps]
