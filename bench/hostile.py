"""Steps a second of a live run while strangers hold connections to every port of it, against the same run left alone.

    python bench/hostile.py [--groups 2] [--rounds 6] [--window 12] [--connections 1000]

Windows of both kinds take turns in one run. In a hostile one, a process without the run's token opens so many
connections to each port that a process of the run listens on, holds them, sends on a third of them HTTP, on a third
noise, on a third nothing; opens a hundred more every second instead of old ones; and poses as a replica at the
lighthouse ten times a second. It runs at a lower priority (nice): what is measured is what the run spends on strangers
and not what they spend themselves on this machine's cores. `cpu_s_per_step` is what the run's processes used; it tells
the same where other work disturbs the rates.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import psutil

from everstep.run.address import published_address
from everstep.run.events import read_events
from everstep.run.listeners import Listener, listeners, processes
from everstep.snapshot.peers import read_places

ROOT = Path(__file__).parents[1]
ENDINGS = {"workers_died", "workers_stalled", "agent_died", "lighthouse_died", "quorum_failed", "workers_started"}


def lower_priority() -> None:
    """What this process does is left over by others. Under autogroups (sched(7)) nice counts within a session only."""
    os.nice(10)
    with contextlib.suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("10")


def attack(places: Iterable[Listener], lighthouse: str, connections: int, ready, over) -> None:
    """Connect to everything, say when, and hold it."""
    from torchft.coordination import LighthouseClient

    lower_priority()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: deque[socket.socket] = deque()

    def intrude(place: Listener, number: int) -> bool:
        host = place.address.removeprefix("::ffff:").replace("0.0.0.0", "127.0.0.1")
        try:
            held.append(socket.create_connection((host, place.port), 0.3))
            held[-1].send([b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64)][number % 3])
        except OSError:
            return False
        return True

    opened = []
    for place in places:
        failed = 0
        for number in range(connections):
            failed += not intrude(place, number)
            if failed > 3:  # a port that lets nobody in
                break
        else:
            opened.append(place)
    ready.put(len(held))
    while not over.wait(0.1):
        for number in range(10):
            intrude(random.choice(opened), number)
            held.popleft().close()
        with contextlib.suppress(Exception):  # whatever it answers
            LighthouseClient(lighthouse, timedelta(seconds=1)).heartbeat("stray-job_0", timeout=timedelta(seconds=1))


def cpu_s(run_dir: Path) -> float:
    """Processor seconds that the run's processes, keepers included, have used so far."""
    pids = {pid for _, pid in processes(run_dir)} | {place.pid for place in read_places(run_dir)}
    used = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(psutil.Process(pid).cpu_times()[:2])
    return used


def commits(run_dir: Path) -> list[float]:
    """Times of the run's steps, once each."""
    first: dict[int, float] = {}
    for event in read_events(run_dir, {"commit"}):
        first.setdefault(event["step"], event["mono"])
    return sorted(first.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--window", type=float, default=12.0, help="seconds")
    parser.add_argument("--connections", type=int, default=1000)
    args = parser.parse_args()
    run_dir = Path(tempfile.mkdtemp()) / "run"
    command = [sys.executable, "-m", "everstep.cli", "run", str(ROOT / "configs/demo.toml"), "--steps", "1000000"]
    command += ["--groups", str(args.groups), "--run-dir", str(run_dir)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the run as well
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    context = multiprocessing.get_context("spawn")
    held = 0
    rows: dict[str, list[list[float]]] = {"alone": [], "hostile": []}
    spent: dict[str, list[float]] = {"alone": [], "hostile": []}
    try:
        while len(commits(run_dir)) < 20:
            if run.poll() is not None:
                raise RuntimeError("the run ended before its 20th step")
            time.sleep(1.0)
        began = Counter(event["kind"] for event in read_events(run_dir, ENDINGS))
        keepers = [("keeper", place.pid) for place in read_places(run_dir)]
        places = sorted({(p.address, p.port): p for p in listeners([*processes(run_dir), *keepers])}.values())
        print(f"{len(places)} ports of {len({p.pid for p in places})} processes")
        for _ in range(args.rounds):
            for kind in rows:
                over, ready = context.Event(), context.Queue()
                attacker = context.Process(
                    target=attack, args=(places, published_address(run_dir), args.connections, ready, over)
                )
                if kind == "hostile":
                    attacker.start()
                    held = ready.get()
                begin, used = time.monotonic(), cpu_s(run_dir)
                time.sleep(args.window)
                end, used = time.monotonic(), cpu_s(run_dir) - used
                if kind == "hostile":
                    over.set()
                    attacker.join()
                times = [t for t in commits(run_dir) if begin <= t <= end]
                spent[kind].append(used / max(1, len(times)))
                rows[kind].append([b - a for a, b in itertools.pairwise(times)])
            quiet, hostile = (len(rows[kind][-1]) / args.window for kind in rows)
            print(f"alone {quiet:.2f}, with {held} hostile connections {hostile:.2f} steps/s", flush=True)
        ended = Counter(event["kind"] for event in read_events(run_dir, ENDINGS)) - began
        told = [event["reason"] for event in read_events(run_dir, {"stranger_refused"})]
        medians = {kind: statistics.median(gap for window in rows[kind] for gap in window) for kind in rows}
        rates = {kind: statistics.median(len(window) / args.window for window in rows[kind]) for kind in rows}
        print(
            json.dumps(
                {
                    "steps": sum(len(window) for kind in rows for window in rows[kind]),
                    "median_step_s": medians,
                    "steps_per_s": rates,
                    "cpu_s_per_step": {kind: statistics.median(spent[kind]) for kind in rows},
                    "ratio_of_medians": medians["alone"] / medians["hostile"],
                    "ratio_of_rates": rates["hostile"] / rates["alone"],
                    "ended": dict(ended),
                    "alive": run.poll() is None,
                    "told": told[:1],
                }
            )
        )
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.wait()
        shutil.rmtree(run_dir.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
