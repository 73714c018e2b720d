"""Faults of semi-synchronous rounds: whom they hit, what they take away, and when they cannot be done."""

import json
import random

import pytest

from everstep.chaos.orders import KillDuringSum
from everstep.chaos.rounds import KINDS, KillAdopter, KillHostAndStates, KillMidRound
from everstep.chaos.target import LocalTarget
from everstep.run.files import order_file
from everstep.semi.worker_files import folder_of

ALLOWED = "[fault_tolerance]\nallow_faults = true\n"
ROUNDS = '[semi_sync]\nmethod = "diloco"\n'


@pytest.fixture
def target(told, tmp_path):
    """Three groups that carry four workers."""
    (tmp_path / "config.toml").write_text(ALLOWED + ROUNDS)
    run = told(3)
    run.take_part(0, 1, 2)
    for group in range(3):
        names = {"history": "2", "parent": "1"}
        run.tell("commit", group=group, rank=0, step=2, groups=[0, 1, 2], owners=[0, 1, 2, 0], **names)
    target = LocalTarget(run.view)
    target.told = run
    return target


def states(run_dir, *rounds):
    """Files of the four workers' states after these rounds, of two ranks."""
    folder = folder_of(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for worker in range(4):
        for rank in (0, 1):
            for round_ in rounds:
                (folder / f"worker-{worker}.rank-{rank}.round-{round_}.abc").touch()


def left(run_dir):
    """(worker, round) of the files that are left."""
    names = [path.name.split(".") for path in folder_of(run_dir).iterdir()]
    return {(int(worker.removeprefix("worker-")), int(of.removeprefix("round-"))) for worker, _, of, *_ in names}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_rounds_does_not_allow_them(target, tmp_path, kind):
    assert kind().never(target.run) is None
    (tmp_path / "config.toml").write_text(ALLOWED)
    target.told.tell("run_started", groups=3)  # the config is read once a start
    assert kind().never(target.run) == "it makes no rounds (semi_sync)"


@pytest.mark.parametrize(("kind", "at"), [(KillMidRound, "half-round"), (KillDuringSum, "")])
def test_one_group_is_ordered_to_die_at_its_moment(target, tmp_path, kind, at):
    injection = kind(group=1).plan(target, random.Random(0))
    injection.strike()
    order = json.loads(order_file(tmp_path, 1).read_text())
    assert (injection.target_group, order["fault"], order["at"]) == (1, kind.name, at)
    assert not order_file(tmp_path, 0).exists()


def test_whoever_adopts_first_is_ordered_to_die(target, tmp_path):
    injection = KillAdopter(group=1).plan(target, random.Random(0))
    assert injection.target_group == 1, "who else is not known yet"
    injection.strike()
    orders = [json.loads(order_file(tmp_path, group).read_text()) for group in (0, 2)]
    assert orders[0] == orders[1], "one order, which one of them carries out"
    assert not order_file(tmp_path, 1).exists()
    target.run.hit([2])
    assert KillAdopter().why_not(target.run), "one group has to be left"


def test_a_host_is_lost_with_the_newest_states_of_its_own_workers(target, tmp_path):
    fault = KillHostAndStates(group=0)
    states(tmp_path, 2)
    assert fault.why_not(target.run) == "not every worker has a state of an earlier round yet"
    within = [folder_of(tmp_path) / f"worker-{worker}.rank-0.round-3.steps-5.by-e.abc" for worker in (0, 1)]
    within[0].touch()
    assert fault.why_not(target.run) == "not every worker has a state of an earlier round yet"
    states(tmp_path, 1)
    assert fault.why_not(target.run) is None
    injection = fault.plan(target, random.Random(0))
    assert left(tmp_path) == {(0, 3), *((worker, round_) for worker in range(4) for round_ in (1, 2))}, (
        "planned, not done"
    )
    within[1].touch()
    injection.strike()
    assert not within[0].exists()
    assert within[1].exists()
    within[1].unlink()
    assert left(tmp_path) == {(0, 1), (3, 1), *((worker, round_) for worker in (1, 2) for round_ in (1, 2))}


def test_only_a_group_that_carries_workers_loses_their_states(target, tmp_path):
    states(tmp_path, 1, 2)
    names = {"history": "3", "parent": "2"}
    target.told.tell("commit", group=0, rank=0, step=3, groups=[0, 1, 2], owners=[0, 0, 2, 0], **names)
    assert KillHostAndStates(group=1).why_not(target.run) == "the group that would be hit carries no worker now"
    drawn = {KillHostAndStates().plan(target, random.Random(seed)).target_group for seed in range(20)}
    assert drawn == {0, 2}
