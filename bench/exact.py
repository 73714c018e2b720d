"""What exact sums cost: a step with `exact = true` beside one with ordinary sums, and how far both are from the truth.

    python bench/exact.py [--config configs/demo.toml] [--groups 2] [--steps 40] [--rounds 3]
    python bench/exact.py --loss [--steps 120]     # the losses, beside those of float sums in other orders

Two runs go on at the same time, with the same steps and data, one with exact sums: a machine whose cores are now faster
and now slower is so for both. Processor time of a step is that of all of a run's processes.

`--loss` makes four runs one after the other: exact, and ordinary with one, two and three groups, whose sums are in
three orders. It prints how far the losses of the exact run are from the mean of the ordinary ones, and those from it.

`--bytes P` prints what a rank with P parameters keeps and moves, counted: no device is measured.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from everstep.run.events import read_events
from snapshot_run import Meter, commits_of

LOOK_S = 0.2
H100_BYTES_PER_S = 3.35e12


def train(args: argparse.Namespace, run_dir: Path, groups: int, *flags: str) -> tuple[list[dict[str, Any]], Meter]:
    """The events of one run, and what its processes took."""
    command = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(run_dir)]
    command += ["--groups", str(groups), "--steps", str(args.steps), "--checkpoint.no-enable", *flags, *args.flags]
    with run_dir.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        meter = Meter(run_dir, process.pid)
        while True:
            meter.look()
            try:
                if process.wait(LOOK_S):
                    raise RuntimeError(run_dir.with_suffix(".log").read_text()[-2000:])
                return list(read_events(run_dir)), meter
            except subprocess.TimeoutExpired:
                continue


def side_by_side(args: argparse.Namespace, home: Path) -> dict[str, float]:
    """Of a step with exact sums, as a share of an ordinary one: in processor time and in wall time."""
    plans = [(home / "ordinary", "--fault_tolerance.no-exact"), (home / "exact", "--fault_tolerance.exact")]
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda plan: train(args, plan[0], args.groups, plan[1]), plans))
    commits = [commits_of(events)[0] for events, _ in runs]
    begin, end = max(min(at.values()) for at in commits), min(max(at.values()) for at in commits)
    cpu_s, wall_s = [], []
    for at, (_, meter) in zip(commits, runs, strict=True):
        times = sorted(t for t in at.values() if begin <= t <= end)
        trainers_s, keepers_s = meter.between(times[0], times[-1])
        cpu_s.append((trainers_s + keepers_s) / (len(times) - 1))
        wall_s.append(statistics.median(after - before for before, after in pairwise(times)))
    for folder, _ in plans:
        shutil.rmtree(folder)
    return {"cpu": cpu_s[1] / cpu_s[0], "wall": wall_s[1] / wall_s[0], "ordinary_cpu_s": cpu_s[0]}


def losses(args: argparse.Namespace, home: Path) -> dict[str, float]:
    """How far the losses of a run with exact sums are from ordinary ones."""
    plans = {"exact": (1, "--fault_tolerance.exact")}
    plans |= {f"ordinary-{groups}": (groups, "--fault_tolerance.no-exact") for groups in (1, 2, 3)}
    curves = {}
    for name, (groups, flag) in plans.items():
        events, _ = train(args, home / name, groups, flag)
        curves[name] = {event["step"]: event["loss"] for event in events if event["kind"] == "commit"}
    ours, *plain = ([curve[step] for step in sorted(curve)] for curve in curves.values())
    middle = [statistics.mean(each) for each in zip(*plain, strict=True)]
    return {
        "steps": len(ours),
        "exact_from_mean": max(abs(a - b) for a, b in zip(ours, middle, strict=True)),
        "ordinary_from_mean": max(abs(a - b) for curve in plain for a, b in zip(curve, middle, strict=True)),
        "last_exact": ours[-1],
        "last_ordinary_mean": middle[-1],
    }


def counted(parameters: float) -> dict[str, float]:
    """Bytes of a rank on a device, in GB, and seconds at the memory's speed, of float32 gradients."""
    slot = 4 + 8 + 8 + 4 + 4 + 4 + 4 + 4  # add to the sum; least and most; zero; a copy without -0 and its checksum
    ordinary, exact = 4 + 4, 4 + 8 + 8
    return {
        "kept_gb_ordinary": ordinary * parameters / 1e9,
        "kept_gb_exact": exact * parameters / 1e9,
        "sent_gb_ordinary": 4 * parameters / 1e9,
        "sent_gb_exact": 8 * parameters / 1e9,
        "slot_moves_gb": slot * parameters / 1e9,
        "slot_s_h100": slot * parameters / H100_BYTES_PER_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--bytes", type=float, help="parameters of a rank")
    args, args.flags = parser.parse_known_args()
    if args.bytes:
        print(json.dumps(counted(args.bytes)))
        return
    home = Path(tempfile.mkdtemp(prefix="everstep-exact-"))
    try:
        if args.loss:
            print(json.dumps(losses(args, home)))
            return
        found = [side_by_side(args, home) for _ in range(args.rounds)]
        print(json.dumps({"rounds": found, **{of: statistics.median(one[of] for one in found) for of in found[0]}}))
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
