"""Measure what a config switch costs a real run, in tokens per second and processor time; and, with --kills, how many
steps are lost with a host.

    python bench/switch.py [--switch snapshot.enable] [--groups 2] [--steps 60] [--rounds 2]
    python bench/switch.py --switch fault_tolerance.exact     # all other flags go to both runs
    python bench/switch.py --kills 30 --life-s 20             # one run with the switch on, no rounds

A round consists of two runs, one with the switch on and one with it off, with the same steps and data and without
checkpoints. They run at the same time, so that changes of the machine's speed affect both. Only the time in which both
train counts. Processor time is that of launcher, trainers and keepers in this time, per step. The system's scheduler
shares the cores between the runs: a run that waits leaves them to the other. With `--apart`, for states of which only
one run's fits into memory, the runs follow each other; the machine must then be idle. Each group counts as a host, so
that snapshots are coded as between hosts.

`--kills`: kills all trainers, and a random host's keeper with its memory, at random moments of one run, which is then
started again. A step is lost if it was committed before and is made again.
"""

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from everstep.report.protection import Protection
from everstep.run.events import read_events
from everstep.snapshot import peers

LOOK_S = 0.2
ENDLESS = 1_000_000
STARTS_S = 300.0
"""Seconds that a run has for its first step, even on a busy machine."""


class Meter:
    """Samples the processor seconds of a run's processes. A process that has ended counts as in its last sample."""

    def __init__(self, run_dir: Path, launcher: int) -> None:
        self._run_dir, self._launcher = run_dir, launcher
        self._last: dict[int, float] = {}
        self.seen: list[tuple[float, float]] = []
        """Wall clock, and processor seconds of all processes."""

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._launcher)
            keepers = {place.pid for place in peers.read_records(self._run_dir)}
            for pid in keepers | {process.pid for process in (launcher, *launcher.children(recursive=True))}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    used = psutil.Process(pid).cpu_times()
                    self._last[pid] = used.user + used.system
        self.seen.append((time.time(), sum(self._last.values())))

    def between(self, begin: float, end: float) -> float:
        """Return the processor seconds between two moments."""
        first = min(self.seen, key=lambda seen: abs(seen[0] - begin))
        last = min(self.seen, key=lambda seen: abs(seen[0] - end))
        return last[1] - first[1]


@dataclass
class Started:
    """A run, and the launcher of its newest start."""

    directory: Path
    process: subprocess.Popen[bytes]


def started(args: argparse.Namespace, on: bool, home: Path) -> Started:
    """Start a run with the switch on or off, or continue it."""
    directory = home / f"run-{on}"
    section, _, key = args.switch.partition(".")
    steps = ENDLESS if args.kills else args.steps
    flags = ["--groups", str(args.groups), "--steps", str(steps), "--checkpoint.no-enable"]
    flags += ["--snapshot.failure_domain", "group", f"--{section}.{'' if on else 'no-'}{key}"]
    command = [sys.executable, "-m", "everstep.cli", "run", str(args.config), "--run-dir", str(directory), *flags]
    with (home / "log").open("ab") as log:
        return Started(directory, subprocess.Popen([*command, *args.flags], stdout=log, stderr=log))


def run_once(args: argparse.Namespace, on: bool, home: Path) -> tuple[list[dict[str, Any]], Meter]:
    """Run once. Returns the run's events, and a meter of its processes."""
    shutil.rmtree(home / f"run-{on}", ignore_errors=True)
    run = started(args, on, home)
    meter = Meter(run.directory, run.process.pid)
    while run.process.poll() is None:
        meter.look()
        time.sleep(LOOK_S)
    if run.process.returncode:
        raise RuntimeError((home / "log").read_text()[-2000:])
    return list(read_events(run.directory)), meter


def commits_of(events: list[dict[str, Any]], after: int = 0) -> tuple[dict[int, float], dict[int, float]]:
    """Return, for steps above `after`, step -> time of the first commit, and step -> tokens."""
    at: dict[int, float] = {}
    tokens: dict[int, float] = {}
    for event in events:
        if event["kind"] == "commit" and event["step"] > after:
            at[event["step"]] = min(event["t"], at.get(event["step"], event["t"]))
            tokens[event["step"]] = event["tokens"]
    return at, tokens


def snapshots_of(events: list[dict[str, Any]], after: int) -> dict[str, float]:
    """Return how many snapshots were taken of steps above `after`, how many of them were coded, how long trainers
    waited for them, and how large they were."""
    taken = [event for event in events if event["kind"] == "snapshot" and event["step"] > after]
    if not taken:
        return {}
    blocked = [event["blocked_s"] for event in taken]
    coded = {e["step"] for e in events if e["kind"] == "snapshot_protected" and e["survives"] and e["step"] > after}
    return {
        "snapshots": len({event["step"] for event in taken}),
        "coded": len(coded),
        "blocked_ms": 1e3 * statistics.median(blocked),
        "blocked_ms_longest": 1e3 * max(blocked),
        "mb": statistics.median(event["bytes"] for event in taken) / 1e6,
    }


