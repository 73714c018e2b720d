"""Many deaths and stops of single ranks, at random instants, in groups of several ranks: real processes, Gloo and
lighthouse, a model of four numbers. The agent's part, ending the siblings of a dead rank and starting the group again,
is done here."""

import contextlib
import os
import random
import signal
import time

import pytest

from harness import ENDLESS, check_states, newest

OPTIONS = {"steps": ENDLESS, "slots": 6, "slot_s": 0.02, "quorum_s": 8, "reduce_s": 4, "heal_s": 6, "audit": 5}
STALL_S = 20.0
"""Longest time without a commit of anybody: what stops a group is seen by its siblings and peers much sooner."""


class Kept:
    """A group that is started again when one of its ranks has died."""

    def __init__(self, run, number, ranks):
        self.run, self.number, self.size = run, number, ranks
        self.lives = []
        self.start()

    def start(self):
        self.ranks = self.run.ranks(self.number, self.size, **OPTIONS)
        self.doomed = False  # a killed process takes a while to be gone on a busy machine
        self.lives.append(self.ranks)

    @property
    def trains(self):
        return not self.doomed and all(rank.commits for rank in self.ranks)

    def look(self, draw):
        for rank in self.ranks:
            rank.catch_up()
        dead = [rank for rank in self.ranks if not rank.process.is_alive()]
        if dead:
            # With -s: who ended how, for a run that fails.
            print(f"group {self.number}", [(rank.process.exitcode, rank.end) for rank in self.ranks], flush=True)
            time.sleep(draw.uniform(0.005, 0.05))
            for rank in self.ranks:
                rank.kill()
                rank.catch_up()
                check_states(rank)
            self.start()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("groups", "ranks", "kills", "stops"), [(3, 2, 60, 12), (3, 2, 200, 40), (2, 4, 100, 20)])
def test_no_kill_and_no_stop_of_a_rank_costs_a_step(begin, groups, ranks, kills, stops):
    run = begin(join_timeout_s=3.0, heartbeat_timeout_s=1.0)
    draw = random.Random(groups * 100 + ranks)
    kept = [Kept(run, number, ranks) for number in range(groups)]
    faults = ["kill"] * kills + ["stop"] * stops
    draw.shuffle(faults)
    longest, progress, last = 0.0, time.monotonic(), 0
    waking, due = [], time.monotonic() + 8
    done = {"kill": 0, "stop": 0}
    while faults or waking:
        for group in kept:
            group.look(draw)
        for until, pid in list(waking):
            if time.monotonic() > until:
                waking.remove((until, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if (step := newest([rank for group in kept for rank in group.ranks])) > last:
            longest, progress, last = max(longest, time.monotonic() - progress), time.monotonic(), step
        assert time.monotonic() - progress < STALL_S + 12, f"no commit after step {last}; done: {done}"
        able = [group for group in kept if group.trains]
        if faults and time.monotonic() > due and len(able) > 1:
            fault, hit = faults.pop(), draw.choice(able)
            victim = draw.choice(hit.ranks).process
            hit.doomed = fault == "kill"
            os.kill(victim.pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
            done[fault] += 1
            pause_s = draw.uniform(1, 12) if fault == "stop" else 0.0
            if fault == "stop":
                waking.append((time.monotonic() + pause_s, victim.pid))
            due = time.monotonic() + draw.uniform(0.1, 2.5)
        time.sleep(0.01)
    goal = newest([rank for group in kept for rank in group.ranks]) + 5
    while not all(rank.commits and max(rank.commits) >= goal for group in kept for rank in group.ranks):
        for group in kept:
            group.look(draw)
        assert time.monotonic() - progress < 120, "not all groups came back"
        time.sleep(0.05)
    for group in kept:
        for life in group.lives:
            for rank in life:
                check_states(rank)
    histories = {}
    for group in kept:
        for life in group.lives:
            for rank in life:
                for step, commit in rank.commits.items():
                    histories.setdefault((step, commit["history"]), set()).add(commit["parent"])
    assert all(len(parents) == 1 for parents in histories.values()), "one history, one way to it"
    recomputed = sum(len(event["recomputed"]) for event in run.events("attempt"))
    print(
        f"{groups} groups of {ranks}: {done}, {last} steps, longest without a commit {longest:.1f} s, "
        f"{sum(len(group.lives) for group in kept)} lives, slots given up and computed again {recomputed}"
    )
