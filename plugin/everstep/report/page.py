"""report.html: one file that shows what a run did and what its faults cost, for a browser, without a network."""

import functools
import json
import re
import time
from pathlib import Path
from typing import Any

import jinja2

from everstep import __version__
from everstep.report import series
from everstep.report.account import Account
from everstep.report.score import KEPT, account_of, figures_of, lines_of, rows_of, verdict
from everstep.report.times import STATES
from everstep.run.files import LARGEST, write_whole
from everstep.run.regular import read_regular

RELOAD_MS = 2500
"""How often the page of a run that goes on is loaded again, unless somebody points at a curve."""
SECRET = re.compile(r"^\s*notify\s*=.*$", re.MULTILINE)
"""The line of a config with the address of a webhook."""


def write_report(run_dir: Path, against: Path | None = None, account: Account | None = None) -> dict[str, Any]:
    """Write RUN_DIR/report.html and report.json; the figures of the latter. The page of a run that goes on loads itself
    again.

    against: the directory of another run of the same config, drawn beneath this one's curves, its figures beside this
    one's. account: what the run's events say, if they were read. Raises FileNotFoundError when a directory holds no
    event log.
    """
    as_of = time.time()
    account = account_of(run_dir) if account is None else account
    other = account_of(against) if against is not None else None
    figures, rows = figures_of(account, other), rows_of(account)
    drawn = {
        "curves": series.curves(account.lineage.final(), account.validations),
        "other": series.curves(other.lineage.final(), other.validations) if other is not None else {},
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
        config=SECRET.sub('notify = "…"', text_of(run_dir / "config.toml")),
        version=__version__,
        compared=against.resolve().name if against is not None else "",
    )
    write_whole(run_dir / "report.html", text.encode())
    write_whole(run_dir / "report.json", json.dumps(figures, indent=2).encode() + b"\n")
    return figures


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("everstep.report"), autoescape=True)
    return environment.get_template("report.html.jinja")


def clock(t: float) -> str:
    """A wall time in this machine's zone: 2026-01-31 12:00:05."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def text_of(path: Path) -> str:
    """A file of the run directory; "" for none, and for what is no file: a link could be to anything."""
    try:
        return read_regular(path, LARGEST).decode(errors="replace")
    except OSError:
        return ""
