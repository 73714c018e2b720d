"""Measure how long a quorum takes with many groups: one real lighthouse behind its gate, real members, no training.

    python bench/quorum_scale.py [--groups 4 16 64 128 256] [--seconds 45] [--step 1.0] [--every-step] [--plot FILE]

Each simulated group is a thread with the `Membership` of a real group. It asks for a quorum, "computes" steps of STEP
seconds, and asks again if a group dies or another one waits for a quorum; with --every-step, before each step. A real
group learns of this from a step's tally, a simulated one from a shared counter. The latency is the time from a group's
request to the quorum. There are two series for each number of groups. In the first no group dies. In the second one
group dies every second (its heartbeats end, as if its processes were killed), and joins again DOWN_S later.

The lighthouse runs in a separate process, and GROUPS_PER_PROCESS groups share one. All processes share this machine's
cores, unlike those of a real run, so the processor time per quorum is printed too, of lighthouse and groups.
"""

import argparse
import math
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from statistics import mean, quantiles

import psutil

from everstep.quorum.errors import QuorumUnavailable
from everstep.quorum.membership import Membership
from everstep.quorum.request import NOTHING, Request, State, read_quorum
from everstep.run.directory import prepared_file
from everstep.run.files import write_json

GROUPS_PER_PROCESS = 64
HEARTBEAT_TIMEOUT_S = 2.0
JOIN_TIMEOUT_S = 10.0
DOWN_S = 4.0
WARM_UP_ROUNDS = 3
LOOK_S = 0.05
TIMEOUT = timedelta(seconds=20)
TOKEN = bytes(range(32))


@dataclass(frozen=True)
class Series:
    """Quorums with one number of groups: latencies in seconds, NaN if there are none; requests of all groups for each
    step; processor seconds of a quorum, of the lighthouse with its gate and of all clients; the lighthouse's memory in
    bytes."""

    groups: int
    deaths_per_s: float
    quorums: int
    asks_per_step: float
    p50_s: float
    p99_s: float
    max_s: float
    members_mean: float
    lighthouse_s: float
    clients_s: float
    lighthouse_rss: int


def request_of(group: int, life: str, number: int, step: int) -> Request:
    """Return the request for the `number`th quorum of a group that lost nothing."""
    store = f"127.0.0.1:{20000 + group}"
    return Request(
        group=group,
        life=life,
        number=number,
        state=State(step, 1),
        follows=NOTHING,
        finishing=False,
        connected="",
        store=store,
        state_addresses=(store,),
    )


@dataclass(frozen=True)
class Setting:
    """What all groups share. `changes`: how often a group noticed that the membership changed."""

    lighthouse: str
    step_s: float
    seconds: float
    every_step: bool
    changes: Synchronized
    ready: Semaphore

    def change(self) -> None:
        with self.changes.get_lock():
            self.changes.value += 1


