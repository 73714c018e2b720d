"""What a switch of the config costs a real run: tokens per second and processor time, with it on and off.

    python bench/switch.py [--switch snapshot.enable] [--groups 2] [--steps 60] [--rounds 2]
    python bench/switch.py --switch fault_tolerance.exact     # and any other flag, which goes to both runs

Both runs of a round go on at the same time, with the same steps and data and no checkpoints: a machine whose cores are
now faster and now slower is so for both. What counts is the time in which both train. Processor time is that of
launcher, trainers and keepers in this time, for a step. Tokens per second are shared out by the system's scheduler: a
run that waits leaves the cores to the other.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from everstep.run.events import read_events
from everstep.snapshot import peers

WARM_UP = 10
LOOK_S = 0.2


class Meter:
    """Processor seconds of a run's processes, looked at again and again: those that have ended count as last seen."""

    def __init__(self, run_dir: Path, launcher: int) -> None:
        self._run_dir, self._launcher = run_dir, launcher
        self._last: dict[int, float] = {}
        self.seen: list[tuple[float, float]] = []
        """Wall clock, and seconds of all of them."""

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher)
            keepers = {place.pid for place in peers.read_places(self._run_dir)}
            for pid in keepers | {process.pid for process in (launcher, *launcher.children(recursive=True))}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = psutil.Process(pid).cpu_times()
                    self._last[pid] = used.user + used.system
        self.seen.append((time.time(), sum(self._last.values())))

    def between(self, begin: float, end: float) -> float:
        """Seconds between two moments."""
        first = min(self.seen, key=lambda seen: abs(seen[0] - begin))
        last = min(self.seen, key=lambda seen: abs(seen[0] - end))
        return last[1] - first[1]


def run_once(args: argparse.Namespace, on: bool, home: Path) -> tuple[list[dict[str, Any]], Meter]:
    """The events of one run, and what its processes took."""
    run_dir = home / f"run-{on}"
    shutil.rmtree(run_dir, ignore_errors=True)
    section, _, key = args.switch.partition(".")
    flags = ["--groups", str(args.groups), "--steps", str(args.steps), "--checkpoint.no-enable"]
    flags.append(f"--{section}.{'' if on else 'no-'}{key}")
    command = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(run_dir), *flags]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen([*command, *args.flags], stdout=log, stderr=log)
    meter = Meter(run_dir, process.pid)
    while process.poll() is None:
        meter.look()
        time.sleep(LOOK_S)
    if process.returncode:
        raise RuntimeError((home / "log").read_text()[-2000:])
    return list(read_events(run_dir)), meter


def commits_of(events: list[dict[str, Any]]) -> tuple[dict[int, float], dict[int, float]]:
    """By step after the first ones: when the first group committed it, and its tokens."""
    at: dict[int, float] = {}
    tokens: dict[int, float] = {}
    for event in events:
        if event["kind"] == "commit" and event["step"] > WARM_UP:
            at[event["step"]] = min(event["t"], at.get(event["step"], event["t"]))
            tokens[event["step"]] = event["tokens"]
    return at, tokens


def snapshots_of(events: list[dict[str, Any]]) -> dict[str, float]:
    """How many were taken after the first steps, how long trainers waited for them, and how large they were."""
    taken = [event for event in events if event["kind"] == "snapshot" and event["step"] > WARM_UP]
    if not taken:
        return {}
    blocked = [event["blocked_s"] for event in taken]
    return {
        "snapshots": len({event["step"] for event in taken}),
        "blocked_ms": 1e3 * statistics.median(blocked),
        "blocked_ms_longest": 1e3 * max(blocked),
        "mb": statistics.median(event["bytes"] for event in taken) / 1e6,
    }


def measure(args: argparse.Namespace, home: Path) -> dict[str, dict[str, float]]:
    """Two runs side by side: tokens per second, processor time of a step, and what snapshots did."""
    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip(("off", "on"), pool.map(lambda on: run_once(args, on, home), (False, True)), strict=True))
    commits = {which: commits_of(events) for which, (events, _) in runs.items()}
    begin = max(min(at.values()) for at, _ in commits.values())
    end = min(max(at.values()) for at, _ in commits.values())
    found = {}
    for which, (events, meter) in runs.items():
        at, tokens = commits[which]
        steps = sorted(step for step, t in at.items() if begin <= t <= end)
        first, last, count = at[steps[0]], at[steps[-1]], len(steps) - 1
        found[which] = {
            "tokens_per_s": sum(tokens[step] for step in steps[1:]) / (last - first),
            "cpu_ms": 1e3 * meter.between(first, last) / count,
            "steps": count,
            **snapshots_of(events),
        }
    return found


def shares(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """On as a share of off, in each round: the median and the least."""
    tokens = [each["on"]["tokens_per_s"] / each["off"]["tokens_per_s"] for each in rounds]
    cpu = [each["off"]["cpu_ms"] / each["on"]["cpu_ms"] for each in rounds]
    return {
        "rounds": len(rounds),
        "tokens_per_s": statistics.median(tokens),
        "tokens_per_s_least": min(tokens),
        "by_cpu": statistics.median(cpu),
        "by_cpu_least": min(cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", default="snapshot.enable", help="section and key; default: %(default)s")
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    args, args.flags = parser.parse_known_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(prefix="everstep-cost-") as home:
        for _ in range(args.rounds):
            rounds.append(measure(args, Path(home)))
            print(json.dumps(rounds[-1]), flush=True)
    print(json.dumps(shares(rounds)))


if __name__ == "__main__":
    main()
