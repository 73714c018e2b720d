"""What each fault cost: how long the run stalled, and how long the groups that it hit were away."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from everstep.report.groups import Session
from everstep.report.lineage import Commit

UNPROVOKED = "died"
"""Fault name of a death of a group's workers that no injected fault explains."""
FOLLOWING = 2
"""Number of commits after a fault over which its delay is measured."""


@dataclass(slots=True, eq=False)
class Fault:
    """An injected fault, or a death that no injected fault explains."""

    t: float
    """Wall time in seconds at which it was injected, or at which the agent noticed the unexplained death."""
    name: str
    groups: tuple[int, ...]
    """The groups that it hit; empty if it hit something else (lighthouse, network, disk)."""
    before: Commit | None
    """The last commit of its session before it."""
    after: list[Commit] = field(default_factory=list)
    """The first FOLLOWING commits of its session after it."""
    away: set[int] = field(default_factory=set)
    """Groups that it killed, and that have not taken part in a commit of the same session again."""
    rejoin_s: float | None = None
    """Seconds until the last of the groups that it killed had taken part in a commit again."""

    def costs_s(self, normal_s: float | None) -> tuple[float | None, float | None]:
        """Return its stall and its delay in seconds; `normal_s` is the duration of a healthy step.

        Stall: from the fault to the next commit, less a step. Delay: by how much the fault made the run later, as a
        stall looks small if the fault falls late in a step or if only the next step notices it. It is the largest of
        the stall, of the time from the commit before the fault to the first one after it less one step, and of the time
        to the second one after it less two steps. Both are None if nothing was committed before the fault, so that
        nothing could stall, or nothing after it.
        """
        if normal_s is None or self.before is None or not self.after:
            return None, None
        stall_s = max(0.0, self.after[0].t - self.t - normal_s)
        later = (one.t - self.before.t - count * normal_s for count, one in enumerate(self.after, start=1))
        return stall_s, max(stall_s, *later)


class Faults:
    """Collects injected faults, and deaths of workers that none of them explains.

    A fault explains the deaths of processes of the groups it hit, if they ran when it struck; a fault without a target
    explains the deaths of all groups. A death in which all exit codes are 0 needs no explanation.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []
        """All faults in order of time."""
        self._open: list[Fault] = []
        """Faults whose cost is not known yet."""
        self._hit: set[int] = set()
        """Groups that a fault has hit since their workers were started."""
        self._started: set[int] = set()
        self._dead: set[int] = set()
        self.kills = 0
        """Number of injected faults that ended processes."""
        self.deaths = 0
        """Number of deaths of a group's workers, for any reason."""

    def take(self, event: dict[str, Any], session: Session) -> None:
        """Process one event of a session, of any kind and rank."""
        group: Any = event.get("group")
        t = event["t"]
        match event["kind"]:
            case "fault":
                target = event.get("target_group")
                groups = (target,) if isinstance(target, int) else tuple(target or ())
                self._struck(t, event["fault"], groups, session)
                self._hit |= {*groups} or self._started
            case "workers_started":
                self._started.add(group)
                self._hit.discard(group)
                self._dead.discard(group)
            case "workers_died" if group not in self._dead:  # each node of a group reports the same death
                self.deaths += 1
                self._dead.add(group)
                if group not in self._hit and (any(event["exitcodes"].values()) or not event["exitcodes"]):
                    self._struck(t, UNPROVOKED, (group,), session)

    def _struck(self, t: float, name: str, groups: tuple[int, ...], session: Session) -> None:
        fault = Fault(t, name, groups, session.commits[-1] if session.commits else None)
        if name == UNPROVOKED or name.startswith("kill"):
            fault.away |= {*groups}
        self.found.append(fault)
        self.kills += name.startswith("kill")
        self._open.append(fault)

    def committed(self, commit: Commit, session: Session) -> None:
        """Process a new commit of a session."""
        for fault in [one for one in self._open if one.t >= session.begin]:
            if len(fault.after) < FOLLOWING:
                fault.after.append(commit)
            back = fault.away & commit.taking_part & session.groups.keys()
            fault.away -= {group for group in back if session.groups[group].ready_t > fault.t}
            if back and not fault.away:
                fault.rejoin_s = commit.t - fault.t
        self._open = [one for one in self._open if len(one.after) < FOLLOWING or one.away]


def normal_step_s(commits: Sequence[Commit]) -> float | None:
    """Return the median duration in seconds of the healthy steps: those made by the groups that made the two steps
    before, as many as the largest of these. If none is healthy, return the median of the durations that groups report;
    None if there is no step."""
    took_s: dict[int, list[float]] = defaultdict(list)
    for commit in commits:
        one = commit.parent
        is_healthy = one is not None and one.parent is not None and one.parent.groups == one.groups == commit.groups
        if is_healthy and commit.gap_s is not None:
            took_s[len(commit.groups)].append(commit.gap_s)
    said = [commit.took_s for commit in commits if commit.took_s is not None]
    return median(took_s[max(took_s)] if took_s else said) if took_s or said else None


def fault_rows(faults: Sequence[Fault], step_s: float | None) -> list[dict[str, Any]]:
    """Return one row per fault, in order of time.

    t (wall time, s), fault, groups (those that it hit), step (of the next commit; None: there is none), stall_s,
    delay_s (None: cannot be measured), rejoin_s (None: it killed no group, or one is not back yet).
    """
    rows = []
    for fault in faults:
        stall_s, delay_s = fault.costs_s(step_s)
        row = {"t": fault.t, "fault": fault.name, "groups": fault.groups, "rejoin_s": fault.rejoin_s}
        step = fault.after[0].step if fault.after else None
        rows.append(row | {"step": step, "stall_s": stall_s, "delay_s": delay_s})
    return rows


def cost_of_faults(faults: Sequence[Fault], step_s: float | None) -> dict[str, Any]:
    """Return medians and maxima over the faults."""
    rows, cost = fault_rows(faults, step_s), dict[str, Any]()
    for name in ("stall_s", "delay_s", "rejoin_s"):
        known = [row[name] for row in rows if row[name] is not None]
        cost[f"{name}_median"] = median(known) if known else None
        cost[f"{name}_max"] = max(known, default=None)
    cost["stalls_unmeasured"] = sum(row["stall_s"] is None for row in rows)
    cost["rejoins_open"] = sum(bool(fault.away) for fault in faults)
    return cost
