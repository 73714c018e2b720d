"""What `everstep status` and the metrics say of groups whose snapshots are not coded."""

import pytest

from everstep.launch import slurm
from everstep.launch.status import local_status
from everstep.report.metrics import Metrics
from everstep.report.protection import Protection
from everstep.run.events import EventLog
from everstep.run.files import write_json
from timeline import Timeline

REASON = "the keeper of group 2 is silent"


def story():
    """Group 2 is unprotected from step 3 on; by rank 1 until step 6 only, by rank 0 to the end, step 8."""
    told = Timeline()
    for step in range(1, 9):
        told.commit(float(step), step, groups=(0, 1, 2))
        for group in range(3):
            told.add(step + 0.1, "snapshot", group, step)
        if step == 1:
            for group in range(3):
                told.add(1.2, "snapshot_protected", group, 1, steps=0, since_step=None)
        if step == 3:
            for rank in (0, 1):
                told.add(3.2, "snapshot_unprotected", 2, 3, rank=rank, coded_step=2, reason=REASON)
        if step == 6:
            told.add(6.2, "snapshot_protected", 2, 6, rank=1, steps=3, since_step=3)
    return told


def following(told):
    protection = Protection()
    for event in told.events:
        protection.take(event)
    return protection


def test_a_group_is_unprotected_until_all_its_ranks_are_coded_again():
    told = story()
    protection = following(told)
    assert {group: found.steps for group, found in protection.exposed().items()} == {2: 6}, "steps 3 to 8"
    assert protection.line() == f"of step 8; UNPROTECTED: group 2 for 6 steps ({REASON})"
    told.commit(9.0, 9, groups=(0, 1, 2))
    told.add(9.2, "snapshot_protected", 2, 9, steps=6, since_step=3)
    protection = following(told)
    assert protection.exposed() == {}
    assert protection.steps == {2: 6}
    assert protection.line() == "of step 8; all are coded"


@pytest.mark.parametrize("what", ["commits without it", "given up", "a new start"])
def test_who_holds_nothing_newer_than_the_others_is_not_unprotected(what):
    told = story()
    if what == "commits without it":
        told.commit(9.0, 9, groups=(0, 1))
    elif what == "given up":
        told.add(9.0, "agent_ended", 2, role="agent", status="failed", reason="")
    else:
        told.add(9.0, "run_started", role="supervisor", groups=3)
    assert following(told).exposed() == {}


def test_nothing_is_said_to_be_coded_before_a_keeper_has_said_so():
    told = Timeline().commit(1.0, 1, groups=(0, 1)).add(1.1, "snapshot", 0, 1)
    assert following(told).line() == "of step 1; none is coded yet"
    assert following(Timeline().commit(1.0, 1, groups=(0, 1))).line() == ""


def test_of_many_groups_a_few_are_named():
    told = story()
    for group in range(20):
        told.add(8.5, "snapshot_unprotected", group, 8, coded_step=7, reason="full")
    assert following(told).line().endswith("group 5 for 1 step (full), 14 more groups")


def write(run_dir, told):
    for event in told.events:
        log = EventLog(run_dir, event["group"], event["rank"], event["role"])
        rest = {k: v for k, v in event.items() if k not in ("t", "mono", "role", "group", "rank", "step", "kind")}
        log.emit(event["kind"], event["step"], **rest)
        log.close()


def test_status_has_a_line_of_it_on_one_machine_and_on_slurm(tmp_path, monkeypatch):
    write(tmp_path, story())
    line = f"of step 8; UNPROTECTED: group 2 for 6 steps ({REASON})"
    assert f"memory  snapshots {line}" in local_status(tmp_path).splitlines()
    write_json(slurm.job_file(tmp_path), {"groups": 1, "lighthouse": 2})
    monkeypatch.setattr(slurm, "states_of", lambda job: [])  # no Slurm here; tests/slurm has one
    assert f"snapshots   {line}" in slurm.status(tmp_path).splitlines()


def test_the_metrics_count_the_steps_and_go_back_to_0():
    told = story()
    value = lambda metrics, group: metrics.registry.get_sample_value(  # noqa: E731
        "everstep_snapshot_unprotected_steps", {"group": str(group)}
    )
    metrics = Metrics(3, 1)
    metrics.follow(told.events)
    assert [value(metrics, group) for group in range(3)] == [0, 0, 6]
    metrics.follow(Timeline().add(9.0, "snapshot_protected", 2, 9, steps=6, since_step=3).events)
    assert [value(metrics, group) for group in range(3)] == [0, 0, 0]
    assert metrics.registry.get_sample_value("everstep_snapshot_unprotected", {"group": "2"}) == 0
