"""How much of a run's throughput is kept, from how often what dies and how long it takes to be back.

docs/plan.md has the model and its assumptions. Groups fail independently, each at a constant rate; a group that failed
is away for a time, then heals. What is lost: steps that are slower while groups are away, the moment of each fault,
and the rare time when all groups are gone at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where it runs. Times in seconds."""

    nodes: int
    node_mtbf_s: float
    """Mean time between failures of one node."""
    kill_every_s: float = 0.0
    """If not 0, a rehearsal instead of `node_mtbf_s` and `hang_share`: every so many seconds one of the groups that
    take part dies, never the last, as `everstep run --chaos-every` does it."""
    hang_share: float = 0.0
    """Of the failures, those in which processes hang or a host vanishes instead of dying: noticed by a timeout."""
    all_gone_s: float = math.inf
    """Mean time between moments at which every group loses its processes: power, file system, a preempted job."""
    memory_lost_share: float = 0.0
    """Of the groups, those whose host memory is lost at such a moment; each by itself."""
    run_s: float = math.inf
    """How long the run lasts; it starts once."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things take, in seconds: measured (`calibrate`) or assumed."""

    step_s: float
    """A healthy step with all groups."""
    notice_s: float = 0.5
    """For which the others pause when a process dies: notice, quorum, new connections."""
    rejoin_s: float = 60.0
    """From a group's death until it computes again, on the same node or on a spare group's."""
    warm_s: float = 0.0
    """By which the first step of a group that came back is longer."""
    replace_s: float = 0.0
    """Longer that it is away when nobody stands by and its node has to be replaced first."""
    start_s: float = 300.0
    """From nothing to the first step, all groups together."""
    snapshot_s: float = 0.0
    """By which a snapshot makes a step longer."""
    shared_cores: float = 0.0
    """How far groups share their processors: 0, each has its own; 1, a step takes as long with one group away."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one may choose."""

    nodes_per_group: int = 1
    spares: int = 0
    """Groups that stand by, out of `nodes`."""
    slots: int = 0
    """Of a step; 0: as many as one likes."""
    snapshot_interval: int = 0
    """Committed steps between snapshots; 0: none."""
    parity: int = 1
    """How many groups of a parity group may lose their memory."""
    parity_group: int = 8
    checkpoint_steps: int = 500
    reduce_timeout_s: float = 10.0
    stall_timeout_s: float = 120.0


@dataclass(frozen=True)
class Forecast:
    """Shares of the healthy throughput of all nodes."""

    groups: int
    kept: float
    """What is left: tokens per second over those of all nodes without a failure."""
    ettr: float
    """Time that healthy steps of the groups that work would need, of the wall-clock time, the start included."""
    away: float
    """Lost to steps that are slower while groups are away."""
    faults: float
    """Lost at the moment of faults: noticing, connecting, computing a lost share again, a slow first step."""
    all_gone: float
    """Lost when everything is gone: starting, and steps computed again."""
    snapshots: float
    spares: float
    """Nodes that stand by."""


def forecast(cluster: Cluster, costs: Costs, choice: Choice) -> Forecast:
    """What to expect. Raises ValueError when no group fits."""
    total = cluster.nodes // choice.nodes_per_group
    groups = total - choice.spares
    if groups < 1:
        raise ValueError(
            f"{cluster.nodes} nodes hold no group of {choice.nodes_per_group} beside {choice.spares} spares"
        )
    hang = 0.0 if cluster.kill_every_s else cluster.hang_share
    away_s = costs.rejoin_s + hang * choice.stall_timeout_s
    if cluster.kill_every_s:
        # A kill that would be the last group's waits.
        every_s = max(cluster.kill_every_s, away_s / (groups - 1)) if groups > 1 else math.inf
        faults, away = 1 / every_s, _in_turn(away_s / every_s)
    else:
        rate = choice.nodes_per_group / cluster.node_mtbf_s
        waiting = _beyond(groups * rate * costs.replace_s, choice.spares) / groups  # for a node, with no spare left
        absent_s = away_s + waiting / rate
        share = rate * absent_s / (1 + rate * absent_s)
        faults, away = groups * (1 - share) * rate, _binomial(groups, share)
    speed = sum(p * _speed(groups, gone, choice.slots, costs.shared_cores) for gone, p in away)
    notice_s = (1 - hang) * costs.notice_s + hang * choice.reduce_timeout_s
    again_s = costs.step_s / (2 * groups)  # of a group's share of a step half is lost, on average
    paused_s = notice_s * _speed(groups, 1, choice.slots, costs.shared_cores)
    moment = max(0.0, 1 - faults * (again_s + paused_s + costs.warm_s) / speed)
    gone_s = costs.start_s + costs.step_s * _steps_lost(cluster, choice, groups)
    intact = 1 / (1 + gone_s / cluster.all_gone_s)
    copy_s = costs.snapshot_s / choice.snapshot_interval if choice.snapshot_interval else 0.0
    copied = 1 / (1 + copy_s / costs.step_s)
    working = groups * choice.nodes_per_group / cluster.nodes
    kept = speed * moment * intact * copied * working
    return Forecast(
        groups=groups,
        kept=kept,
        ettr=speed * moment * intact * copied * max(0.0, 1 - costs.start_s / cluster.run_s),
        away=1 - speed,
        faults=speed * (1 - moment),
        all_gone=speed * moment * (1 - intact),
        snapshots=speed * moment * intact * (1 - copied),
        spares=speed * moment * intact * copied * (1 - working),
    )


def _speed(groups: int, gone: int, slots: int, shared: float) -> float:
    """Steps per second with `gone` groups away, over those with all. Slots are whole: the largest share decides."""
    left = groups - gone
    if left < 1:
        return 0.0
    own = math.ceil(slots / groups) / math.ceil(slots / left) if slots else left / groups
    return own + (1 - own) * shared


