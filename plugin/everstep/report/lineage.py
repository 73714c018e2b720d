"""Which of all commits the final state contains.

Every group emits a `commit` for each step it commits, so one vote shows as several events. A step can also be
committed more than once: after all groups died and a checkpoint was loaded, or when a group committed it and
died before any other group did. Only the commits that later steps build on are in the final state; they are
its *lineage*.

`trace` rebuilds the lineage the way the state itself travelled: a group's state comes from its own previous
commit, or from the group it healed from, or from the checkpoint or snapshot its process started with. From
the newest state this chain is followed back to the first step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Origin(IntEnum):
    """Where the state that a commit was built on came from. A higher value is stronger evidence."""

    HEALED = 1
    RESTORED = 2
    CONTINUED = 3


@dataclass(slots=True, eq=False)
class Commit:
    """One committed step: the `commit` events that all groups emitted after one vote."""

    order: int
    """Its place among all commits of the run, by the time of the first event."""
    step: int
    t: float
    """Wall time in seconds of the first group's event."""
    groups: tuple[int, ...]
    quorum_id: int | None
    owners: tuple[int, ...]
    """Per slot the group that computed it, as the first group said; -1: the slot is not in the step."""
    loss: float | None
    took_s: float | None
    tokens: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    emitters: set[int] = field(default_factory=set)
    origin: Origin = Origin.HEALED
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


def trace(events: Iterable[dict[str, Any]]) -> History:
    """Rebuild the lineage from a run's events in order of time, as `read_events` gives them.

    Reads commit, heal, worker_ready, training_started and checkpoint_saved of rank 0; ignores all others.
    Where an event that explains a state is missing, the newest commit of the step before is taken.
    """
    tracer = _Tracer()
    for event in events:
        if not event.get("rank"):
            tracer.see(event)
    return History(tracer.commits, final_lineage(tracer.commits))


def final_lineage(commits: list[Commit]) -> list[Commit]:
    """The chain of parents that ends in the newest state.

    A commit that no group made from a state it was holding says that all states of that time were gone, so
    the newest state is the highest step since the last such commit; of two of that step, the later one.
    """
    restored = [c.order for c in commits if c.origin is Origin.RESTORED]
    alive = commits[restored[-1] if restored else 0 :]
    tip = max(alive, key=lambda c: (c.step, c.order), default=None)
    chain = []
    known: set[int] = set()
    while tip is not None and tip.order not in known:  # events that contradict each other can make a circle
        known.add(tip.order)
        chain.append(tip)
        tip = tip.parent
    return chain[::-1]


@dataclass(slots=True)
class _Process:
    """A group's running process and the state it holds."""

    first_vote: int = 0
    """Order of the first commit that this process can have voted for."""
    ready: bool = False
    """Started, and nothing committed yet."""
    loaded: bool = False
    """The state was loaded at the start, here or in the group it came from, and no step was built on it."""
    healed_from: int | None = None
    """The group that the state came from, when it was not committed or loaded by this process."""
    state: Commit | None = None
    """The commit that the state is after; None: not known, or before the first step."""


