"""Tokens per second of a real run with snapshots at every step and without, the two in turn.

    python bench/snapshot_run.py [--config configs/demo.toml] [--groups 2] [--steps 40] [--rounds 2] [--json]

What a step takes is the time between two commits; the first ten are left out, and of the others the median is taken.
Both runs have the same steps and data, and no checkpoints.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from everstep.run.events import read_events

WARM_UP = 10


def measure(config: Path, groups: int, steps: int, snapshots: bool, home: Path) -> dict[str, float]:
    """One run: median tokens per second, and what its snapshots did."""
    run_dir = home / f"run-{snapshots}"
    shutil.rmtree(run_dir, ignore_errors=True)
    flags = ["--groups", str(groups), "--steps", str(steps), "--checkpoint.no-enable"]
    flags.append("--snapshot.enable" if snapshots else "--snapshot.no-enable")
    command = [sys.executable, "-m", "everstep.cli", "run", str(config), "--run-dir", str(run_dir), *flags]
    with (home / "log").open("ab") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    events = list(read_events(run_dir))
    at: dict[int, float] = {}
    tokens: dict[int, float] = {}
    for event in events:
        if event["kind"] == "commit":
            at[event["step"]] = min(event["t"], at.get(event["step"], event["t"]))
            tokens[event["step"]] = event["tokens"]
    order = sorted(at)
    rates = [tokens[b] / (at[b] - at[a]) for a, b in itertools.pairwise(order) if a > WARM_UP]
    taken = [event for event in events if event["kind"] == "snapshot" and event["step"] > WARM_UP]
    blocked = [event["blocked_s"] for event in taken]
    return {
        "tokens_per_s": statistics.median(rates),
        "snapshots": len({event["step"] for event in taken}),
        "of_steps": len(rates),
        "blocked_ms": 1e3 * statistics.median(blocked) if blocked else 0.0,
        "blocked_ms_longest": 1e3 * max(blocked, default=0.0),
        "mb": statistics.median(event["bytes"] for event in taken) / 1e6 if taken else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="everstep-cost-"))
    rounds = []
    try:
        for _ in range(args.rounds):
            without = measure(args.config, args.groups, args.steps, False, home)
            rounds.append({"without": without, "with": measure(args.config, args.groups, args.steps, True, home)})
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if args.json:
        print(json.dumps(rounds))
        return
    for each in rounds:
        share = each["with"]["tokens_per_s"] / each["without"]["tokens_per_s"]
        print(f"{share:.3f} of the tokens per second without", {k: round(v, 3) for k, v in each["with"].items()})


if __name__ == "__main__":
    main()
