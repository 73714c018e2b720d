"""Which of all commits the final state contains.

Every group emits a `commit` for each step it commits, so one vote shows as several events: those of one history
(`everstep.step.ledger.extend`). A step can also be committed more than once, after all groups died and an older state
was loaded, or when a group committed it and died before any other group did. These have different histories, and each
names its parent's. Only the commits that the newest one builds on are in the final state; they are its *lineage*.

What a group says of its state elsewhere, when it started, healed or committed, must be the parent that its next commit
names: where it is not, that commit's slots count as repeated.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Commit:
    """One committed step: the `commit` events that all groups emitted after one vote."""

    order: int
    """Its place among all commits of the run, by the time of the first event."""
    step: int
    session: int
    history: str
    t: float
    """Wall time in seconds of the first group's event."""
    groups: tuple[int, ...]
    owners: tuple[int, ...]
    """Per slot the group that computed it, as the first group said; -1: the slot is not in the step."""
    loss: float
    took_s: float | None
    tokens: float
    grad_norm: float | None = None
    lr: float | None = None
    mfu: float | None = None
    """In percent, of the rank that told first; None where torchtitan did not measure it."""
    named: str = ""
    """History of its parent, as it says."""
    continued: bool = False
    """Whether a group was there that had committed the step before, and not loaded or healed since."""
    parent: "Commit | None" = None
    lost: set[int] = field(default_factory=set)
    """Slots that some group's step does not contain."""
    repeated: set[int] = field(default_factory=set)
    """Slots that entered the step, or the parameters of one group, more than once."""

    @property
    def taking_part(self) -> set[int]:
        """The groups that own a slot of it; with more groups than slots, being there is enough."""
        return set(self.groups) if len(self.groups) > len(self.owners) else {*self.groups} & {*self.owners}


class Lineage:
    """Follows the events of rank 0 of each group."""

    def __init__(self) -> None:
        self.commits: list[Commit] = []
        """All of the run, in order of time."""
        self._by_history: dict[str, Commit] = {}
        self._newest: dict[int, Commit] = {}
        self._states: dict[int, tuple[str, bool]] = {}
        """By group: history of the state it says it has, and whether it committed that itself."""

    def take(self, event: dict[str, Any], session: int) -> bool:
        """Take note of one event of a session, of any kind; whether it is the first that is heard of a commit. A step
        that is made again is another commit."""
        group, kind, known = event["group"], event["kind"], len(self.commits)
        if kind == "worker_ready":
            self._states.pop(group, None)
        elif kind in ("training_started", "heal"):
            if history := event.get("history"):
                self._states[group] = history, False
        elif kind == "commit":
            self._committed(event, group, session)
        return len(self.commits) > known

    def final(self) -> list[Commit]:
        """The commits that the final state contains, in order of training: the chain of parents that ends in the newest
        state, which is what builds on the last new commit.

        If the log does not have the commit that another one names as its parent, the newest commit of the nearest step
        below is taken.
        """
        for commit in self.commits:  # a parent can be in the log behind those who name it
            commit.parent = self._by_history.get(commit.named, commit.parent)
        parents = {commit.parent.order for commit in self.commits if commit.parent is not None}
        # What builds on the newest may have been logged before it, by a host whose clock is behind.
        tips = [commit for commit in self.commits if commit.order not in parents] or self.commits
        tip = tips[-1] if tips else None
        chain: dict[int, Commit] = {}
        while tip is not None and tip.order not in chain:  # events that contradict each other can make a circle
            chain[tip.order] = tip
            tip = tip.parent
        return [*chain.values()][::-1]

    def _committed(self, event: dict[str, Any], group: int, session: int) -> None:
        step, history, parent = event["step"], event["history"], event["parent"]
        owners = tuple(event.get("owners") or ())
        commit = self._by_history.get(history)
        if commit is None:
            commit = Commit(
                len(self.commits), step, session, history, event["t"], tuple(event["groups"]),
                owners, event["loss"], event.get("took_s"), event["tokens"],
                event.get("grad_norm"), event.get("lr"), event.get("metrics", {}).get("mfu(%)"),
                named=parent, parent=self._before(step),
            )  # fmt: skip
            self.commits.append(commit)
            self._by_history[history] = self._newest[step] = commit
        commit.lost.update(slot for slot, owner in enumerate(owners) if owner < 0)
        commit.repeated.update(_repeated(commit, owners, event.get("coverage_ok", True)))
        state, committed = self._states.get(group, (parent, False))
        commit.continued |= committed
        if state != parent or commit.step != step:
            commit.repeated.update(range(len(owners)))
        self._states[group] = history, True

    def _before(self, step: int) -> Commit | None:
        """The newest commit so far of the step before, or of the nearest step below that the log knows."""
        if step - 1 in self._newest:
            return self._newest[step - 1]
        return self._newest.get(max((known for known in self._newest if known < step), default=0))


def _repeated(commit: Commit, owners: tuple[int, ...], coverage_ok: bool) -> set[int]:
    """Slots that one group's event shows to be in the step twice: claimed by different groups, or, when the
    group's own coverage check failed and no slot is missing, all of them, as the event cannot say which."""
    if len(owners) != len(commit.owners) or (not coverage_ok and all(owner >= 0 for owner in owners)):
        return set(range(max(len(owners), len(commit.owners))))
    if owners == commit.owners:
        return set()
    pairs = enumerate(zip(owners, commit.owners, strict=True))
    return {slot for slot, (one, other) in pairs if one != other and one >= 0 and other >= 0}
