"""Real groups on a hostile network: packets between hosts are lost, delayed or go one way, fault after fault. Each
group has a host of its own (`switch`), and so has the lighthouse; the groups are those of `tests/step/member.py`."""

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path

import harness
import switch
from harness import Rank, Run, check_states, newest
from switch import NoNetworkError, Rule, Rules

HEARTBEAT_S, JOIN_S, CONNECT_S, REDUCE_S = 1.0, 2.0, 1.0, 2.0
SLOTS, SLOT_S = 6, 0.05
STEP_S = SLOTS * SLOT_S
"""The longest that a quiet step takes: one group makes all of it."""
FOUND_S = REDUCE_S + 0.5 + 3 * CONNECT_S + 1.5 * HEARTBEAT_S
"""Until a lost connection is found out (a sum may be given up half a second late), those that do not reach each other
are known, and the others have a quorum, for which the heartbeats of silent groups expire."""


def pair(draw: random.Random, groups: int, there: Rule, back: Rule | None) -> Rules:
    """One rule on the way from one drawn group to another, and one back."""
    one, other = draw.sample(range(groups), 2)
    return {(one, other): there} | ({} if back is None else {(other, one): back})


def around(host: int, hosts: int, rule: Rule) -> Rules:
    """A rule on all ways to and from a host."""
    return {way: rule for other in range(hosts) if other != host for way in ((host, other), (other, host))}


LOST, SLOW, LOSSY = Rule(lost=1.0), Rule(delay_s=0.1), Rule(lost=0.1)

KINDS: dict[str, Callable[[random.Random, int], Rules]] = {
    "cut": lambda draw, n: pair(draw, n, LOST, LOST),
    "one-way": lambda draw, n: pair(draw, n, LOST, None),
    "slow": lambda draw, n: pair(draw, n, SLOW, SLOW),
    "lossy": lambda draw, n: pair(draw, n, LOSSY, LOSSY),
    "unreached": lambda draw, n: around(draw.randrange(n), n, LOST),
    "gone": lambda draw, n: around(draw.randrange(n), n + 1, LOST),
    "silent": lambda draw, n: around(n, n + 1, LOST),
}
"""What a kind of fault makes of packets, drawn for so many groups; the lighthouse's host comes after theirs. unreached:
a group is cut off from the others and not from the lighthouse; gone: from both; silent: the lighthouse from all."""


def bound_s(kind: str, lasts_s: float) -> float:
    """The longest time without a commit that a fault may cause that lasts so long (docs/faults.md)."""
    silence_s = lasts_s + 1.0 + 2.5 * HEARTBEAT_S if kind == "silent" else 0.0
    return silence_s + FOUND_S + STEP_S


class Network:
    """Hosts between which packets can be lost. Raises NoNetworkError where this machine makes none."""

    def __init__(self, hosts: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=switch.run, args=(hosts, theirs), daemon=True)
        self._process.start()
        theirs.close()
        told = self._connection.recv()
        if isinstance(told, str):
            raise NoNetworkError(told)
        self.namespaces: list[str] = told

    def rule(self, rules: Rules) -> None:
        """From when this returns packets go as these rules say."""
        self._connection.send(rules)
        self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.join()


class Groups:
    """Groups on the hosts of a network, and their lighthouse on the last one."""

    def __init__(self, run_dir: Path, groups: int, ranks: int) -> None:
        self.count = groups
        self.network = Network(groups + 1)
        places = [{"host": switch.address(at), "namespace": name} for at, name in enumerate(self.network.namespaces)]
        self.run = Run(run_dir, join_timeout_s=JOIN_S, heartbeat_timeout_s=HEARTBEAT_S, **places[groups])
        waits = {"heartbeat": HEARTBEAT_S, "connect": CONNECT_S, "reduce": REDUCE_S, "quorum": 10, "startup": 75}
        settings = {f"{name}_timeout_s": seconds for name, seconds in waits.items()}
        self.ranks: list[Rank] = []
        for group in range(groups):
            self.ranks += self.run.ranks(group, ranks, slots=SLOTS, slot_s=SLOT_S, **settings, **places[group])
        for rank in self.ranks:
            rank.beyond()

    def commits(self) -> list[dict]:
        """All that was committed so far, in the order of time."""
        return sorted(self.run.events("applied"), key=lambda one: one["mono"])

    def suffer(self, rules: Rules, seconds: float) -> float:
        """Let the rules hold. Return the longest time without a commit until all make a step together again."""
        begun = time.monotonic()
        self.network.rule(rules)
        time.sleep(seconds)
        self.network.rule({})
        ended = time.monotonic()
        while not (
            whole := [one for one in self.commits() if one["mono"] > ended and len(one["groups"]) == self.count]
        ):
            assert time.monotonic() - ended < harness.DEADLINE_S, f"groups stay apart after {rules}"
            assert all(rank.process.poll() is None for rank in self.ranks), f"a group ended after {rules}"
            time.sleep(0.05)
        times = [begun, *(one["mono"] for one in self.commits() if begun < one["mono"] <= whole[0]["mono"])]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def judge(self) -> tuple[str, int]:
        """What is wrong with the commits, or ""; and how many the final history lacks, as a group was cut off."""
        goal = newest(self.ranks) + 3
        for rank in self.ranks:
            rank.beyond(goal)
            check_states(rank, SLOTS)
        commits = {(one["step"], one["history"]): one for one in self.commits()}
        last = min(max(rank.commits) for rank in self.ranks)
        ends = {rank.commits[last]["history"] for rank in self.ranks if last in rank.commits}
        if len(ends) > 1:
            return f"{len(ends)} histories of step {last}", 0
        history = ends.pop()
        for step in range(last, 0, -1):
            if (step, history) not in commits:
                return f"step {step} is lost", 0
            history = commits[step, history]["parent"]
        return "", sum(step <= last for step, _ in commits) - last

    def close(self) -> None:
        self.run.close()
        self.network.close()
