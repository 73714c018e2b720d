"""The forecast against a simulation that plays each step and each fault, with the costs and none of the formulas."""

import math
import random
from dataclasses import dataclass, field, replace
from statistics import median

import pytest

from everstep.report.forecast import Choice, Cluster, Costs, calibrate, choices, forecast, varied


@dataclass
class Played:
    """A run as its events would tell it."""

    kept: float
    step_s: float
    groups: int
    rows: list = field(default_factory=list)
    by_groups: dict = field(default_factory=dict)
    first_steps: list = field(default_factory=list)

    def costs(self):
        figures = {"step_s_median": self.step_s, "groups": self.groups, "wall_s": 1.0, "training_s": 1.0}
        steps = {count: median(times) for count, times in self.by_groups.items()}
        return calibrate(figures, self.rows, steps, self.first_steps)


def played(groups, costs, *, every_s=None, group_mtbf_s=None, spares=0, horizon_s=20_000.0, seed=0):
    """Groups that die by themselves, or one of those that are there every `every_s`, never the last. What a group has
    computed of a step is lost with it. It comes back with the beginning of a step, `rejoin_s` after its death at the
    earliest, and computes with the one after that, whose beginning is `warm_s` late."""
    rng = random.Random(seed)
    run = Played(0.0, costs.step_s, groups)
    dies = [rng.expovariate(1 / group_mtbf_s) if group_mtbf_s else math.inf for _ in range(groups)]
    kill, pool, in_repair = every_s or math.inf, spares, []
    died, ready, heals = [0.0] * groups, [0.0] * groups, [False] * groups
    works = set(range(groups))
    now, steps = 0.0, 0
    while now < horizon_s:
        begun, own, pause, members, first = now, dict.fromkeys(works, 0.0), 0.0, len(works), set()
        for group in range(groups):
            if heals[group]:
                works.add(group)
                own[group], heals[group], first = 0.0, False, first | {group}
            elif group not in works and ready[group] <= now:
                heals[group] = True
        pause = costs.warm_s if first else 0.0
        struck = []
        while (left := groups * costs.step_s - sum(own.values())) > 1e-9:
            share = len(works) / groups
            rate = groups * (share + (1 - share) * costs.shared_cores)
            death = min([dies[group] for group in works] + ([kill] if len(works) > 1 else []), default=math.inf)
            end = now + pause + left / rate if works else min(ready)
            if not works:  # everybody begins anew, with nothing of this step
                now, own = max(now, end), {}
                works = {group for group in range(groups) if ready[group] <= now}
                own = dict.fromkeys(works, 0.0)
                continue
            until = max(now, min(end, death))
            worked = max(0.0, until - now - pause)
            pause = max(0.0, pause - (until - now))
            now = until
            for group in works:
                own[group] += worked * rate / len(works)
            if death > end:
                break
            group = min(works, key=dies.__getitem__) if dies[min(works, key=dies.__getitem__)] <= now else None
            if group is None:
                group, kill = (
                    rng.choice(sorted(works)),
                    now + every_s * rng.uniform(0.9, 1.1),
                )  # at any moment of a step
            works.discard(group)
            del own[group]
            first.discard(group)
            struck.append((now, group))
            pause, died[group] = pause + costs.notice_s, now
            away_s = costs.rejoin_s
            if spares or costs.replace_s:
                pool += sum(t <= now for t in in_repair)
                in_repair = [t for t in in_repair if t > now]
                away_s += 0.0 if pool > 0 else costs.replace_s
                if pool > 0:
                    pool -= 1
                    in_repair.append(now + costs.replace_s)
            ready[group] = now + away_s
            dies[group] = ready[group] + rng.expovariate(1 / group_mtbf_s) if group_mtbf_s else math.inf
        steps += 1
        run.by_groups.setdefault(members if not struck else len(works), []).append(now - begun)
        run.rows += [{"stall_s": max(0.0, now - t - costs.step_s), "rejoin_s": None} for t, _ in struck]
        if first:
            run.first_steps.append(now - begun)
        run.rows += [{"stall_s": None, "rejoin_s": now - died[group]} for group in first]
    run.kept = steps * costs.step_s / now
    return run