class _Tracer:
    def __init__(self) -> None:
        self.commits: list[Commit] = []
        self.processes: dict[int, _Process] = {}
        self.newest: dict[int, Commit] = {}
        self.newest_of: dict[tuple[int, int], Commit] = {}
        self.saved: dict[int, Commit] = {}

    def see(self, event: dict[str, Any]) -> None:
        group, step, kind = event.get("group"), event.get("step"), event["kind"]
        if not isinstance(group, int):
            return
        if kind == "worker_ready":
            self._started(group)
        elif kind == "training_started" and event.get("source") != "peer":  # heal tells that one better
            if not self._process(group).ready:  # the worker_ready that precedes it is not in the log
                self._started(group)
            self._loaded(self._process(group), event.get("source"), step)
        elif kind == "heal":
            process, source = self._process(group), event.get("source_group", -1)
            process.healed_from, process.state = source, self._process(source).state
            process.loaded = self._process(source).loaded
        elif not isinstance(step, int):
            return
        elif kind == "checkpoint_saved":
            state = self._process(group).state
            if state is not None and state.step != step:  # a save in the background, logged after later steps
                state = self.newest_of.get((group, step))
            if state is not None:
                self.saved[step] = state
        elif kind == "commit":
            self._committed(event, group, step)

    def _process(self, group: int) -> _Process:
        return self.processes.setdefault(group, _Process())

    def _started(self, group: int) -> None:
        self.processes[group] = _Process(first_vote=len(self.commits), ready=True, loaded=True)

    def _loaded(self, process: _Process, source: str | None, step: Any) -> None:
        if source in ("disk", "memory") and isinstance(step, int) and process.healed_from is None:
            on_disk = self.saved.get(step - 1) if source == "disk" else None
            process.state = on_disk or self._before(step)

    def _committed(self, event: dict[str, Any], group: int, step: int) -> None:
        process = self._process(group)
        origin, parent = self._parent(step, process)
        groups, owners = tuple(event.get("groups") or ()), tuple(event.get("owners") or ())
        quorum_id = event.get("quorum_id")
        commit = self.newest.get(step)
        # One vote has one quorum; each group emits once, and none that started only afterwards.
        if (
            commit is None
            or group in commit.emitters
            or (groups, quorum_id) != (commit.groups, commit.quorum_id)
            or commit.order < process.first_vote
        ):
            order, t, loss, took_s = len(self.commits), event["t"], event.get("loss"), event.get("took_s")
            seen = (event.get("tokens"), event.get("grad_norm"), event.get("lr"))
            commit = Commit(order, step, t, groups, quorum_id, owners, loss, took_s, *seen)
            self.commits.append(commit)
            self.newest[step] = commit
        if not commit.emitters or origin > commit.origin:
            commit.origin, commit.parent = origin, parent
        commit.emitters.add(group)
        commit.lost.update(slot for slot, owner in enumerate(owners) if owner < 0)
        commit.repeated.update(_repeated(commit, owners, event.get("coverage_ok", True)))
        if origin is Origin.CONTINUED and parent is not None and parent.step >= step:
            commit.repeated.update(range(len(owners)))
        self.newest_of[group, step] = commit
        self.processes[group] = _Process(process.first_vote, state=commit)

    def _parent(self, step: int, process: _Process) -> tuple[Origin, Commit | None]:
        state = process.state
        fits = state is not None and state.step == step - 1
        if process.healed_from is not None:
            given = state if fits else self.newest_of.get((process.healed_from, step - 1))
            origin = Origin.RESTORED if process.loaded else Origin.HEALED
            return origin, given or self._before(step)
        if state is None or process.ready:
            return Origin.RESTORED, state if fits else self._before(step)
        if state.step >= step - 1:
            return Origin.CONTINUED, state
        return Origin.HEALED, self._before(step)  # it skipped steps: a heal that is not in the log

    def _before(self, step: int) -> Commit | None:
        """The newest commit of the step before, or of the nearest step below that the log knows."""
        if step - 1 not in self.newest:
            step = max((known for known in self.newest if known < step), default=0) + 1
        return self.newest.get(step - 1)


def _repeated(commit: Commit, owners: tuple[int, ...], coverage_ok: bool) -> set[int]:
    """Slots that one group's event shows to be in the step twice: claimed by different groups, or, when the
    group's own coverage check failed and no slot is missing, all of them, as the event cannot say which."""
    if len(owners) != len(commit.owners) or (not coverage_ok and all(owner >= 0 for owner in owners)):
        return set(range(max(len(owners), len(commit.owners))))
    if owners == commit.owners:
        return set()
    pairs = enumerate(zip(owners, commit.owners, strict=True))
    return {slot for slot, (one, other) in pairs if one != other and one >= 0 and other >= 0}
