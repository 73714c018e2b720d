"""`everstep report`: what a run did, from its events."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(kw_only=True)
class Report:
    """Compute what a run did from its events: report.json and report.html, a page for a browser, in the run directory,
    and a summary."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""

    against: Path | None = None
    """Another run directory to compare losses with."""

    json: bool = False
    """Print report.json and nothing else to stdout."""

    check: bool = False
    """End with status 1 if the run did not keep its promise. The sentences that say how are in the summary; with
    --json they go to stderr."""


def report(command: Report, flags: Sequence[str]) -> int:
    """`everstep report`; returns the exit status."""
    from everstep.report.page import write_report
    from everstep.report.score import summary, verdict

    figures = write_report(command.run_dir, command.against)
    broken = verdict(figures) if command.check else []
    if command.json:
        print(json.dumps(figures, indent=2))
        print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    else:
        print(summary(figures))
        print(f"page      {command.run_dir / 'report.html'}")
    return int(bool(broken))
