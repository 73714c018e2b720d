"""`everstep report`: compute what a run did from its events."""

import sys
from pathlib import Path

import tyro


def report(
    run_dir: tyro.conf.Positional[Path],
    against: Path | None = None,
    json: bool = False,
    check: bool = False,
) -> int:
    """Compute what a run did from its events. Writes report.json and report.html (a page for a browser) into the run
    directory, and prints a summary.

    Args:
        run_dir: The run directory.
        against: The directory of another run of the same config, to compare losses with.
        json: Print report.json to stdout, and nothing else.
        check: End with exit status 1 if the run broke its promise. The summary (with --json: stderr) says how.
    """
    from everstep.report.page import write_report
    from everstep.report.score import broken_promises, summary, to_json

    figures = write_report(run_dir, against)
    broken = broken_promises(figures) if check else []
    if json:
        print(to_json(figures))
        print(*broken, sep="\n", end="\n" if broken else "", file=sys.stderr)
    else:
        print(summary(figures))
        print(f"page      {run_dir / 'report.html'}")
    return int(bool(broken))