@pytest.mark.parametrize("groups", [2, 3, 8])
@pytest.mark.parametrize("every_s", [10.0, 20.0, 60.0])
@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_a_rehearsal_is_foreseen_within_two_points(every_s, shared, groups):
    """Costs are taken from one run, with a kill every 45 s; others with other rates are foreseen."""
    costs = Costs(step_s=1.1, notice_s=0.4, rejoin_s=3.1, warm_s=0.6, shared_cores=shared)
    known = played(groups, costs, every_s=45.0).costs()
    expected = forecast(Cluster(nodes=groups, node_mtbf_s=math.inf, kill_every_s=every_s), known, Choice())
    assert expected.kept == pytest.approx(played(groups, costs, every_s=every_s).kept, abs=0.02)
    assert expected.kept < 1.0


def test_kills_of_a_rehearsal_are_no_hangs_and_who_is_back_at_once_is_never_away():
    cluster = Cluster(nodes=3, node_mtbf_s=math.inf, kill_every_s=10.0)
    costs = Costs(step_s=1.0, notice_s=0.0, rejoin_s=3.0)
    assert forecast(replace(cluster, hang_share=0.5), costs, Choice()) == forecast(cluster, costs, Choice())
    at_once = forecast(cluster, replace(costs, rejoin_s=0.0), Choice())
    assert (at_once.away, at_once.faults) == (0.0, pytest.approx(1 / 6 / 10)), "half of a share of a third, every 10 s"


@pytest.mark.parametrize("every_s", [20.0, 60.0])
@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_a_small_run_with_independent_failures_is_foreseen_within_two_points(every_s, shared):
    costs = Costs(step_s=1.1, notice_s=0.4, rejoin_s=3.1, shared_cores=shared)
    run = played(3, costs, group_mtbf_s=3 * every_s, horizon_s=100_000.0)
    expected = forecast(Cluster(nodes=3, node_mtbf_s=3 * every_s), run.costs(), Choice())
    assert expected.kept == pytest.approx(run.kept, abs=0.02)


@pytest.mark.parametrize(("size", "spares"), [(1, 0), (4, 0), (4, 2), (16, 1)])
def test_a_large_run_is_foreseen_within_two_points(size, spares):
    cluster = Cluster(nodes=128, node_mtbf_s=200 * 3600.0)
    costs = Costs(step_s=10.0, notice_s=2.0, rejoin_s=90.0, replace_s=6 * 3600.0)
    choice = Choice(nodes_per_group=size, spares=spares)
    expected = forecast(cluster, costs, choice)
    groups, horizon_s = 128 // size - spares, 4e5 if size == 1 else 2e6
    run = played(groups, costs, group_mtbf_s=cluster.node_mtbf_s / size, spares=spares, horizon_s=horizon_s)
    assert expected.kept == pytest.approx(run.kept * groups * size / 128, abs=0.02)


def test_the_parts_are_what_is_missing():
    cluster = Cluster(nodes=64, node_mtbf_s=1e6, hang_share=0.2, all_gone_s=1e6, memory_lost_share=0.1)
    costs = Costs(step_s=8.0, replace_s=600.0, snapshot_s=0.08)
    for spares in (0, 2):
        found = forecast(cluster, costs, Choice(nodes_per_group=2, spares=spares, snapshot_interval=1))
        parts = found.away + found.faults + found.all_gone + found.snapshots + found.spares
        assert found.kept + parts == pytest.approx(1.0)
        assert min(found.away, found.faults, found.all_gone, found.snapshots) > 0


def test_snapshots_spares_and_small_groups_help_when_they_should():
    costs = Costs(step_s=10.0, replace_s=4 * 3600.0)
    often = Cluster(nodes=64, node_mtbf_s=500 * 3600.0, all_gone_s=86400.0)
    assert forecast(often, costs, Choice(snapshot_interval=1)).kept > forecast(often, costs, Choice()).kept
    assert forecast(often, costs, Choice()).kept > forecast(often, costs, Choice(nodes_per_group=16)).kept
    best, _ = choices(often, costs, Choice(), (4, 16), (0, 1))[0]
    assert (best.nodes_per_group, best.spares) == (4, 0), "a group that works is worth more than one that waits"
    never = Cluster(nodes=64, node_mtbf_s=1e12)
    assert choices(never, costs, Choice(), (1, 4), (0, 2))[0][0].spares == 0
    with pytest.raises(ValueError, match="64 nodes hold no group of 64"):
        forecast(often, costs, Choice(nodes_per_group=64, spares=1))


