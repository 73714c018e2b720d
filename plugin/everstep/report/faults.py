"""What each fault cost: how long the run stalled, and how long the groups that it hit were away."""

from collections import defaultdict
from collections.abc import Sequence, Set
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
    back: dict[int, float] = field(default_factory=dict)
    """Killed group -> wall time of the first commit in which it took part again, in the same session."""

    @property
    def kills(self) -> bool:
        """Whether it ends processes that the group then has to start again."""
        return self.name == UNPROVOKED or self.name.startswith("kill")

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
        self._hit: dict[int | None, float] = {}
        self._up_since: dict[int, float] = {}
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
                self._hit.update(dict.fromkeys(groups or (None,), t))
            case "workers_started":
                self._up_since[group] = t
                self._dead.discard(group)
            case "workers_died" if group not in self._dead:  # each node of a group reports the same death
                self.deaths += 1
                self._dead.add(group)
                struck = max(self._hit.get(group, float("-inf")), self._hit.get(None, float("-inf")))
                explained = struck > float("-inf") and struck >= self._up_since.get(group, float("-inf"))
                if not explained and (any(event["exitcodes"].values()) or not event["exitcodes"]):
                    self._struck(t, UNPROVOKED, (group,), session)

    def _struck(self, t: float, name: str, groups: tuple[int, ...], session: Session) -> None:
        fault = Fault(t, name, groups, session.commits[-1] if session.commits else None)
        self.found.append(fault)
        self.kills += fault.kills and name != UNPROVOKED
        self._open.append(fault)

    def committed(self, commit: Commit, session: Session) -> None:
        """Process a new commit of a session."""
        for fault in [one for one in self._open if one.t >= session.begin]:
            if len(fault.after) < FOLLOWING:
                commit.struck = commit.struck or not fault.after
                fault.after.append(commit)
            for group in commit.taking_part.intersection(fault.groups) if fault.kills else ():
                if group in session.groups and session.groups[group].ready_t > fault.t:
                    fault.back.setdefault(group, commit.t)
        self._open = [one for one in self._open if len(one.after) < FOLLOWING or len(one.back) < len(one.groups)]


def normal_step_s(commits: Sequence[Commit], disturbed: Set[int]) -> float | None:
    """Return the median duration in seconds of the healthy steps: those built on the commit before, with no fault in
    between, not disturbed, and with as many groups as the largest of these. If none is healthy, return the median of
    the durations that groups report; None if there is no step.

    disturbed: Steps with more than one attempt, or with a heal during the step or just before it.
    """
    took_s: dict[int, list[float]] = defaultdict(list)
    for commit in commits:
        if commit.gap_s is not None and not commit.struck and commit.step not in disturbed:
            took_s[len(commit.groups)].append(commit.gap_s)
    said = [commit.took_s for commit in commits if commit.took_s is not None]
    return median(took_s[max(took_s)] if took_s else said) if took_s or said else None


def fault_rows(faults: Sequence[Fault], step_s: float | None) -> list[dict[str, Any]]:
    """Return one row per fault and group that it hit, in order of time.

    t (wall time, s), fault, group (None: it hit no group), step (of the next commit; None: there is none), stall_s,
    delay_s (None: cannot be measured), rejoin_s (None: the group was not killed, or is not back yet).
    """
    rows = []
    for fault in faults:
        row = {"t": fault.t, "fault": fault.name, "step": fault.after[0].step if fault.after else None}
        row["stall_s"], row["delay_s"] = fault.costs_s(step_s)
        for group in fault.groups or (None,):
            back = fault.back.get(group) if group is not None else None
            rows.append(row | {"group": group, "rejoin_s": back - fault.t if back is not None else None})
    return rows


def cost_of_faults(faults: Sequence[Fault], step_s: float | None) -> dict[str, Any]:
    """Return medians and maxima: of stalls and delays with one per fault, of rejoins with one per killed group."""
    stalls, delays = zip(*(fault.costs_s(step_s) for fault in faults), strict=True) if faults else ((), ())
    rejoins = [fault.back[group] - fault.t for fault in faults for group in fault.back]
    cost: dict[str, Any] = {}
    for name, values in (("stall_s", stalls), ("delay_s", delays), ("rejoin_s", rejoins)):
        known = [value for value in values if value is not None]
        cost[f"{name}_median"] = median(known) if known else None
        cost[f"{name}_max"] = max(known, default=None)
    cost["stalls_unmeasured"] = stalls.count(None)
    cost["rejoins_open"] = sum(len(fault.groups) - len(fault.back) for fault in faults if fault.kills)
    return cost
