"""Decides which commits the final state contains.

Every group emits a `commit` event for each step that it commits, so one vote shows as several events with the same
history (`step.ledger.next_history`). A step can also be committed more than once: after all groups died and an older
state was loaded, or if a group committed it and died before any other group did. Such commits have different histories,
and each names its parent's. Only the newest commit and those that it builds on are in the final state; they are its
*lineage*.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Commit:
    """One committed step: the `commit` events that all groups emitted after one vote."""

    step: int
    history: str
    t: float
    """Wall time in seconds of the event that came first."""
    groups: tuple[int, ...]
    owners: tuple[int, ...]
    """Per slot the group that computed it, as the first event says; -1: the slot is not in the step."""
    loss: float
    took_s: float | None
    tokens: float
    grad_norm: float | None
    parent_history: str
    """History that it names as its parent's."""
    continued: bool = False
    """Whether one of its groups had committed the step before, and not loaded or healed since."""
    parent: "Commit | None" = None
    """Set by `Lineage.final`."""
    lost: Set[int] = frozenset()
    """Slots that are missing from the step of at least one group."""
    repeated: Set[int] = frozenset()
    """Slots that entered the step, or the parameters of one group, more than once."""
    dates: dict[int, float] | None = None
    """Group -> time of its event by its own clock. None again once all groups, two or more, have reported."""

    @property
    def taking_part(self) -> set[int]:
        """Its groups that computed a slot. With more groups than slots, all of its groups."""
        return set(self.groups) if len(self.groups) > len(self.owners) else {*self.groups} & {*self.owners}

    @property
    def gap_s(self) -> float | None:
        """Seconds since its parent; None if none of its groups went on from the parent without loading or healing, or
        if a clock was set back between the two."""
        gap_s = self.t - self.parent.t if self.parent is not None and self.continued else 0.0
        return gap_s if gap_s > 0 else None

    def count(self, owners: tuple[int, ...], coverage_ok: bool) -> None:
        """Add the slots that one group's event shows to be missing or repeated. A slot is repeated if this event and
        the first one name different owners. All slots count as repeated if the two name different numbers of slots, or
        if the group's coverage check failed and no slot is missing, as the event cannot say which are."""
        is_whole = min(owners, default=0) >= 0  # skips a loop that took half of a report's time at 64 groups, 512 slots
        missing = set() if is_whole else {slot for slot, owner in enumerate(owners) if owner < 0}
        if missing:  # else all commits share one empty set
            self.lost |= missing
        if len(owners) != len(self.owners) or (not coverage_ok and not missing):
            self.repeated |= {*range(max(len(owners), len(self.owners)))}
        elif owners != self.owners:
            pairs = enumerate(zip(owners, self.owners, strict=True))
            self.repeated |= {slot for slot, (one, other) in pairs if one != other and one >= 0 and other >= 0}

    def apart(self) -> dict[str, Any]:
        """Return a `clocks` event once all of its groups have reported it, else {}: the groups whose clocks dated it
        first and last, and the seconds between these dates."""
        dates = self.dates or {}
        if len(dates) < max(2, len(self.groups)):
            return {}
        self.dates = None
        first, last = min(dates, key=dates.__getitem__), max(dates, key=dates.__getitem__)
        return {"kind": "clocks", "first": first, "last": last, "apart_s": dates[last] - dates[first]}


class Lineage:
    """Collects commits from the `commit` events of each group's rank 0."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        """All commits of the run, in order of their first events."""
        self.by_history: dict[str, Commit] = {}
        self._tuples: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Groups and owners that commits share: most steps have those of a step before."""
        self.tokens = 0.0
        """Valid tokens in all commits."""
        self._final: list[Commit] | None = None
        """The last answer of `final`; None if commits were added since."""

    def add(self, event: dict[str, Any], state: str | None) -> Commit:
        """Record a group's event; return its commit. A step that is made again is another commit.

        state: History of the state that the group said it held, if known. All slots of the commit count as repeated if
        it names another parent, or if an earlier event gives the same history another step. Nothing follows from a
        state before the parent: events are missing, as a full disk took none.
        """
        step, history, parent = event["step"], event["history"], event["parent"]
        owners = tuple(event.get("owners") or ())
        commit = self.by_history.get(history)
        if commit is None:
            groups, owners = (self._tuples.setdefault(one, one) for one in (tuple(event["groups"]), owners))
            before = self.by_history.get(parent)
            commit = self.by_history[history] = Commit(
                step, history, event["t"], groups,
                owners, event["loss"], event.get("took_s"), event["tokens"],
                event.get("grad_norm"), parent_history=before.history if before else parent,
            )  # fmt: skip
            self.commits.append(commit)
            self._final = None
            self.tokens += commit.tokens
        commit.count(owners, event.get("coverage_ok", True))
        held = self.by_history.get(state or "")
        is_older = held is not None and held.step < step - 1
        if (state not in (None, parent) and not is_older) or commit.step != step:
            commit.repeated |= {*range(len(owners))}
        commit.dates = commit.dates or {}
        commit.dates[event["group"]] = event["t"]
        return commit

    def final(self) -> list[Commit]:
        """Return the commits that the final state contains, in order of training: the chain of parents that ends in the
        last commit on which no other builds. If the log lacks the parent that a commit names, the newest commit of a
        step below stands for it."""
        if self._final is None:
            self._final = self._chain()
        return self._final

    def _chain(self) -> list[Commit]:
        for at, commit in enumerate(self.commits):  # a parent can come later in the log than its children
            commit.parent = self.by_history.get(commit.parent_history) or commit.parent or self._below(at)
        parents = {commit.parent for commit in self.commits}
        # The newest commit need not be the last in the log: a host whose clock is behind logs it before its parent.
        tips = [commit for commit in self.commits if commit not in parents] or self.commits
        tip = tips[-1] if tips else None
        chain: dict[Commit, None] = {}
        while tip is not None and tip not in chain:  # events that contradict each other can form a cycle
            chain[tip] = None
            tip = tip.parent
        return [*chain][::-1]

    def _below(self, at: int) -> Commit | None:
        before = map(self.commits.__getitem__, range(at - 1, -1, -1))
        return next((one for one in before if one.step < self.commits[at].step), None)
