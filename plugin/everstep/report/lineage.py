"""Which of all commits the final state contains.

Every group emits a `commit` for each step it commits, so one vote shows as several events: those of one history
(`everstep.step.ledger.extend`). A step can also be committed more than once, after all groups died and an older state
was loaded, or when a group committed it and died before any other group did. These have different histories, and each
names its parent's. Only the commits that the newest one builds on are in the final state; they are its *lineage*.

What a group says of its state elsewhere, when it started, healed or committed, must be the parent that its next commit
names: where it is not, that commit's slots count as repeated.
"""

from collections.abc import Hashable, Iterable
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
    loss: float | None
    took_s: float | None
    tokens: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    mfu: float | None = None
    """In percent, of the rank that told first; None where torchtitan did not measure it."""
    emitters: set[int] = field(default_factory=set)
    continued: bool = False
    """Whether a group was there that had committed the step before, and not loaded or healed since."""
    parent: "Commit | None" = None
    lost: set[int] = field(default_factory=set)
    """Slots that some group's step does not contain."""
    repeated: set[int] = field(default_factory=set)
    """Slots that entered the step, or the parameters of one group, more than once."""


@dataclass(slots=True)
class History:
    """All commits of a run in order of time, and those that the final state contains in order of training."""

    commits: list[Commit]
    final: list[Commit]


class FirstMention:
    """Tells the first mention of a thing from the others, in events that are read while they are written: every group
    logs every commit, and the files of groups on other nodes may be seen late."""

    KEPT = 4096
    """No group tells of a thing so many others late."""

    def __init__(self) -> None:
        self._known: dict[Hashable, None] = {}

    def new(self, what: Hashable) -> bool:
        """Whether this is mentioned for the first time. Of commits `what` is the history: a step that is made again,
        after a run went back to an older state, is a commit of another history."""
        new = what not in self._known
        self._known[what] = None
        if len(self._known) > self.KEPT:
            del self._known[next(iter(self._known))]
        return new

    def __contains__(self, what: Hashable) -> bool:
        return what in self._known


def trace(events: Iterable[dict[str, Any]]) -> History:
    """Rebuild the lineage from a run's events in order of time, as `read_events` gives them.

    Reads commit, heal, worker_ready and training_started of rank 0; ignores all others. Where the log does not have
    the commit that another one names as its parent, the newest commit of the nearest step below is taken.
    """
    tracer = _Tracer()
    for event in events:
        if not event.get("rank") and isinstance(event.get("group"), int):
            tracer.see(event)
    tracer.finish()
    return History(tracer.commits, final_lineage(tracer.commits))


def final_lineage(commits: list[Commit]) -> list[Commit]:
    """The chain of parents that ends in the newest state: the highest step that builds on the last new commit."""
    children: dict[int, list[Commit]] = {}
    for commit in commits:
        if commit.parent is not None:
            children.setdefault(commit.parent.order, []).append(commit)
    tip, ahead = None, commits[-1:]
    known: set[int] = set()
    while ahead:  # what builds on it may have been logged before it, by a host whose clock is behind
        commit = ahead.pop()
        if commit.order not in known:
            known.add(commit.order)
            tip = commit if tip is None else max(tip, commit, key=lambda one: (one.step, one.order))
            ahead += children.get(commit.order, ())
    chain: list[Commit] = []
    known = set()
    while tip is not None and tip.order not in known:  # events that contradict each other can make a circle
        known.add(tip.order)
        chain.append(tip)
        tip = tip.parent
    return chain[::-1]


class _Tracer:
    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.by_history: dict[str, Commit] = {}
        self.named: list[tuple[Commit, str]] = []
        """The parents that commits name, by history."""
        self.newest: dict[int, Commit] = {}
        self.states: dict[int, tuple[str, bool]] = {}
        """By group: history of the state it says it has, and whether it committed that itself."""

    def see(self, event: dict[str, Any]) -> None:
        group, step, kind = event["group"], event.get("step"), event["kind"]
        if kind == "worker_ready":
            self.states.pop(group, None)
        elif kind in ("training_started", "heal"):
            if history := event.get("history"):
                self.states[group] = history, False
        elif kind == "commit" and isinstance(step, int):
            self._committed(event, group, step)

    def finish(self) -> None:
        """Parents can be in the log behind those who name them."""
        for commit, history in self.named:
            commit.parent = self.by_history.get(history, commit.parent)

    def _committed(self, event: dict[str, Any], group: int, step: int) -> None:
        history, parent, owners = event["history"], event["parent"], tuple(event.get("owners") or ())
        commit = self.by_history.get(history)
        if commit is None:
            commit = Commit(
                len(self.commits), step, history, event["t"], tuple(event.get("groups") or ()),
                owners, event.get("loss"), event.get("took_s"), event.get("tokens"),
                event.get("grad_norm"), event.get("lr"), event.get("metrics", {}).get("mfu(%)"),
                parent=self._before(step),
            )  # fmt: skip
            self.commits.append(commit)
            self.by_history[history] = self.newest[step] = commit
            self.named.append((commit, parent))
        commit.emitters.add(group)
        commit.lost.update(slot for slot, owner in enumerate(owners) if owner < 0)
        commit.repeated.update(_repeated(commit, owners, event.get("coverage_ok", True)))
        state, committed = self.states.get(group, (parent, False))
        commit.continued |= committed
        if state != parent or commit.step != step:
            commit.repeated.update(range(len(owners)))
        self.states[group] = history, True

    def _before(self, step: int) -> Commit | None:
        """The newest commit so far of the step before, or of the nearest step below that the log knows."""
        below = (
            step - 1 if step - 1 in self.newest else max((known for known in self.newest if known < step), default=0)
        )
        return self.newest.get(below)


def _repeated(commit: Commit, owners: tuple[int, ...], coverage_ok: bool) -> set[int]:
    """Slots that one group's event shows to be in the step twice: claimed by different groups, or, when the
    group's own coverage check failed and no slot is missing, all of them, as the event cannot say which."""
    if len(owners) != len(commit.owners) or (not coverage_ok and all(owner >= 0 for owner in owners)):
        return set(range(max(len(owners), len(commit.owners))))
    if owners == commit.owners:
        return set()
    pairs = enumerate(zip(owners, commit.owners, strict=True))
    return {slot for slot, (one, other) in pairs if one != other and one >= 0 and other >= 0}
