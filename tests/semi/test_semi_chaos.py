"""Real runs whose groups die in the moments that matter to rounds, and runs that wait for lost groups or do without."""

import subprocess
import sys
from collections import Counter

import pytest

from everstep.report import score
from semi_runs import DEADLINE_S, SYNC_STEPS, WORKERS, rounds_in_the_final_state, semi_config, soon, worst, worst_loss
from watched import environment

ROUNDS, GROUPS = 60, 3
EVERY_STEP_ONCE = Counter(
    (step // SYNC_STEPS + 1, worker, step + 1) for step in range(ROUNDS * SYNC_STEPS) for worker in range(WORKERS)
)
FAULTS = ("kill-mid-round", "kill-during-sum", "kill-host-and-states", "kill-adopter")


@pytest.fixture
def config(tmp_path):
    def _config(**sections):
        semi_sync = sections.pop("semi_sync", {})
        return semi_config(
            tmp_path / "run.toml",
            training={"steps": ROUNDS * SYNC_STEPS},
            checkpoint={"interval": 10 * SYNC_STEPS},
            fault_tolerance={"groups": GROUPS, "allow_faults": True},
            semi_sync={"sync_steps": SYNC_STEPS, **semi_sync},
            **sections,
        )

    return _config


def breaks(run, folder, names, patience_s=DEADLINE_S):
    """Does these faults to the run, each when all groups are back after the one before."""
    campaign = folder / "campaign.toml"
    for name in names:
        entry = f'[[fault]]\nname = "{name}"\nat_step = 1\npatience_s = {patience_s}\n'
        campaign.write_text(entry)
        soon(run, lambda: run.events("commit") and run.events("commit")[-1]["groups"] == list(range(GROUPS)))
        chaos = [sys.executable, "-m", "everstep.cli", "chaos", str(run.run_dir), "--campaign", str(campaign)]
        done = subprocess.run(chaos, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        struck = run.events("fault", fault=name)[-1]
        soon(run, lambda struck=struck: run.events("workers_died", struck["t"], group=struck["target_group"]))
        soon(run, lambda struck=struck: run.events("heal", struck["t"], group=struck["target_group"]))


def rounds_of(run, group, after, before):
    """(round, worker) that a group computed between two times."""
    found = run.events("worker_round", after, group=group)
    return {(event["step"], event["worker"]) for event in found if event["t"] < before}


@pytest.mark.slow
def test_kills_in_the_worst_moments_change_nothing(start, reference, config, tmp_path):
    path = config(semi_sync={"fragments": 1, "overlap_steps": 1, "mixing": 0.5})
    run = start(path)
    breaks(run, tmp_path, FAULTS)
    assert run.wait(DEADLINE_S) == 0, run.said()
    struck = {name: run.events("fault", fault=name) for name in FAULTS}
    died = {name: run.events("workers_died", found[0]["t"])[0] for name, found in struck.items()}
    # Each did what it is there for.
    middle = died["kill-mid-round"]
    begun = max(event["step"] for event in run.events("worker_round") if event["t"] < middle["t"])
    assert run.events("attempt", struck["kill-mid-round"][0]["t"], committed=False)[0]["step"] in (begun, begun + 1)
    in_sum = died["kill-during-sum"]
    failed = run.events("attempt", struck["kill-during-sum"][0]["t"], committed=False)[0]
    made = rounds_of(run, in_sum["group"], struck["kill-during-sum"][0]["t"] - 60, in_sum["t"])
    assert {worker for round_, worker in made if round_ == failed["step"]}, "its workers' rounds were done"
    lost = struck["kill-host-and-states"][0]
    moved = run.events("worker_moved", lost["t"])
    again = [event["rounds_again"] for event in moved if event["worker"] in lost["of_workers"]]
    assert lost["of_workers"]
    assert max(again) >= 1, moved
    first, second = struck["kill-adopter"]
    assert first["target_group"] != second["target_group"]
    adopted = [event for event in run.events("worker_moved", first["t"]) if event["t"] < second["t"]]
    assert second["target_group"] in {event["group"] for event in adopted}
    assert run.events("workers_died", second["t"], group=second["target_group"])
    # And the run is the one in which nothing failed.
    expected = reference(path)
    differences = worst(run, expected, ROUNDS * SYNC_STEPS), worst_loss(run, expected)
    print("parameters, losses differ by", differences)
    assert max(differences) <= 1e-5
    assert rounds_in_the_final_state(run.run_dir) == EVERY_STEP_ONCE
    assert score.verdict(score.score(run.run_dir)) == []


@pytest.mark.slow
def test_a_lost_group_is_waited_for(start, reference, config, tmp_path):
    path = config(semi_sync={"adopt_after_s": 1800.0})
    run = start(path)
    breaks(run, tmp_path, ["kill-mid-round"])
    assert run.wait(DEADLINE_S) == 0, run.said()
    owners = {tuple(event["owners"]) for event in run.events("commit")}
    assert owners == {tuple(worker % GROUPS for worker in range(WORKERS))}, "no worker moved"
    assert [event for event in run.events("attempt") if "wait for their groups" in event["reason"]]
    expected = reference(path)
    assert max(worst(run, expected, ROUNDS * SYNC_STEPS), worst_loss(run, expected)) <= 1e-5
    assert rounds_in_the_final_state(run.run_dir) == EVERY_STEP_ONCE


@pytest.mark.slow
def test_a_run_that_shrinks_goes_on_with_the_workers_that_are_there(start, config, tmp_path):
    run = start(config(semi_sync={"on_loss": "shrink"}))
    breaks(run, tmp_path, ["kill-mid-round"])
    assert run.wait(DEADLINE_S) == 0, run.said()
    lost = run.events("fault")[0]["target_group"]
    commits = run.events("commit", rank=0)
    for event in commits:
        assert set(event["owners"]) <= {-1, *event["groups"]}
        there = sum(owner >= 0 for owner in event["owners"])
        assert event["weights"] == [(owner >= 0) / there for owner in event["owners"]]
        assert all(owner in (-1, worker % GROUPS) for worker, owner in enumerate(event["owners"])), "none moved"
    without = [event for event in commits if -1 in event["owners"]]
    assert without
    gone = {worker for event in without for worker, owner in enumerate(event["owners"]) if owner < 0}
    assert gone == {worker for worker in range(WORKERS) if worker % GROUPS == lost}
    assert -1 not in commits[-1]["owners"], "the group came back"
    assert [event["step"] for event in run.events("commit", group=commits[-1]["group"], rank=0)][-1] == ROUNDS