def test_whole_slots_make_an_uneven_share_cost_more():
    cluster, costs = Cluster(nodes=8, node_mtbf_s=1000.0), Costs(step_s=1.0, rejoin_s=100.0)
    assert forecast(cluster, costs, Choice(slots=8)).kept < forecast(cluster, costs, Choice()).kept


@pytest.mark.parametrize("parity", [0, 1, 2])
@pytest.mark.parametrize("groups", [8, 30])
def test_what_parity_saves_is_what_chance_leaves(groups, parity):
    """Half of the time nothing is left but the disk: 250 steps of 10 s instead of half a step."""
    rng, share, plays = random.Random(parity), 0.08, 4000
    count = max(1, round(groups / 8))
    lost = [[sum(rng.random() < share for _ in range(n, groups, count)) for n in range(count)] for _ in range(plays)]
    holds = sum(max(members) <= parity for members in lost) / plays
    cluster = Cluster(nodes=groups, node_mtbf_s=1e15, all_gone_s=10_000.0, memory_lost_share=share)
    costs = Costs(step_s=10.0, start_s=0.0)
    found = forecast(cluster, costs, Choice(snapshot_interval=1, parity=parity, checkpoint_steps=500))
    again_s = holds * 5.0 + (1 - holds) * 2500.0
    assert found.kept == pytest.approx(1 / (1 + again_s / 10_000.0), abs=0.01)


def test_settings_are_weighed_one_at_a_time():
    cluster = Cluster(nodes=64, node_mtbf_s=1e6, hang_share=0.2, all_gone_s=1e5, memory_lost_share=0.02, run_s=1e6)
    costs = Costs(step_s=8.0, snapshot_s=0.4)
    ettr = {name: found.ettr for name, found in varied(cluster, costs, Choice(snapshot_interval=10))}
    assert ettr["[snapshot] interval = 10"] > ettr["[snapshot] interval = 1"], "a snapshot in every step costs 5 %"
    assert ettr["[snapshot] parity = 2"] > ettr["[snapshot] parity = 1"] > ettr["[snapshot] parity = 0"]
    assert ettr["[snapshot] parity = 0"] > ettr["[snapshot] enable = false"]
    assert ettr["[fault_tolerance] stall_timeout_s = 30"] > ettr["[fault_tolerance] stall_timeout_s = 480"]
    assert ettr["[fault_tolerance] reduce_timeout_s = 2.5"] > ettr["[fault_tolerance] reduce_timeout_s = 40"]
    assert ettr["[checkpoint] interval = 125"] > ettr["[checkpoint] interval = 2000"]


def test_costs_come_from_a_run():
    figures = {"step_s_median": 1.2, "groups": 3, "wall_s": 110.0, "training_s": 100.0}
    rows = [{"stall_s": 0.2, "rejoin_s": 4.0}, {"stall_s": 0.6, "rejoin_s": None}, {"stall_s": None, "rejoin_s": 6.0}]
    found = calibrate(figures, rows, {3: 1.2, 2: 1.2})
    assert (found.rejoin_s, found.start_s) == (pytest.approx(3.8), 10.0)
    assert found.notice_s == pytest.approx((2 * 0.4 * 1.2) ** 0.5), "of a pause of 0.98 s stalls show 0.4 on average"
    assert found.shared_cores == pytest.approx(1.0), "a step took no longer with one group away"
    alone = calibrate(figures, rows, {2: 1.8}, [1.5, 1.7])
    assert (alone.rejoin_s, alone.warm_s) == (pytest.approx(3.4), pytest.approx(0.4))
    assert alone.notice_s == pytest.approx(found.notice_s - 0.6), "less what had to be computed again"
    assert calibrate(figures, rows, {2: 1.8}).shared_cores == pytest.approx(0.0)
    with pytest.raises(ValueError, match="no fault"):
        calibrate(figures, [], {})
