"""Tokens per second under kills against the same run without: what failures cost when nothing waits for a person.

    python bench/throughput.py [--config configs/demo_diloco.toml] [--every 30] [--minutes 15] [FLAG …]

A run without failures, one with `everstep run --chaos-every`, and one without again, so that what drifts on the
machine falls on both. Of each the time counts from WARM_S after the first commit in which all groups are to the last
commit. Other flags go to the runs. The published figure beside it: torchft with DiLoCo on 32 CPU replicas kept 97.7 %
under a fault every 30 s.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from everstep.report.score import score, verdict
from everstep.run.events import read_events

ROOT = Path(__file__).resolve().parents[1]
WARM_S = 5.0


def measure(args: argparse.Namespace, minutes: float, chaos: bool, home: Path) -> dict[str, float]:
    """One run: tokens per second, and what befell it."""
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=home))
    command = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(run_dir)]
    command += [
        "--groups",
        str(args.groups),
        "--steps",
        "1000000",
        *(["--chaos-every", str(args.every)] if chaos else []),
        *args.flags,
    ]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    begins = None
    while process.poll() is None and (begins is None or time.time() < begins + 60 * minutes):
        time.sleep(1.0)
        if begins is None:
            begins = next((t + WARM_S for t, groups, _ in commits(run_dir) if groups == args.groups), None)
    process.send_signal(signal.SIGINT)
    if process.wait() or begins is None:
        raise RuntimeError((home / "log").read_text()[-2000:])
    counted = [(t, tokens) for t, _, tokens in commits(run_dir) if begins <= t]
    found = score(run_dir)
    return {
        "tokens_per_s": sum(tokens for _, tokens in counted[1:]) / (counted[-1][0] - counted[0][0]),
        "commits": len(counted),
        "seconds": counted[-1][0] - counted[0][0],
        "faults": sum(event["kind"] == "fault" and event["t"] >= begins for event in read_events(run_dir)),
        "promise_kept": float(not verdict(found, may_stop=True)),
    }


def commits(run_dir: Path) -> list[tuple[float, int, float]]:
    """Of each commit: when the first group told of it, how many groups were in it, its tokens."""
    told: dict[int, tuple[float, int, float]] = {}
    for event in read_events(run_dir):
        if event["kind"] == "commit":
            mine = (event["t"], len(event["groups"]), event["tokens"])
            told[event["step"]] = min(told.get(event["step"], mine), mine)
    return [told[step] for step in sorted(told)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "demo_diloco.toml")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between kills, in the mean")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--reference-minutes", type=float, default=3.0)
    args, args.flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="everstep-throughput-") as home:
        runs = []
        for chaos in (False, True, False):
            runs.append(measure(args, args.minutes if chaos else args.reference_minutes, chaos, Path(home)))
            print(json.dumps(runs[-1]), flush=True)
    free = (runs[0]["tokens_per_s"] + runs[2]["tokens_per_s"]) / 2
    print(
        json.dumps({"kept": runs[1]["tokens_per_s"] / free, "drift": runs[2]["tokens_per_s"] / runs[0]["tokens_per_s"]})
    )


if __name__ == "__main__":
    main()
