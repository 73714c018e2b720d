"""What each fault cost: how long the run stalled, and how long the groups that it hit were away."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from everstep.report.groups import Session
from everstep.report.lineage import Lineage

UNPROVOKED = "died"
"""Fault name of a death of a group's workers that no injected fault explains."""
SETTLED_S = 1.0
"""Seconds after a hit before a commit shows that the group is there. Earlier commits may have been under way."""
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
    session: Session

    @property
    def kills(self) -> bool:
        """Whether it ends processes of groups, which these then have to start again."""
        return bool(self.groups) and (self.name == UNPROVOKED or self.name.startswith("kill"))

    def row(self, pace: "Pace") -> dict[str, Any]:
        """Return what it cost.

        t (wall time, s), fault, groups, step (of the next commit of its session; None: there is none), stall_s and
        delay_s (None: nothing was committed before it, so that nothing could stall, or nothing after it), rejoin_s
        (until the last of the groups that it killed took part in a commit; None: it killed none, or one is not back).

        Stall: from the fault to the next commit, less a step. Delay: by how much the fault made the run later, as a
        stall looks small if the fault falls late in a step or if only the next step notices it. It is the largest of
        the stall and of the times from the commit before the fault to the first and the second one after it, less the
        steps made meanwhile. Steps that the fault took back count against these.
        """
        commits, normal_s = self.session.commits, pace.at(self.session, self.t)
        at = bisect_right(commits, self.t, key=lambda commit: commit.t)
        after = commits[at : at + FOLLOWING]
        step, stall_s, delay_s = after[0].step if after else None, None, None
        if normal_s is not None and at and after:
            stall_s = max(0.0, after[0].t - self.t - normal_s)
            last = commits[at - 1]
            later = (one.t - last.t - (one.step - last.step) * normal_s for one in after)
            delay_s = max(stall_s, *later)
        row = {"t": self.t, "fault": self.name, "groups": self.groups, "step": step}
        return row | {"stall_s": stall_s, "delay_s": delay_s, "rejoin_s": self._rejoin_s()}

    def _rejoin_s(self) -> float | None:
        known, back = self.session.groups, list[float]()
        for group in self.groups if self.kills else ():
            returns = known[group].returns if group in known else []
            at = bisect_right(returns, self.t, key=lambda one: one[0])
            if at == len(returns):
                return None
            back.append(returns[at][1] - self.t)
        return max(back, default=None)


class Faults:
    """Collects injected faults, and deaths of workers that none of them explains.

    A fault explains the deaths of processes of the groups it hit, if they ran when it struck; a fault without a target
    explains the deaths of all groups. A death in which all exit codes are 0 needs no explanation.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []
        """All faults in order of time."""
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
            case "commit" if self.found and t > self.found[-1].t + SETTLED_S:
                self._hit.discard(group)
            case "workers_died" if group not in self._dead:  # each node of a group reports the same death
                self.deaths += 1
                self._dead.add(group)
                if group not in self._hit and (any(event["exitcodes"].values()) or not event["exitcodes"]):
                    self._struck(t, UNPROVOKED, (group,), session)

    def _struck(self, t: float, name: str, groups: tuple[int, ...], session: Session) -> None:
        self.found.append(Fault(t, name, groups, session))
        self.kills += name.startswith("kill")


class Pace:
    """Median durations in seconds of the healthy steps, by their number of groups. A step is healthy if the groups that
    made it made the two steps before."""

    def __init__(self, lineage: Lineage) -> None:
        lineage.final()  # tells each commit its parent
        took_s: dict[int, list[float]] = defaultdict(list)
        for commit in lineage.commits:
            one = commit.parent
            is_healthy = one is not None and one.parent is not None and one.parent.groups == one.groups == commit.groups
            if is_healthy and commit.gap_s is not None:
                took_s[len(commit.groups)].append(commit.gap_s)
        said = {1: [commit.took_s for commit in lineage.commits if commit.took_s is not None]}
        self._medians = {size: median(known) for size, known in (took_s or said).items() if known}

    def at(self, session: Session, t: float) -> float | None:
        """Return that of as many groups as were asked for then, in place of an unknown one that of most groups. If no
        step is healthy, return the median of the durations that groups report; None if there is no step."""
        size = session.asked_at(t)
        return self._medians.get(size if size in self._medians else max(self._medians, default=0))


def cost_of_faults(faults: Sequence[Fault], pace: Pace) -> dict[str, Any]:
    """Return medians and maxima over the faults."""
    rows, cost = [fault.row(pace) for fault in faults], dict[str, Any]()
    for name in ("stall_s", "delay_s", "rejoin_s"):
        known = [row[name] for row in rows if row[name] is not None]
        cost[f"{name}_median"] = median(known) if known else None
        cost[f"{name}_max"] = max(known, default=None)
    cost["stalls_unmeasured"] = sum(row["stall_s"] is None for row in rows)
    cost["rejoins_open"] = sum(fault.kills and row["rejoin_s"] is None for fault, row in zip(faults, rows, strict=True))
    return cost
