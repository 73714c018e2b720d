"""What snapshots cost a real run: tokens per second and processor time, with them and without.

    python bench/snapshot_run.py [--config configs/demo.toml] [--groups 2] [--steps 60] [--rounds 2] [--json]
    python bench/snapshot_run.py --section attention_check --snapshot.no-enable   # the same of another section
    python bench/snapshot_run.py --alternate [--steps 200]     # one run with a snapshot at every second step

Both runs of a round go on at the same time, with the same steps and data and no checkpoints: a machine whose cores are
now faster and now slower is so for both. What counts is the time in which both train. Processor time is that of
launcher, agents, trainers and keepers in this time, for a step. Tokens per second are shared out by the system's
scheduler: who waits leaves the cores to the other.

`--alternate` compares neighbouring steps of one run: those in which a snapshot is copied with those in which none is.
What keepers do falls on both; their processor time is given as a share of all cores', to be counted in addition.
"""

import argparse
import contextlib
import json
import os
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
        self._last: dict[tuple[str, int], float] = {}
        self.seen: list[tuple[float, float, float]] = []
        """Wall clock, seconds of trainers and what is around them, seconds of keepers."""

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher)
            keepers = {place.pid for place in peers.read_places(self._run_dir)}
            pids = {process.pid for process in (launcher, *launcher.children(recursive=True))} - keepers
            for kind, many in (("trainers", pids), ("keepers", keepers)):
                for pid in many:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        used = psutil.Process(pid).cpu_times()
                        self._last[kind, pid] = used.user + used.system
        total = {kind: sum(s for (of, _), s in self._last.items() if of == kind) for kind in ("trainers", "keepers")}
        self.seen.append((time.time(), total["trainers"], total["keepers"]))

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """Seconds of trainers and of keepers between two moments."""
        first = min(self.seen, key=lambda seen: abs(seen[0] - begin))
        last = min(self.seen, key=lambda seen: abs(seen[0] - end))
        return last[1] - first[1], last[2] - first[2]


def run_once(args: argparse.Namespace, on: bool, home: Path, *more: str) -> tuple[list[dict[str, Any]], Meter]:
    """The events of one run, and what its processes took."""
    run_dir = home / f"run-{on}"
    shutil.rmtree(run_dir, ignore_errors=True)
    flags = ["--groups", str(args.groups), "--steps", str(args.steps), "--checkpoint.no-enable"]
    flags.append(f"--{args.section}.{'enable' if on else 'no-enable'}")
    command = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(run_dir), *flags, *more]
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


def snapshots_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those taken after the first steps."""
    return [event for event in events if event["kind"] == "snapshot" and event["step"] > WARM_UP]


def copied_in(taken: list[dict[str, Any]]) -> dict[str, float]:
    """How long trainers waited for snapshots, and how large those were."""
    blocked = [event["blocked_s"] for event in taken]
    return {
        "blocked_ms": 1e3 * statistics.median(blocked) if blocked else 0.0,
        "blocked_ms_longest": 1e3 * max(blocked, default=0.0),
        "mb": statistics.median(event["bytes"] for event in taken) / 1e6 if taken else 0.0,
    }


def alternate(args: argparse.Namespace, home: Path) -> dict[str, float]:
    """Steps with a snapshot and without, of one run."""
    events, meter = run_once(args, True, home, "--snapshot.interval", "2")
    at, _ = commits_of(events)
    taken = snapshots_of(events)
    copied = {event["step"] for event in taken}
    took = {step: at[step + 1] - at[step] for step in at if step + 1 in at}
    pairs = [(took[step - 1], took[step]) for step in sorted(copied) if step in took and step - 1 in took]
    _, keepers_s = meter.between(min(at.values()), max(at.values()))
    ratios = statistics.quantiles([without / with_one for without, with_one in pairs], n=4)
    return {
        "pairs": len(pairs),
        "tokens_per_s": ratios[1],
        "lower_quartile": ratios[0],
        "upper_quartile": ratios[2],
        "of_medians": statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs),
        "keepers_of_all_cores": keepers_s / (max(at.values()) - min(at.values())) / (os.cpu_count() or 1),
        "step_s": statistics.median(a for a, _ in pairs),
        **copied_in(taken),
    }


def measure(args: argparse.Namespace, home: Path) -> dict[str, dict[str, float]]:
    """Two runs side by side: tokens per second, processor time of a step, and what snapshots did."""
    with ThreadPoolExecutor(2) as pool:
        runs = dict(zip(("without", "with"), pool.map(lambda on: run_once(args, on, home), (False, True)), strict=True))
    commits = {which: commits_of(events) for which, (events, _) in runs.items()}
    begin = max(min(at.values()) for at, _ in commits.values())
    end = min(max(at.values()) for at, _ in commits.values())
    found = {}
    for which, (events, meter) in runs.items():
        at, tokens = commits[which]
        steps = sorted(step for step, t in at.items() if begin <= t <= end)
        first, last, count = at[steps[0]], at[steps[-1]], len(steps) - 1
        trainers_s, keepers_s = meter.between(first, last)
        taken = snapshots_of(events)
        found[which] = {
            "tokens_per_s": sum(tokens[step] for step in steps[1:]) / (last - first),
            "cpu_ms": 1e3 * (trainers_s + keepers_s) / count,
            "keepers_cpu_ms": 1e3 * keepers_s / count,
            "snapshots": len({event["step"] for event in taken}),
            "of_steps": count,
            **copied_in(taken),
        }
    return found


def shares(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """With the section as a share of without, in each round: the median and the least."""
    tokens = [each["with"]["tokens_per_s"] / each["without"]["tokens_per_s"] for each in rounds]
    cpu = [each["without"]["cpu_ms"] / each["with"]["cpu_ms"] for each in rounds]
    return {
        "rounds": len(rounds),
        "tokens_per_s": statistics.median(tokens),
        "tokens_per_s_least": min(tokens),
        "by_cpu": statistics.median(cpu),
        "by_cpu_least": min(cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--section", default="snapshot", help="of the config, whose `enable` is switched")
    parser.add_argument("--alternate", action="store_true", help="compare neighbouring steps of one run")
    parser.add_argument("--json", action="store_true")
    args, args.flags = parser.parse_known_args()
    home = Path(tempfile.mkdtemp(prefix="everstep-cost-"))
    rounds: list[dict[str, Any]] = []
    try:
        if args.alternate:
            found_here = alternate(args, home)
            print(json.dumps(found_here) if args.json else {name: round(v, 4) for name, v in found_here.items()})
            return
        for _ in range(args.rounds):
            rounds.append(measure(args, home))
            for which, numbers in rounds[-1].items() if not args.json else ():
                print(which, {name: round(value, 2) for name, value in numbers.items()}, flush=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    if args.json:
        print(json.dumps({"rounds": rounds, "share": shares(rounds)}))
    else:
        print({name: round(value, 4) for name, value in shares(rounds).items()})


if __name__ == "__main__":
    main()