class Group(threading.Thread):
    """One simulated group. `waits`: (step, members, seconds) of its quorums. `steps`, `asks`: steps and requests."""

    def __init__(self, group: int, setting: Setting, end: float) -> None:
        super().__init__(name=f"group-{group}", daemon=True)
        self.group, self._setting, self._end = group, setting, end
        self._doomed = threading.Event()
        self.waits: list[tuple[int, int, float]] = []
        self.steps = self.asks = 0

    def die(self) -> None:
        self._doomed.set()

    def run(self) -> None:
        step, number, incarnation, seen = 0, 0, 0, -1
        membership, setting = self._live(incarnation), self._setting
        while time.monotonic() < self._end:
            if self._doomed.is_set():
                self._doomed.clear()
                membership.leave()
                setting.change()
                time.sleep(DOWN_S)
                incarnation, seen = incarnation + 1, -1
                membership = self._live(incarnation)
            if membership.wanted and seen == setting.changes.value:
                setting.change()
            if seen == setting.changes.value and not setting.every_step:
                self.steps += 1  # `step` stays: all groups step together, and it only tells who missed a quorum
                until = time.monotonic() + setting.step_s
                while seen == setting.changes.value and time.monotonic() < until:
                    time.sleep(LOOK_S)  # in a real run, closed connections end a step at once
                continue
            number += 1
            seen = setting.changes.value
            self.asks += 1
            request = request_of(self.group, str(incarnation), number, step)
            asked = time.monotonic()
            try:
                quorum = read_quorum(*membership.ask(request, TIMEOUT))
            except (QuorumUnavailable, ValueError):
                seen = -1
                continue
            waited = time.monotonic() - asked
            heals = quorum.state.step > step
            step = quorum.state.step + 1
            # A healing group mainly waits for the others, so its wait does not measure the lighthouse.
            if not heals:
                self.waits.append((step, len(quorum.groups), waited))
            self.steps += 1
            time.sleep(setting.step_s)

    def _live(self, incarnation: int) -> Membership:
        return Membership(
            group=self.group,
            life=str(incarnation),
            token=TOKEN,
            find_lighthouse=lambda: self._setting.lighthouse,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        )


def crowd(groups: range, setting: Setting, deaths_per_s: float, results: multiprocessing.Queue) -> None:
    """Run the groups of one process. Puts into `results` their waits, and the steps and requests after all groups had
    made WARM_UP_ROUNDS steps. Does not stop the groups."""
    step_s, end = setting.step_s, time.monotonic() + setting.seconds
    members = [Group(group, setting, end) for group in groups]
    for member in members:
        member.start()
    chooser = random.Random(groups.start)
    while any(member.steps < WARM_UP_ROUNDS for member in members):
        time.sleep(step_s)
    before = [sum(member.steps for member in members), sum(member.asks for member in members)]
    setting.ready.release()
    while time.monotonic() < end:
        time.sleep(1.0 / deaths_per_s if deaths_per_s else step_s)
        if deaths_per_s:
            chooser.choice(members).die()
    steps, asks = sum(member.steps for member in members), sum(member.asks for member in members)
    results.put(([wait for member in members for wait in member.waits], steps - before[0], asks - before[1]))


def measure(groups: int, options: argparse.Namespace, deaths_per_s: float) -> Series:
    """Measure one series: quorums of `groups` groups for options.seconds."""
    lighthouse, address = start_lighthouse(groups)
    context = multiprocessing.get_context("spawn")
    results, ready = context.Queue(), context.Semaphore(0)
    changes = context.Value("i", 0)
    setting = Setting(address, options.step, options.seconds, options.every_step, changes, ready)
    parts = [range(first, min(first + GROUPS_PER_PROCESS, groups)) for first in range(0, groups, GROUPS_PER_PROCESS)]
    crowds = [
        # Each process has its share of the deaths.
        context.Process(target=crowd, args=(part, setting, deaths_per_s * len(part) / groups, results), daemon=True)
        for part in parts
    ]
    try:
        for process in crowds:
            process.start()
        for _ in crowds:
            ready.acquire()
        begin_s = processor_s([lighthouse.pid]), processor_s(process.pid for process in crowds)
        found = [results.get() for _ in crowds]
        end_s = processor_s([lighthouse.pid]), processor_s(process.pid for process in crowds)
        rss = psutil.Process(lighthouse.pid).memory_info().rss
    finally:
        for process in crowds:
            process.kill()
        lighthouse.kill()
        lighthouse.wait()
    counted = [wait for waits, _, _ in found for wait in waits if wait[0] > WARM_UP_ROUNDS]
    latencies = sorted(wait for _, _, wait in counted) or [math.nan, math.nan]
    cuts = quantiles(latencies, n=100, method="inclusive")
    quorums = len({step for step, _, _ in counted})
    lighthouse_s, clients_s = (
        round((end - begin) / quorums, 2) if quorums else math.nan for begin, end in zip(begin_s, end_s, strict=True)
    )
    return Series(
        groups=groups,
        deaths_per_s=deaths_per_s,
        quorums=quorums,
        asks_per_step=round(groups * sum(asks for _, _, asks in found) / sum(steps for _, steps, _ in found), 2),
        p50_s=round(cuts[49], 4),
        p99_s=round(cuts[98], 4),
        max_s=round(latencies[-1], 4),
        members_mean=round(mean(members for _, members, _ in counted), 1) if counted else groups,
        lighthouse_s=lighthouse_s,
        clients_s=clients_s,
        lighthouse_rss=rss,
    )


