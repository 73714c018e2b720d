"""The forecast against a simulation that plays every fault, with the same costs and none of the formulas."""

import math
import random

import pytest

from everstep.report.forecast import Choice, Cluster, Costs, calibrate, choices, forecast, varied

HORIZON_S = 200_000.0
"""Long enough for a hundred faults of whatever is played."""


def played(cluster, costs, choice, seed=0, horizon_s=HORIZON_S):
    """Steps per second over those without failures, of a run in which each group dies at random times."""
    rng = random.Random(seed)
    groups = cluster.nodes // choice.nodes_per_group - choice.spares
    mean_s = cluster.node_mtbf_s / choice.nodes_per_group
    back = [0.0] * groups
    pool, in_repair = choice.spares, []
    dies = [rng.expovariate(1 / mean_s) for _ in range(groups)]
    now, done = 0.0, 0.0
    while now < horizon_s:
        following = min(min(dies), min((t for t in back if t > now), default=math.inf), horizon_s)
        away = sum(t > now for t in back)
        own = (groups - away) / groups
        done += (following - now) * (own + (1 - own) * costs.shared_cores) / costs.step_s * (away < groups)
        now = following
        for group in range(groups):
            if dies[group] <= now:
                pause = costs.notice_s + costs.step_s / (groups - 1) * (1 - costs.shared_cores)
                pool += sum(t <= now for t in in_repair)
                in_repair = [t for t in in_repair if t > now]
                away_s = costs.rejoin_s
                if pool > 0:
                    pool -= 1
                    in_repair.append(now + costs.replace_s)
                else:
                    away_s += costs.replace_s
                back[group] = now + away_s
                dies[group] = now + away_s + rng.expovariate(1 / mean_s)
                now += pause
    return done * costs.step_s / now


@pytest.mark.parametrize("every_s", [10.0, 20.0, 60.0])
@pytest.mark.parametrize("shared", [0.0, 0.7])
def test_a_small_run_under_kills_is_foreseen_within_two_points(every_s, shared):
    cluster = Cluster(nodes=3, node_mtbf_s=3 * every_s)
    costs = Costs(step_s=1.1, notice_s=0.4, rejoin_s=4.2, shared_cores=shared)
    expected = forecast(cluster, costs, Choice())
    measured = [played(cluster, costs, Choice(), seed) for seed in range(3)]
    assert expected.kept == pytest.approx(sum(measured) / 3, abs=0.02)
    assert expected.kept < 1.0


@pytest.mark.parametrize("every_s", [3.0, 10.0, 20.0, 60.0])
def test_a_rehearsal_is_foreseen_within_two_points(every_s):
    """Kills come at fixed times, to one of the groups that take part, never to the last."""
    costs = Costs(step_s=1.1, notice_s=0.4, rejoin_s=14.2, shared_cores=0.4)
    rng, back, now, done, kill = random.Random(0), [0.0] * 3, 0.0, 0.0, every_s
    while now < 20_000.0:
        following = min(kill if kill > now else math.inf, min((t for t in back if t > now), default=math.inf))
        own = sum(t <= now for t in back) / 3
        done += (following - now) * (own + (1 - own) * costs.shared_cores)
        now = following
        up = [group for group in range(3) if back[group] <= now]
        if kill <= now and len(up) > 1:
            back[rng.choice(up)] = now + costs.rejoin_s
            own = (len(up) - 1) / 3
            pause = costs.notice_s + costs.step_s / 2 * (1 - costs.shared_cores)
            done -= pause * (own + (1 - own) * costs.shared_cores)
            kill = now + every_s
    expected = forecast(Cluster(nodes=3, node_mtbf_s=math.inf, kill_every_s=every_s), costs, Choice())
    assert expected.kept == pytest.approx(done / now, abs=0.02)


@pytest.mark.parametrize(("size", "spares"), [(1, 0), (4, 0), (4, 2), (16, 1)])
def test_a_large_run_is_foreseen_within_two_points(size, spares):
    cluster = Cluster(nodes=128, node_mtbf_s=200 * 3600.0)
    costs = Costs(step_s=10.0, notice_s=2.0, rejoin_s=90.0, replace_s=6 * 3600.0)
    choice = Choice(nodes_per_group=size, spares=spares)
    expected = forecast(cluster, costs, choice)
    working = (128 // size - spares) * size / 128
    assert expected.kept == pytest.approx(played(cluster, costs, choice, horizon_s=5e6) * working, abs=0.02)


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
    assert (found.notice_s, found.rejoin_s, found.start_s) == (pytest.approx(0.4), 5.0, 10.0)
    assert found.shared_cores == pytest.approx(1.0), "a step took no longer with one group away"
    assert calibrate(figures, rows, {2: 1.8}).shared_cores == pytest.approx(0.0)
    with pytest.raises(ValueError, match="no fault"):
        calibrate(figures, [], {})
