"""The rules that a run must never break, checked while it runs by a judge that sees all states at once. A violation is
kept with its time and not raised, so that the run goes on and shows the consequences."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

ASKED = 3
"""Groups that may refuse a slot: then its numbers or the bound of a check are to blame, and the next one accepts it."""


def fold(*parts: Any) -> int:
    """Return a hash of 62 bits over some values."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, slots=True)
class State:
    """The simulated counterpart of a rank's parameters, optimizer and counters. `way`: hash over everything that was
    ever applied, step by step; equal if the parameters are. `flipped`: how often a fault changed these unnoticed."""

    step: int
    history: int
    way: int
    flipped: int = 0


START = State(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Contribution:
    """One group's part of a gradient sum in a rank column: how often each (step, slot) is in it, and its state then."""

    group: int
    slots: tuple[tuple[tuple[int, int], int], ...]
    state: State


@dataclass(frozen=True, slots=True)
class Violation:
    at: float
    kind: str
    text: str


@dataclass(slots=True)
class Link:
    """One commit in the chain of histories."""

    step: int
    parent: int
    groups: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass
class Judge:
    slots: int
    now: Callable[[], float]
    violations: list[Violation] = field(default_factory=list)
    chain: dict[int, Link] = field(default_factory=dict)
    """History -> the commit that made it."""
    ways: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """(step, history, rank column) -> the way that all groups have there."""
    commits: int = 0
    """Commits that were applied by at least one rank, over all histories."""
    keys: set[tuple[str, str]] = field(default_factory=set)
    """Each rank, and each key with which it connected a process group."""

    def uses(self, who: str, key: str) -> None:
        """Judge that a rank connects a process group: it uses each key only once."""
        if (who, key) in self.keys:
            self.violate("key used twice", f"{who} connects with key {key} again")
        self.keys.add((who, key))

    def violate(self, kind: str, text: str) -> None:
        if len(self.violations) < 20:
            self.violations.append(Violation(round(self.now(), 3), kind, text))

    def summed(self, parts: Iterable[Contribution]) -> None:
        """Judge a complete gradient sum: all gradients in it are of one step and history."""
        giving = [part for part in parts if part.slots]
        histories = {(part.state.step, part.state.history) for part in giving}
        if len(histories) > 1:
            self.violate("two histories summed", f"groups {[part.group for part in giving]} at {sorted(histories)}")

    def applied(self, who: str, column: int, before: State, commit: Any, parts: list[Contribution]) -> State:
        """Judge a commit that a rank applies to the state `before`, with sums made of `parts`. Return its new state."""
        where = f"step {commit.step} at {who}"
        if (before.step + 1, before.history) != (commit.step, commit.parent):
            held = f"a state of step {before.step}, history {before.history}"
            self.violate("applied to another state", f"{where}: parent {commit.parent}, but it has {held}")
        counted: Counter[tuple[int, int]] = Counter()
        for part in parts:
            counted.update(dict(part.slots))
            if part.slots and (part.state.step, part.state.history) != (commit.step - 1, commit.parent):
                self.violate("two histories summed", f"{where}: group {part.group} gave gradients of {part.state}")
        having = {p.group for p in parts if (p.state.step, p.state.history) == (before.step, before.history)}
        if not having.issuperset(commit.able):
            self.violate("able without a state", f"{where}: {commit.able}, but only {sorted(having)} have it")
        expected = {(commit.step, slot) for slot in range(self.slots) if commit.owners[slot] != -1}
        if set(counted) != expected or any(count != 1 for count in counted.values()):
            self.violate("slots not once", f"{where}: {sorted(counted.items())}, owners {commit.owners}")
        for part in parts:
            for (_, slot), _ in part.slots:
                if commit.owners[slot] != part.group:
                    self.violate("wrong owner", f"{where}: slot {slot} from {part.group}, not {commit.owners[slot]}")
        link = Link(commit.step, commit.parent, commit.groups, tuple(sorted(slot for _, slot in counted)))
        known = self.chain.get(commit.history)
        if known is None:
            self.chain[commit.history] = link
            self.commits += 1
        elif known != link:
            self.violate("one history, two commits", f"{where}: {known} and {link}")
        gave = sorted((part.group, part.slots, part.state) for part in parts if part.slots)
        way = fold(before.way, commit.step, commit.parent, [(group, slots) for group, slots, _ in gave])
        after = State(commit.step, commit.history, way, before.flipped)
        self.at(who, column, after)
        return after

    def at(self, who: str, column: int, state: State) -> None:
        """Judge that a rank has a state: every rank of its column at this step and history has the same one."""
        way = self.ways.setdefault((state.step, state.history, column), state.way)
        if way != state.way:
            self.violate("one history, two states", f"{who} at step {state.step} of history {state.history}")

    def lineage(self, state: State) -> list[int]:
        """Return the steps behind a state, newest first. A missing or repeated step is a violation."""
        steps, history, step = [], state.history, state.step
        while step > 0:
            link = self.chain.get(history)
            if link is None or link.step != step:
                self.violate("broken lineage", f"history {history} should be of step {step}, found {link}")
                break
            steps.append(step)
            history, step = link.parent, step - 1
        return steps