def processor_s(pids: Iterable[int | None]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def start_lighthouse(groups: int) -> tuple[subprocess.Popen, str]:
    """Start a lighthouse that waits for at least half of the groups. Returns its process and address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        bind = f"127.0.0.1:{free.getsockname()[1]}"
    run_dir = Path(tempfile.mkdtemp())
    (run_dir / "token").touch(0o600)
    (run_dir / "token").write_text(TOKEN.hex())
    command = [sys.executable, "-m", "everstep.quorum.lighthouse", "--bind", bind, "--min-groups", str(groups // 2)]
    write_json(prepared_file(run_dir), {"groups": groups})
    command += ["--run-dir", str(run_dir)]
    command += ["--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S), "--join-timeout-s", str(JOIN_TIMEOUT_S)]
    lighthouse = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert lighthouse.stdout is not None
    if "lighthouse on" not in (said := lighthouse.stdout.readline()):
        raise RuntimeError(f"the lighthouse did not start: {said}")
    return lighthouse, f"http://{bind}"


def plot(series: list[Series], path: Path) -> None:
    """Plot p50 and p99 against the number of groups, with and without deaths, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    styles = {False: ("#1f77b4", "nobody dies"), True: ("#d62728", "one group dies every second")}
    for dying, (colour, label) in styles.items():
        line = [s for s in series if bool(s.deaths_per_s) == dying]
        groups = [s.groups for s in line]
        axes.plot(groups, [s.p50_s for s in line], "o-", color=colour, label=f"{label}, p50")
        axes.plot(groups, [s.p99_s for s in line], "s--", color=colour, label=f"{label}, p99")
    axes.axhline(HEARTBEAT_TIMEOUT_S, color="grey", linewidth=0.8, linestyle=":", label="heartbeat timeout")
    axes.set(xscale="log", yscale="log", xlabel="groups", ylabel="seconds from request to quorum")
    ticks = sorted({s.groups for s in series})
    axes.set_xticks(ticks, [str(groups) for groups in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 16, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=45.0, help="length of a series")
    parser.add_argument("--step", type=float, default=1.0, help="seconds between quorums")
    parser.add_argument("--every-step", action="store_true", help="ask before each step, as if a group always waited")
    parser.add_argument("--plot", type=Path, help="where to write the SVG")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else soft, hard))
    os.environ["RUST_LOG"] = "error"
    os.environ.setdefault("TOKIO_WORKER_THREADS", "1")  # each manager server has its own runtime: 256 here
    series = []
    print(
        "groups  deaths/s  asks/step  quorums  members   p50 s   p99 s   max s  lighthouse s, clients s, MiB",
        flush=True,
    )
    for groups in args.groups:
        for deaths_per_s in (0.0, 1.0):
            found = measure(groups, args, deaths_per_s)
            series.append(found)
            print(
                f"{found.groups:6d}  {found.deaths_per_s:8.1f}  {found.asks_per_step:9.2f}  {found.quorums:7d}"
                f"  {found.members_mean:7.1f}"
                f"  {found.p50_s:6.3f}  {found.p99_s:6.3f}  {found.max_s:6.3f}"
                f"  {found.lighthouse_s:12.2f}  {found.clients_s:9.2f}  {found.lighthouse_rss >> 20:3d}",
                flush=True,
            )
    if args.plot:
        plot(series, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
