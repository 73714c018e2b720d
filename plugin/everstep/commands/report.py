"""`everstep report`: what a run did, from its events."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from everstep.run.directory import LaunchError
from everstep.run.files import write_whole


@dataclass(kw_only=True)
class Report:
    """Compute what a run did from its events: report.json in the run directory, and a summary."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""

    against: Path | None = None
    """Another run directory to compare losses with."""

    html: bool = True
    """Also write report.html, a page for a browser; not with --json."""

    json: bool = False
    """Print report.json and nothing else to stdout."""

    check: bool = False
    """End with status 1 if the run did not keep its promise. The sentences that say how are in the summary; with
    --json they go to stderr."""


def report(command: Report, flags: Sequence[str]) -> int:
    """`everstep report`; returns the exit status."""
    from everstep.report import score

    figures = write_score(command.run_dir, command.against)
    broken = score.verdict(figures) if command.check else []
    if command.json:
        print(json.dumps(figures, indent=2))
        print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    else:
        print(score.summary(figures))
        if command.html:
            from everstep.report.page import write_page  # matplotlib with it, which takes a while

            print(f"page      {write_page(command.run_dir, command.against)}")
    return int(bool(broken))


def write_score(run_dir: Path, against: Path | None) -> dict[str, Any]:
    """The figures of a run, also written to report.json. Raises LaunchError for a directory without events."""
    from everstep.report import score

    try:
        figures = score.score(run_dir, against)
    except FileNotFoundError as error:
        raise LaunchError(str(error)) from None
    write_whole(run_dir / "report.json", json.dumps(figures, indent=2).encode() + b"\n")
    return figures
