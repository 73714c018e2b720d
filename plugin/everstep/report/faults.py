"""What each fault cost: how long the run stalled, and how long the hit group was away."""

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Any

from everstep.report.lineage import Commit
from everstep.report.times import Session

UNPROVOKED = "died"
"""Fault name of a death of a group's workers that no injected fault explains."""


@dataclass(slots=True, frozen=True)
class Fault:
    """Something that was done to a run, or that befell it."""

    t: float
    """Wall time in seconds at which it was done, or for an unprovoked death noticed by the agent."""
    name: str
    groups: tuple[int, ...]
    """The groups it hit; none when it hit something else (lighthouse, network, disk)."""

    @property
    def kills(self) -> bool:
        """Whether it takes processes away that the group then has to start again."""
        return self.name == UNPROVOKED or self.name.startswith("kill")


class Faults:
    """Follows a run's events: injected faults, and deaths of workers that none of them explains.

    A fault explains the deaths of its groups' processes that were running when it struck; one without a target
    explains all. Processes that ended with exit code 0 did not die.
    """

    def __init__(self) -> None:
        self.found: list[Fault] = []
        """In order of time."""
        self.starts: dict[int, list[float]] = defaultdict(list)
        """By group, when its processes started: wall times in seconds, ascending."""
        self._hit: dict[int | None, float] = {}
        self._up_since: dict[int, float] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Take note of one event, of any kind and rank."""
        group: Any = event.get("group")
        t = event["t"]
        match event["kind"]:
            case "fault":
                fault = Fault(t, event["fault"], _targets(event))
                self.found.append(fault)
                self._hit.update(dict.fromkeys(fault.groups or (None,), t))
            case "workers_started":
                self._up_since[group] = t
            case "workers_died" if not _exited_well(event):
                struck = max(self._hit.get(group, float("-inf")), self._hit.get(None, float("-inf")))
                if struck == float("-inf") or struck < self._up_since.get(group, float("-inf")):
                    self.found.append(Fault(t, UNPROVOKED, (group,)))
                    self._hit[group] = t  # another node of the group may tell the same death
            case "worker_ready" if group is not None and not event.get("rank"):
                self.starts[group].append(t)

    @property
    def kills(self) -> int:
        """Injected faults that took processes away."""
        return sum(fault.kills and fault.name != UNPROVOKED for fault in self.found)


def costs_s(fault: Fault, times: Sequence[float], normal_s: float) -> tuple[float, float] | None:
    """A fault's stall and delay in seconds. Stall: from the fault to the next commit, less a normal step. Delay: by how
    much it made the run later, the largest of the stall and the excess over normal steps of the time from the last
    commit before the fault to the first and to the second one after it: a stall alone looks small when the fault falls
    late in a step, or when only the next step notices it.

    times: wall time of each commit, ascending. None when nothing had been committed before, so that nothing
    could stall, or nothing was committed afterwards.
    """
    after = bisect_right(times, fault.t)
    if after == 0 or after == len(times):
        return None
    stall_s = max(0.0, times[after] - fault.t - normal_s)
    following = enumerate(times[after : after + 2], start=1)
    return stall_s, max(stall_s, *(t - times[after - 1] - count * normal_s for count, t in following))


def rejoin_s(fault: Fault, group: int, faults: Faults, joined: Sequence[float]) -> float | None:
    """Seconds from the fault until `group`, started again, takes part in a commit.

    joined: wall times at which it did, ascending. After a kill, later kills of the same group before it took part make
    it longer. After any other fault only a restart before the group's next fault counts, as most do not restart it.
    None: not (yet) back.
    """
    starts = faults.starts[group]
    start = bisect_right(starts, fault.t)
    if start == len(starts):
        return None
    if not fault.kills:
        following = [f.t for f in faults.found if f.t > fault.t and group in f.groups]
        if following and following[0] < starts[start]:
            return None
    back = bisect_left(joined, starts[start])
    return joined[back] - fault.t if back < len(joined) else None


def normal_step_s(
    commits: Sequence[Commit], faults: Sequence[Fault], disturbed: Set[int], groups: int | None
) -> float | None:
    """Median duration in seconds of the healthy steps: from one commit to the next that was built on it, with
    no fault in between, undisturbed, and at full strength.

    disturbed: steps with more than one attempt or a heal, or after one. groups: full strength; None: the largest number
    seen. Without a step at full strength those of fewer groups count; without any healthy one what the groups
    say that their steps took; None without steps.
    """
    struck = [fault.t for fault in faults]
    full = groups if groups is not None else max((len(commit.groups) for commit in commits), default=0)
    strong, weak = [], []
    for before, commit in itertools.pairwise(commits):
        quiet = bisect_left(struck, before.t) == bisect_right(struck, commit.t)
        if quiet and commit.parent is before and commit.continued and commit.step not in disturbed:
            (strong if len(commit.groups) >= full else weak).append(commit.t - before.t)
    healthy = strong or weak or [commit.took_s for commit in commits if commit.took_s is not None]
    return median(healthy) if healthy else None


def fault_rows(
    faults: Faults, sessions: Sequence[Session], by_session: Sequence[Sequence[Commit]], step_s: float | None
) -> list[dict[str, Any]]:
    """One row per fault and group hit, in order of time.

    t (wall time, s), at_s (since the run began), fault, group (None: it hit no group), step (of the next
    commit, None: none), stall_s, delay_s, rejoin_s (None: cannot be measured).
    """
    times = [[commit.t for commit in commits] for commits in by_session]
    joined: dict[int, list[float]] = defaultdict(list)
    for commit in itertools.chain(*by_session):
        for group in commit.taking_part:
            joined[group].append(commit.t)
    rows = []
    for fault in faults.found:
        index = next((index for index, one in enumerate(sessions) if one.begin <= fault.t <= one.end), None)
        around = times[index] if index is not None else []
        after = bisect_right(around, fault.t)
        row = {
            "t": fault.t,
            "at_s": fault.t - sessions[0].begin,
            "fault": fault.name,
            "step": by_session[index][after].step if index is not None and after < len(around) else None,
        }
        cost = costs_s(fault, around, step_s) if step_s is not None else None
        row["stall_s"], row["delay_s"] = cost or (None, None)
        for group in fault.groups or (None,):
            away = None if group is None else rejoin_s(fault, group, faults, joined[group])
            rows.append(row | {"group": group, "rejoin_s": away})
    return rows


def cost_of_faults(rows: Sequence[dict[str, Any]], faults: Sequence[Fault]) -> dict[str, Any]:
    """Medians and maxima over the rows of `fault_rows`: stalls and delays of all faults, one per fault
    whatever number of groups it hit; rejoins of kills and deaths, one per group."""
    one_each = list({(row["t"], row["fault"]): row for row in rows}.values())
    killed = {(fault.t, fault.name) for fault in faults if fault.kills}
    away = [row for row in rows if row["group"] is not None and (row["t"], row["fault"]) in killed]
    cost: dict[str, Any] = {}
    for name, of in (("stall_s", one_each), ("delay_s", one_each), ("rejoin_s", away)):
        known = [row[name] for row in of if row[name] is not None]
        cost[f"{name}_median"] = median(known) if known else None
        cost[f"{name}_max"] = max(known, default=None)
    cost["stalls_unmeasured"] = sum(1 for row in one_each if row["stall_s"] is None)
    cost["rejoins_open"] = sum(1 for row in away if row["rejoin_s"] is None)
    return cost


def _targets(event: dict[str, Any]) -> tuple[int, ...]:
    target = event.get("target_group")
    if isinstance(target, int):
        return (target,)
    return tuple(group for group in target or () if isinstance(group, int))


def _exited_well(event: dict[str, Any]) -> bool:
    codes = event.get("exitcodes", {}).values()
    return bool(codes) and all(code == 0 for code in codes)