def measure(args: argparse.Namespace, home: Path) -> dict[str, dict[str, float]]:
    """Make two runs. Returns, for each, tokens per second, processor time of a step, and figures of snapshots."""
    with ThreadPoolExecutor(1 if args.apart else 2) as pool:
        runs = dict(zip(("off", "on"), pool.map(lambda on: run_once(args, on, home), (False, True)), strict=True))
    commits = {which: commits_of(events, args.warm_up) for which, (events, _) in runs.items()}
    begin, end = (0.0, math.inf) if args.apart else (
        max(min(at.values()) for at, _ in commits.values()), min(max(at.values()) for at, _ in commits.values())
    )  # fmt: skip
    found = {}
    for which, (events, meter) in runs.items():
        at, tokens = commits[which]
        steps = sorted(step for step, t in at.items() if begin <= t <= end)
        first, last, count = at[steps[0]], at[steps[-1]], len(steps) - 1
        found[which] = {
            "tokens_per_s": sum(tokens[step] for step in steps[1:]) / (last - first),
            "cpu_ms": 1e3 * meter.between(first, last) / count,
            "steps": count,
            **snapshots_of(events, args.warm_up),
        }
    return found


def shares(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return medians and minima of the rounds: tokens per second on / off, and processor time of a step off / on."""
    tokens = [each["on"]["tokens_per_s"] / each["off"]["tokens_per_s"] for each in rounds]
    cpu = [each["off"]["cpu_ms"] / each["on"]["cpu_ms"] for each in rounds]
    return {
        "rounds": len(rounds),
        "tokens_per_s": statistics.median(tokens),
        "tokens_per_s_least": min(tokens),
        "by_cpu": statistics.median(cpu),
        "by_cpu_least": min(cpu),
    }


def killed(args: argparse.Namespace, home: Path) -> Iterator[dict[str, Any]]:
    """Kill a run and start it again, many times. Yields what each kill lost. At the end all of the run is killed."""
    chance = random.Random(args.seed)
    last = protected = 0
    apart = 0.0
    for number in range(args.kills + 1):
        began, run = time.time(), started(args, True, home)
        try:
            until_commit(run, began, home)
            time.sleep(chance.uniform(0.0, args.life_s) if number < args.kills else 0.0)
        finally:
            places = peers.read_records(run.directory)
            host = chance.choice([place.segment for place in places] or [""])
            kill(run, places, {host} if number < args.kills else {place.segment for place in places})
        events = [event for event in read_events(run.directory) if event["t"] > began]
        at, _ = commits_of(events)
        if number:
            restored = min(at) - 1
            source = next(event["source"] for event in events if event["kind"] == "recovery")
            lost = {"lost": last - restored, "protected_lost": max(0, protected - restored), "source": source}
            yield {**lost, "step_s": apart, "back_s": min(at.values()) - began}
        last, said = max(at), Protection()
        for event in events:
            said.take(event)
        protected = said.step
        apart = (at[last] - min(at.values())) / max(1, len(at) - 1)


def until_commit(run: Started, began: float, home: Path) -> None:
    """Wait until the run has committed a step after `began`."""
    while not any(event["t"] > began for event in read_events(run.directory, {"commit"})):
        if run.process.poll() is not None or time.time() > began + STARTS_S:
            raise RuntimeError((home / "log").read_text()[-2000:])
        time.sleep(LOOK_S)


def kill(run: Started, places: list[peers.KeeperRecord], segments: set[str]) -> None:
    """SIGKILL launcher, agents, lighthouse, trainers and the keepers of these segments; remove these segments."""
    spared = {place.pid for place in places if place.segment not in segments}
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(run.process.pid)
        doomed = {process.pid for process in (launcher, *launcher.children(recursive=True))}
        for pid in (doomed | {place.pid for place in places}) - spared:  # keepers are trainers' children
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    run.process.wait()
    for segment in segments:
        shutil.rmtree(segment, ignore_errors=True)


def losses(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize all kills."""
    lost = [each["lost"] for each in kills]
    return {
        "kills": len(kills),
        "lost_most": max(lost),
        "lost_median": statistics.median(lost),
        "protected_lost": sum(each["protected_lost"] for each in kills),
        "sources": dict(Counter(each["source"] for each in kills)),
        "step_s": statistics.median(each["step_s"] for each in kills),
        "back_s": statistics.median(each["back_s"] for each in kills),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", default="snapshot.enable", help="its section and key; default: %(default)s")
    parser.add_argument("--config", type=Path, default=Path("configs/demo.toml"))
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=10, help="steps that are not counted; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--apart", action="store_true", help="one run after the other")
    parser.add_argument("--kills", type=int, default=0, help="kills to make, instead of rounds")
    parser.add_argument("--life-s", type=float, default=20.0, help="most seconds between the first step and a kill")
    parser.add_argument("--seed", type=int, default=0)
    args, args.flags = parser.parse_known_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="everstep-cost-") as name:
        home = Path(name)
        for each in killed(args, home) if args.kills else (measure(args, home) for _ in range(args.rounds)):
            found.append(each)
            print(json.dumps(each), flush=True)
    print(json.dumps(losses(found) if args.kills else shares(found)))


if __name__ == "__main__":
    main()
