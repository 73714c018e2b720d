"""A run as an injector sees it, from events and the keepers' files: who has which processes, and who takes part."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep.chaos import signals
from everstep.report.faults import SETTLED_S
from everstep.run.directory import number_of_groups
from everstep.run.events import EventTail, read_events
from everstep.snapshot.peers import KeeperRecord, read_records

HISTORY = {"run_started", "run_ended", "lighthouse_started", "lighthouse_died"}
HISTORY |= {"agent_up", "agent_ended", "workers_started", "workers_died", "workers_stalled"}
"""Kinds of events that say which processes the groups have."""


@dataclass(frozen=True)
class Proc:
    """A process as the run announced it. One with this pid that began after `since` (wall time) is another process."""

    pid: int
    since: float
    role: str
    """worker, keeper or lighthouse."""
    group: int | None = None
    rank: int | None = None
    node: str = ""
    """Its node in the batch system, if there is one."""


class View:
    """The state of a run, kept up to date by `follow`, or by `apply` if the caller reads the events anyway.

    `one_host`: Whether all events are this machine's. Then monotonic clocks are compared, which no clock jump moves.
    """

    def __init__(self, run_dir: Path, one_host: bool = True):
        self.run_dir = Path(run_dir)
        self.ended: dict[str, Any] | None = None
        """The `run_ended` event that ended the run, if it is over."""
        self.step = 0
        """The newest committed step."""
        self.first_commit: float | None = None
        """Local monotonic time at which the view saw its first commit after `catch_up`."""
        self.taking_part: set[int] = set()
        """Groups that hold the current state and are not being hit."""
        self.lighthouse: Proc | None = None
        self._tail = EventTail(run_dir)
        self.one_host = one_host
        self._clock = "mono" if one_host else "t"
        self._now = time.monotonic if one_host else time.time
        self._nodes: dict[int, str] = {}
        """Group id -> node of its agent in the batch system."""
        self._workers: dict[int, list[Proc]] = {}
        self._workers_since: dict[int, float] = {}
        self._hit: dict[int, float] = {}

    def catch_up(self) -> None:
        """Read what happened before now, except commits, which may be millions: the next step shows who takes part."""
        self._tail.skip_to_end()
        self.apply(read_events(self.run_dir, HISTORY))

    def follow(self) -> list[dict[str, Any]]:
        """Read the events that were appended since the last call, and return them."""
        events = self._tail.new()
        self.apply(events)
        return events

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        kind, group = event["kind"], event.get("group")
        group = -1 if group is None else group  # for events of no group, which do not use it
        match kind:
            case "run_started":
                self.ended = self.lighthouse = None
                for known in (self._nodes, self._workers, self._workers_since, self._hit, self.taking_part):
                    known.clear()
            case "run_ended":
                self.ended = event
                self.taking_part.clear()
            case "lighthouse_started":
                self.lighthouse = Proc(event["pid"], event["t"], "lighthouse")
            case "lighthouse_died":
                self.lighthouse = None
            case "agent_up":
                self._nodes[group] = event.get("node", "")
            case "agent_ended":
                self._gone(group)
                self._nodes.pop(group, None)
            case "workers_started":
                self._gone(group)
                node = self._nodes.get(group, "")
                self._workers[group] = [
                    Proc(pid, event["t"], "worker", group, rank, node) for rank, pid in enumerate(event["pids"])
                ]
                self._workers_since[group] = event[self._clock]
            case "workers_died":
                self._gone(group)
            case "workers_stalled":
                self.taking_part.discard(group)
            case "commit":
                self._committed(event, group)

    def _gone(self, group: int) -> None:
        self.taking_part.discard(group)
        self._workers.pop(group, None)
        self._hit.pop(group, None)

    def _committed(self, event: dict[str, Any], group: int) -> None:
        self.step = max(self.step, event["step"])
        if self.first_commit is None:
            self.first_commit = time.monotonic()
        if group not in event["groups"] or group not in self._workers:
            return
        at = event[self._clock]
        if at > self._workers_since[group] and at > self._hit.get(group, float("-inf")) + SETTLED_S:
            self.taking_part.add(group)
            self._hit.pop(group, None)

    def hit(self, groups: Iterable[int]) -> None:
        """Mark these groups as being hit now. They take part again once they commit a later step."""
        for group in groups:
            self.taking_part.discard(group)
            self._hit[group] = self._now()

    @property
    def groups(self) -> int:
        """The nominal number of groups."""
        return number_of_groups(self.run_dir) or 1

    @property
    def group_ids(self) -> list[int]:
        """Every group that has an agent or workers."""
        return sorted(self._nodes.keys() | self._workers.keys())

    def candidates(self, lost: int = 1) -> list[int]:
        """Return the groups of which `lost` may be hit at once: those that take part, if more than `lost` do, so that
        one still holds the state. In a run of one group, that group may be hit."""
        holders = len(self.taking_part)
        if self.groups > 1 and holders <= lost:
            return []
        return sorted(self.taking_part)

    def workers(self, group: int) -> list[Proc]:
        """Return the group's newest workers by rank, of several nodes those of the first; [] during its restart."""
        return self._workers.get(group, [])

    def keepers(self, group: int) -> list[KeeperRecord]:
        """Return the keepers of the group's snapshots, as their files say; on one host only those that live."""
        places = [place for place in read_records(self.run_dir) if place.group == group]
        return [p for p in places if signals.is_same(p.pid, p.started_at)] if self.one_host else places
