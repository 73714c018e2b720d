"""Lighthouses that are killed, frozen, doubled and moved while steps are slow: the run's own, as `everstep lighthouse`
keeps them up, behind their gates; real groups, Gloo and a model of four numbers."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from everstep.run.events import read_events
from harness import ENDLESS, check_states, newest

CONFIG = """
[fault_tolerance]
enable = true
groups = 3
heartbeat_timeout_s = 2.0
join_timeout_s = 4.0
"""
GROUPS = 3
STALL_S = 120.0


class Beacons:
    """`everstep lighthouse`, once or twice, on one run directory."""

    def __init__(self, run_dir):
        self.run_dir, self.running = run_dir, []
        (run_dir / "run.toml").write_text(CONFIG)
        self.start()

    def start(self):
        before = self.published()
        words = [sys.executable, "-m", "everstep.cli", "lighthouse", str(self.run_dir / "run.toml")]
        words += ["--run-dir", str(self.run_dir), "--groups", str(GROUPS), "--host", "127.0.0.1"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.running.append(subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env))
        deadline = time.monotonic() + 180
        while self.published() == before:
            assert time.monotonic() < deadline, "the lighthouse did not start"
            time.sleep(0.05)

    def published(self):
        found = [e["epoch"] for e in read_events(self.run_dir) if e["kind"] == "lighthouse_started"]
        return max(found, default=0)

    def lighthouse(self, beacon):
        """The lighthouse's own process, below the one that keeps it up."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(beacon.pid).children()[0]
        return None

    def signal(self, beacon, signum):
        process = self.lighthouse(beacon)
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def alive(self):
        self.running = [beacon for beacon in self.running if beacon.poll() is None]
        return self.running

    def end(self, beacon):
        """At once, with its lighthouse, as a host that is gone."""
        below = psutil.Process(beacon.pid).children()
        beacon.kill()
        for process in below:
            process.kill()
        beacon.wait()

    def close(self):
        for beacon in self.alive():
            os.kill(beacon.pid, signal.SIGCONT)
            self.end(beacon)


def kill(beacons, draw):
    beacons.signal(beacons.alive()[-1], signal.SIGKILL)


def freeze(beacons, draw):
    """For less or for more than its keeper has patience."""
    beacon = beacons.alive()[-1]
    beacons.signal(beacon, signal.SIGSTOP)
    time.sleep(draw.uniform(1, 20))
    beacons.signal(beacon, signal.SIGCONT)


def double(beacons, draw):
    """The older one does not see that there is another: whoever keeps it up is stopped."""
    older = beacons.alive()[-1]
    os.kill(older.pid, signal.SIGSTOP)
    beacons.start()
    time.sleep(draw.uniform(0, 8))
    os.kill(older.pid, signal.SIGCONT)


def move(beacons, draw):
    beacons.end(beacons.alive()[-1])
    time.sleep(draw.uniform(0, 5))
    beacons.start()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("times", "ranks"), [(50, 1), (25, 2)])
def test_no_sum_over_two_histories_and_every_split_is_named(begin, times, ranks):
    run = begin(published=True)
    beacons = Beacons(run.run_dir)
    try:
        draw = random.Random(times)
        options = {"slots": 6, "slot_s": 0.4, "quorum_s": 20, "reduce_s": 6, "heal_s": 20, "connect_s": 1, "audit": 5}
        groups = [run.ranks(number, ranks, steps=ENDLESS, **options) for number in range(GROUPS)]
        everyone = [rank for group in groups for rank in group]
        for rank in everyone:
            rank.ready()
            rank.first()
        done, begun, longest = {}, newest(everyone), 0.0
        for number in range(times):
            fault = [kill, freeze, double, move][number % 4]
            fault(beacons, draw)
            done[fault.__name__] = done.get(fault.__name__, 0) + 1
            last, since = newest(everyone), time.monotonic()
            soon = last + draw.choice([0, 1, 2])
            while newest(everyone) < soon:
                assert time.monotonic() - since < STALL_S, f"no commit after step {last}; done: {done}"
                time.sleep(0.05)
            longest = max(longest, time.monotonic() - since)
            assert all(rank.process.is_alive() for rank in everyone), "no group has to end for a lighthouse"
        goal = newest(everyone) + 5
        for rank in everyone:
            rank.until(goal)
        parents = {}
        for rank in everyone:
            check_states(rank)
            for step, commit in rank.commits.items():
                parents.setdefault((step, commit["history"]), set()).add(commit["parent"])
        assert all(len(found) == 1 for found in parents.values()), "one history, one way to it"
        # Back from the end: which histories led there, and who committed in others.
        final, history = {}, everyone[0].commits[goal]["history"]
        for step in range(goal, 0, -1):
            final[step] = history
            history = next(iter(parents.get((step, history), {0})))
        left = run.events("history_left")
        splits = 0
        for number, group in enumerate(groups):
            aside = [step for step, commit in group[0].commits.items() if commit["history"] != final.get(step)]
            splits += len(aside)
            for step in aside:
                assert any(event["group"] == number and event["step"] >= step for event in left), f"step {step} unnamed"
        print(
            f"{GROUPS} groups of {ranks}: {done}, steps {begun} to {goal}, commits in another history {splits}, "
            f"told {len(left)}, at most {longest:.1f} s for up to two steps after a fault"
        )
    finally:
        beacons.close()
