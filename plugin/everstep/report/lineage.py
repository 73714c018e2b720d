"""Which of all commits the final state contains.

Every group emits a `commit` for each step it commits, so one vote shows as several events: those of one history
(`everstep.step.ledger.extend`). A step can also be committed more than once, after all groups died and an older state
was loaded, or when a group committed it and died before any other group did. These have different histories, and each
names its parent's. Only the commits that the newest one builds on are in the final state; they are its *lineage*.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Commit:
    """One committed step: the `commit` events that all groups emitted after one vote."""

    order: int
    """Its place among all commits of the run, by the time of the first event."""
    step: int
    history: str
    t: float
    """Wall time in seconds of the first group's event."""
    groups: tuple[int, ...]
    owners: tuple[int, ...]
    """Per slot the group that computed it, as the first group said; -1: the slot is not in the step."""
    loss: float
    took_s: float | None
    tokens: float
    grad_norm: float | None
    lr: float | None
    mfu: float | None
    """In percent, of the rank that told first; None where torchtitan did not measure it."""
    named: str
    """History of its parent, as it says."""
    continued: bool = False
    """Whether a group was there that had committed the step before, and not loaded or healed since."""
    parent: "Commit | None" = None
    """As `Lineage.final` found it."""
    struck: bool = False
    """Whether a fault came between the commit before and this one."""
    lost: set[int] = field(default_factory=set)
    """Slots that some group's step does not contain."""
    repeated: set[int] = field(default_factory=set)
    """Slots that entered the step, or the parameters of one group, more than once."""
    dates: dict[int, float] = field(default_factory=dict)
    """By group, when it told of the commit by its clock; empty once all of its groups have."""

    @property
    def taking_part(self) -> set[int]:
        """The groups that own a slot of it; with more groups than slots, being there is enough."""
        return set(self.groups) if len(self.groups) > len(self.owners) else {*self.groups} & {*self.owners}

    @property
    def gap_s(self) -> float | None:
        """Seconds since the commit that it was built on; None if no group was there that went on from that."""
        return self.t - self.parent.t if self.parent is not None and self.continued else None

    def count(self, owners: tuple[int, ...], coverage_ok: bool) -> None:
        """Count the slots that one group's event shows to be missing or to be in the step twice: claimed by different
        groups, or, when the group's own coverage check failed and no slot is missing, all of them, as the event cannot
        say which."""
        is_whole = min(owners, default=0) >= 0  # at 64 groups and 512 slots half of a report's time was spent here
        missing = set() if is_whole else {slot for slot, owner in enumerate(owners) if owner < 0}
        self.lost |= missing
        if len(owners) != len(self.owners) or (not coverage_ok and not missing):
            self.repeated.update(range(max(len(owners), len(self.owners))))
        elif owners != self.owners:
            pairs = enumerate(zip(owners, self.owners, strict=True))
            self.repeated |= {slot for slot, (one, other) in pairs if one != other and one >= 0 and other >= 0}

    def apart(self) -> dict[str, Any]:
        """Once all of its groups have told of it: the `first` and the `last` by their dates of it, and the seconds
        between these, as an event."""
        if len(self.dates) < max(2, len(self.groups)):
            return {}
        dates, self.dates = self.dates, {}
        first, last = min(dates, key=dates.__getitem__), max(dates, key=dates.__getitem__)
        return {"kind": "clocks", "first": first, "last": last, "apart_s": dates[last] - dates[first]}


class Lineage:
    """Follows the `commit` events of rank 0 of each group."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        """All of the run, in order of time."""
        self.by_history: dict[str, Commit] = {}
        self.tokens = 0.0
        """Of all commits."""

    def add(self, event: dict[str, Any], state: str | None) -> Commit:
        """The commit that a group's event tells of. A step that is made again is another commit.

        state: history of the state that the group said it had. It must be the parent that the commit names: if it is
        not, the commit's slots count as repeated.
        """
        step, history, parent = event["step"], event["history"], event["parent"]
        owners = tuple(event.get("owners") or ())
        commit = self.by_history.get(history)
        if commit is None:
            if self.commits and self.commits[-1].owners == owners:
                owners = self.commits[-1].owners  # most steps have those of the step before, and there are many
            commit = self.by_history[history] = Commit(
                len(self.commits), step, history, event["t"], tuple(event["groups"]),
                owners, event["loss"], event.get("took_s"), event["tokens"],
                event.get("grad_norm"), event.get("lr"), event.get("metrics", {}).get("mfu(%)"), named=parent,
            )  # fmt: skip
            self.commits.append(commit)
            self.tokens += commit.tokens
        commit.count(owners, event.get("coverage_ok", True))
        if state not in (None, parent) or commit.step != step:
            commit.repeated.update(range(len(owners)))
        commit.dates[event["group"]] = event["t"]
        return commit

    def final(self) -> list[Commit]:
        """The commits that the final state contains, in order of training: the chain of parents that ends in the newest
        state, which is what builds on the last new commit.

        If the log does not have the commit that another one names as its parent, the newest commit of the nearest step
        below is taken.
        """
        for commit in self.commits:  # a parent can be in the log behind those who name it
            commit.parent = self.by_history.get(commit.named) or commit.parent or self._below(commit)
        parents = {commit.parent.order for commit in self.commits if commit.parent is not None}
        # What builds on the newest may have been logged before it, by a host whose clock is behind.
        tips = [commit for commit in self.commits if commit.order not in parents] or self.commits
        tip = tips[-1] if tips else None
        chain: dict[int, Commit] = {}
        while tip is not None and tip.order not in chain:  # events that contradict each other can make a circle
            chain[tip.order] = tip
            tip = tip.parent
        return [*chain.values()][::-1]

    def _below(self, commit: Commit) -> Commit | None:
        below = (one for one in self.commits[: commit.order] if one.step < commit.step)
        return max(below, key=lambda one: (one.step, one.order), default=None)
