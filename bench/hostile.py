"""Compare a live run's steps per second while a stranger holds connections to all its ports, to the run left alone.

    python bench/hostile.py [--groups 2] [--pairs 12] [--window 10] [--connections 1000]

Time windows of both kinds alternate in one run (alone, hostile, hostile, alone, …), and each hostile window is compared
to the one beside it. In a hostile window, a process without the run's token holds `--connections` connections to each
port on which a process of the run listens. A third of them have sent HTTP, a third noise, a third nothing. Every second
it replaces a hundred of them by new ones, and it asks the lighthouse to accept it as a replica, as torchft's replicas
do. It has the lowest priority (nice 19, in a separate session and autogroup), so that the benchmark measures what the
run spends on strangers, and not what they themselves take from this machine's cores. The steps are short, so that a
step is mostly protocol. `cpu_s_per_step`, the run's processor time, is still comparable if other work disturbs rates.
"""

import argparse
import contextlib
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
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil

from everstep.run.address import published_address
from everstep.run.events import read_events
from everstep.snapshot.peers import read_records

ROOT = Path(__file__).parents[1]
ENDINGS = {"workers_died", "workers_stalled", "lighthouse_died", "quorum_failed", "workers_started"}


SHORT_STEPS = ("--training.seq_len", "32", "--training.global_batch_size", "2", "--checkpoint.no-enable")


def lower_priority() -> None:
    """Give this process only the time that others leave. With autogroups (sched(7)), nice counts only in a session."""
    os.nice(19)
    with contextlib.suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")


Address = tuple[str, int]


def attack(places: list[Address], lighthouse: str, connections: int, orders) -> None:
    """On an order, connect to all ports, send the number of connections, and hold them until the next order."""
    from torchft.coordination import LighthouseClient

    lower_priority()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: deque[socket.socket] = deque()

    def intrude(place: Address, number: int) -> bool:
        host = place[0].removeprefix("::ffff:").replace("0.0.0.0", "127.0.0.1")
        try:
            held.append(socket.create_connection((host, place[1]), 0.3))
            held[-1].send([b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(64)][number % 3])
        except OSError:
            return False
        return True

    def intrude_everywhere() -> list[Address]:
        """Connect to all ports. Returns those that accept connections."""
        opened = []
        for place in places:
            failed = 0
            for number in range(connections):
                failed += not intrude(place, number)
                if failed > 3:  # the port accepts no connections
                    break
            else:
                opened.append(place)
        return opened

    while True:
        orders.recv()
        opened = intrude_everywhere()
        orders.send(len(held))
        while not orders.poll(0.1):
            for number in range(10):
                intrude(random.choice(opened), number)
                held.popleft().close()
            with contextlib.suppress(Exception):  # any answer will do
                client = LighthouseClient(lighthouse, timedelta(seconds=0.1))
                client.heartbeat("stray-job_0", timeout=timedelta(seconds=0.1))
        orders.recv()
        while held:
            held.popleft().close()
        orders.send(0)


def processes(launcher: int, run_dir: Path) -> list[psutil.Process]:
    """Return the processes of the run, keepers included."""
    with contextlib.suppress(psutil.NoSuchProcess):
        run = psutil.Process(launcher)
        pids = {run.pid, *(child.pid for child in run.children(recursive=True))}
        pids |= {place.pid for place in read_records(run_dir)}
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return []


def listens(process: psutil.Process) -> set[Address]:
    """Return the addresses on which a process listens."""
    with contextlib.suppress(psutil.NoSuchProcess):
        places = process.net_connections("tcp")
        return {(place.laddr[0], place.laddr[1]) for place in places if place.status == psutil.CONN_LISTEN}
    return set()


def cpu_s(launcher: int, run_dir: Path) -> float:
    """Return the processor seconds that the run's living processes have used so far."""
    used = 0.0
    for process in processes(launcher, run_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            used += sum(process.cpu_times()[:2])
    return used


def commits(run_dir: Path) -> list[float]:
    """Return the times of the run's steps, each by its first commit."""
    first: dict[int, float] = {}
    for event in read_events(run_dir, {"commit"}):
        first.setdefault(event["step"], event["mono"])
    return sorted(first.values())


@dataclass(frozen=True)
class Window:
    steps: int
    per_s: float
    cpu_s_per_step: float


def look(launcher: int, run_dir: Path, seconds: float) -> Window:
    """Watch the run for `seconds`. Returns its steps and processor time."""
    begin, used = time.monotonic(), cpu_s(launcher, run_dir)
    time.sleep(seconds)
    end, used = time.monotonic(), cpu_s(launcher, run_dir) - used
    times = [t for t in commits(run_dir) if begin <= t <= end]
    if len(times) < 2:
        raise RuntimeError(f"{len(times)} steps in {seconds} s are too few: set a longer --window")
    return Window(len(times), (len(times) - 1) / (times[-1] - times[0]), used / len(times))


def spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartile": low, "other quartile": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of windows")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    parser.add_argument("--connections", type=int, default=1000, help="connections to each port")
    args = parser.parse_args()
    run_dir = Path(tempfile.mkdtemp()) / "run"
    command = [sys.executable, "-m", "everstep.cli", "run", str(ROOT / "configs/demo.toml"), "--steps", "1000000"]
    command += ["--groups", str(args.groups), "--run-dir", str(run_dir), *SHORT_STEPS]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the run as well
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, list[Window]] = {"alone": [], "hostile": []}
    try:
        while len(commits(run_dir)) < 50:
            if run.poll() is not None:
                raise RuntimeError("the run ended before its 50th step")
            time.sleep(1.0)
        began = Counter(event["kind"] for event in read_events(run_dir, ENDINGS))
        ours = processes(run.pid, run_dir)
        places = sorted(set().union(*map(listens, ours)))
        print(f"{len(places)} ports of {len(ours)} processes", flush=True)
        context = multiprocessing.get_context("spawn")
        orders, theirs = context.Pipe()
        held, most, told = 0, 0, (places, published_address(run_dir), args.connections, theirs)
        attacker = context.Process(target=attack, args=told, daemon=True)
        attacker.start()
        theirs.close()  # so that the death of the attacker reads as an end of file
        for number in range(args.pairs):
            for kind in list(found)[:: 1 if number % 2 == 0 else -1]:
                if (kind == "hostile") != bool(held):
                    orders.send("go on")
                    held = orders.recv()
                    most = max(most, held)
                found[kind].append(look(run.pid, run_dir, args.window))
            quiet, hostile = (found[kind][-1].per_s for kind in found)
            print(f"alone {quiet:.2f}, hostile {hostile:.2f} steps/s, ratio {hostile / quiet:.3f}; {most}", flush=True)
        attacker.kill()
        ended = Counter(event["kind"] for event in read_events(run_dir, ENDINGS)) - began
        told = [event["reason"] for event in read_events(run_dir, {"stranger_refused"})]
        pairs = list(zip(*found.values(), strict=True))
        print(
            json.dumps(
                {
                    "connections": most,
                    "steps_a_window": statistics.median(w.steps for windows in found.values() for w in windows),
                    "steps_per_s": {k: statistics.median(w.per_s for w in windows) for k, windows in found.items()},
                    "ratio_of_rates": spread([hostile.per_s / alone.per_s for alone, hostile in pairs]),
                    "cpu_s_per_step": {
                        k: statistics.median(w.cpu_s_per_step for w in windows) for k, windows in found.items()
                    },
                    "ratio_of_cpu": spread([hostile.cpu_s_per_step / alone.cpu_s_per_step for alone, hostile in pairs]),
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
