"""report.html: one file that shows what a run did and what its faults cost, for a browser, without a network."""

import functools
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import jinja2

from everstep import __version__
from everstep.report import series
from everstep.report.account import Account
from everstep.report.checking import ACTIONS, covered, judged
from everstep.report.score import account_of, counted, figures_of, rows_of, verdict
from everstep.report.times import STATES
from everstep.run.files import LARGEST, write_whole
from everstep.run.regular import read_regular

RELOAD_MS = 2500
"""How often the page of a run that goes on is loaded again, unless somebody points at a curve."""
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
    write_report(run_dir, account_of(run_dir), against)
    return run_dir / "report.html"


def write_report(run_dir: Path, account: Account, against: Path | None = None) -> dict[str, Any]:
    """The same of a run whose events were read; returns the figures of report.json."""
    as_of = time.time()
    other = account_of(against) if against is not None else None
    figures, rows = figures_of(account, other), rows_of(account)
    drawn = {
        "curves": series.curves(account.lineage.final(), account.validations),
        "other": series.curves(other.lineage.final(), {}) if other is not None else {},
        "faults": sorted({(row["step"], row["fault"]) for row in rows if row["step"] is not None}),
    }
    text = _template().render(
        name=run_dir.resolve().name,
        facts=_facts(run_dir, account, figures),
        troubles=account.troubles.sentences,
        checked=covered(figures),
        judged=judged(figures),
        actions=ACTIONS,
        as_of=as_of,
        reload_ms=RELOAD_MS,
        colours=COLOURS,
        states=STATES,
        percent=percent,
        clock=clock,
        figures=figures,
        other=figures_of(other) if other is not None else {},
        broken=verdict(figures, may_stop=True),
        drawn=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        curves=[name for name in drawn["curves"] if name != "validation"],
        rows=[row | {"link": _log_of(run_dir, row["group"])} for row in rows],
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
    environment.filters["duration"] = duration
    return environment.get_template("report.html.jinja")


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


def _facts(run_dir: Path, account: Account, figures: dict[str, Any]) -> dict[str, str]:
    """What was run: model, groups, ranks, tokens, when it began."""
    facts = {}
    job = sections_of(run_dir).get("job", {})
    named = [str(job[key]) for key in ("module", "config", "flavor") if job.get(key)]
    if named:
        facts["model"] = " ".join(named)
    if account.groups:
        facts["groups"] = f"{account.groups}" + (f" of {counted(account.ranks, 'rank')}" if account.ranks else "")
    if figures["tokens"] is not None:
        facts["tokens"] = f"{figures['tokens']:,.0f}"
    if figures["tokens_per_s"] is not None:
        facts["tokens/s"] = f"{figures['tokens_per_s']:,.0f}"
    if account.validations:
        last = max(account.validations)
        facts["validation loss"] = f"{account.validations[last]:.4f} (step {last})"
    if account.sessions:
        facts["started"] = clock(account.sessions[0].begin)
    if figures["snapshots"]:
        facts["snapshots"] = figures["snapshots"]
    return facts


def _log_of(run_dir: Path, group: int | None) -> str:
    """Link to a group's log; "" without one."""
    log = f"logs/group-{group}/rank-0.log"
    return log if (run_dir / log).exists() else ""


def sections_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's config, as far as it can be read."""
    try:
        found = tomllib.loads(text_of(run_dir / "config.toml"))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    return {name: keys for name, keys in found.items() if isinstance(keys, dict)}


def text_of(path: Path) -> str:
    """A file of the run directory; "" for none, and for what is no file: a link could be to anything."""
    try:
        return read_regular(path, LARGEST).decode(errors="replace")
    except OSError:
        return ""