def _binomial(n: int, p: float) -> Iterator[tuple[int, float]]:
    for k in range(n + 1):
        yield k, math.comb(n, k) * p**k * (1 - p) ** (n - k)


def _in_turn(load: float) -> Iterator[tuple[int, float]]:
    """How many are away at once when they go at fixed intervals, `load` of them until one is back."""
    whole = math.floor(load)
    yield whole, 1 - (load - whole)
    yield whole + 1, load - whole


def _beyond(mean_count: float, spares: int) -> float:
    """How many of a Poisson number of nodes in replacement are more than the spares, on average."""
    beyond, p = mean_count - spares, math.exp(-mean_count)
    for count in range(spares):
        beyond += (spares - count) * p
        p *= mean_count / (count + 1)
    return beyond


def _steps_lost(cluster: Cluster, choice: Choice, groups: int) -> float:
    """Steps computed again when everything is gone, on average."""
    from_disk = choice.checkpoint_steps / 2
    if not choice.snapshot_interval:
        return from_disk
    in_memory = min(from_disk, choice.snapshot_interval / 2)
    return from_disk + _memory_holds(cluster.memory_lost_share, choice, groups) * (in_memory - from_disk)


def _memory_holds(lost_share: float, choice: Choice, groups: int) -> float:
    """The chance that no parity group has lost more members' memory than it has parity for."""
    count = max(1, round(groups / choice.parity_group))
    holds = 1.0
    for number in range(count):
        members = len(range(number, groups, count))
        parity = min(choice.parity, members - 1)
        holds *= sum(p for lost, p in _binomial(members, lost_share) if lost <= parity)
    return holds


def choices(
    cluster: Cluster,
    costs: Costs,
    like: Choice,
    sizes: Sequence[int],
    spares: Sequence[int],
    slots_of: Callable[[int], int] = lambda size: 0,
) -> list[tuple[Choice, Forecast]]:
    """Every size of a group and number of spares that fits, the best first. `slots_of`: a step's slots with groups of
    that many nodes, 0 for any number; each group needs one."""
    found = []
    for size in sizes:
        for count in spares:
            groups, slots = cluster.nodes // size - count, slots_of(size)
            if groups >= 1 and (not slots or slots >= groups):
                choice = replace(like, nodes_per_group=size, spares=count, slots=slots)
                found.append((choice, forecast(cluster, costs, choice)))
    return sorted(found, key=lambda pair: -pair[1].kept)


def varied(cluster: Cluster, costs: Costs, best: Choice) -> list[tuple[str, Forecast]]:
    """What the other settings do to a choice, one changed at a time; by the name and value of the setting."""
    ways: list[tuple[str, dict[str, Any]]] = [("[snapshot] enable = false", {"snapshot_interval": 0})]
    ways += [(f"[snapshot] interval = {count}", {"snapshot_interval": count}) for count in (1, 10, 100)]
    with_snapshots = {"snapshot_interval": best.snapshot_interval or 1}
    ways += [(f"[snapshot] parity = {count}", with_snapshots | {"parity": count}) for count in (0, 1, 2)]
    for name, table in (
        ("reduce_timeout_s", "fault_tolerance"),
        ("stall_timeout_s", "fault_tolerance"),
        ("checkpoint_steps", "checkpoint"),
    ):
        key = "interval" if table == "checkpoint" else name
        now = getattr(best, name)
        for value in (now / 4, now, now * 4):
            value = max(1, round(value)) if table == "checkpoint" else value
            ways.append((f"[{table}] {key} = {value:g}", {name: value}))
    return [(name, forecast(cluster, costs, replace(best, **changes))) for name, changes in ways]


def calibrate(
    figures: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    by_groups: dict[int, float],
    first_steps: Sequence[float] = (),
    snapshot_s: float = 0.0,
) -> Costs:
    """Costs as a run had them: its report's figures, its fault table, its median step by number of groups, what the
    first steps took in which a group computed that had come back, and what snapshots held up.

    `stall_s` and `rejoin_s` of the table last until commits: what has to be computed again is taken off the stall, the
    first step off the rejoin.

    Raises:
        ValueError: it has no healthy step, or no fault.
    """
    step_s, groups = figures["step_s_median"], figures["groups"] or 1
    stalls = [row["stall_s"] for row in rows if row["stall_s"] is not None]
    rejoins = [row["rejoin_s"] for row in rows if row["rejoin_s"] is not None]
    if step_s is None or not stalls or not rejoins:
        raise ValueError("the run has no healthy step, or no fault after which its group came back")
    shared = 0.0
    if groups > 1 and (fewer := by_groups.get(groups - 1)):
        own = (groups - 1) / groups
        shared = min(1.0, max(0.0, (step_s / fewer - own) / (1 - own)))
    warm_s = max(0.0, median(first_steps) - step_s) if first_steps else 0.0
    # In steps: a lost share takes the others `again`, all pause for `notice`. Of that a stall shows what goes beyond
    # the step's usual end: max(0, again + notice - x) for a fault at its moment x, any from 0 to 1.
    stall, again = mean(stalls) / step_s, (1 - shared) / max(1, groups - 1)
    notice = (math.sqrt(2 * stall) if stall < 0.5 else stall + 0.5) - again
    return Costs(
        step_s=step_s,
        notice_s=max(0.0, notice) * step_s,
        rejoin_s=max(0.0, median(rejoins) - warm_s - step_s),
        warm_s=warm_s,
        start_s=max(0.0, figures["wall_s"] - figures["training_s"]),
        snapshot_s=snapshot_s,
        shared_cores=shared,
    )
