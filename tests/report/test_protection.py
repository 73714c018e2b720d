"""What `everstep status` and the metrics say of snapshots: what is coded, how old it is, what it survives."""

import pytest

from everstep.launch.status import status as status_of
from everstep.report.account import read
from everstep.report.metrics import Metrics
from everstep.report.page import write_page
from everstep.report.protection import Protection
from everstep.report.score import score, summary
from everstep.run.events import EventLog
from timeline import Timeline

LOST = "group 2 did not keep up; the part of group 2 did not come in time"


def story(*more):
    """Step 5 of three groups is coded, eight steps are committed. `more`: kind, group, step, fields."""
    told = Timeline()
    for group in range(3):
        told.add(0.5, "keeper_found", group, None, host="abc"[group], pid=7, address="h:1")
    for step in range(1, 9):
        told.commit(float(step), step, groups=(0, 1, 2))
    for group in range(3):
        told.add(6.2, "snapshot_protected", group, 5, members=[0, 1, 2], survives=1, exposed=[])
    for kind, group, step, fields in more:
        told.add(9.0, kind, group, step, **fields)
    return told


def following(told):
    protection = Protection()
    for event in told.events:
        protection.take(event)
    return protection


EXPOSED = {"members": [0, 1, 2], "survives": 1, "exposed": [0]}
ALONE = {"members": [0], "survives": 0, "exposed": [0]}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "protected: step 5, 3 steps old, survives any 1 of hosts a b c"),
        (
            [("snapshot_unprotected", 0, 6, {"coded_step": 5, "reason": LOST})],
            f"protected: step 5, 3 steps old, survives any 1 of hosts a b c; since then: {LOST}",
        ),
        (
            [("snapshot_protected", 0, 7, EXPOSED)],
            "protected: step 7, 1 steps old, survives any 1 of hosts b c, NOT the loss of a",
        ),
        (
            [("snapshot_protected", 0, 8, ALONE)],
            "protected: step 8, 0 steps old, survives all trainers, NOT the loss of a",
        ),
        ([("snapshot", 0, 8, {})], "protected: step 5, 3 steps old, survives any 1 of hosts a b c"),
    ],
)
def test_the_line_says_what_is_coded_and_nothing_newer(more, line):
    assert following(story(*more)).line() == line


NO_ROOM = "snapshots need 9 bytes more, and there are 0 free in /dev/shm"


def test_a_run_without_room_for_snapshots_says_so_in_status_report_and_page(tmp_path):
    told = Timeline()
    told.commit(1.0, 1, groups=(0,))
    told.add(1.5, "snapshot_failed", 0, 1, reason=NO_ROOM)
    told.add(2.0, "snapshot_unprotected", 0, 1, coded_step=None, reason="another group did not finish it")
    line = f"UNPROTECTED, no snapshot is coded: {NO_ROOM}"
    assert following(told).line() == line
    told.write(tmp_path)
    assert score(tmp_path)["snapshots"] == line
    assert f"memory    {line}" in summary(score(tmp_path))
    write_page(tmp_path)
    assert line in (tmp_path / "report.html").read_text()


def test_status_and_metrics_say_the_same(tmp_path):
    for group in range(2):
        log = EventLog(tmp_path, group, 0, "worker")
        for step in (1, 2, 3):
            named = {"history": str(step), "parent": str(step - 1)}
            log.emit("commit", step, groups=[0, 1], loss=1.0, tokens=8.0, attempt=0, owners=[0, 1], **named)
        log.emit("snapshot_protected", 2, members=[0, 1], survives=1, exposed=[])
    assert "memory  protected: step 2, 1 steps old, survives any 1 of hosts (group 0) (group 1)" in status_of(tmp_path)
    value = Metrics(read(story().events), 3, 1).registry.get_sample_value
    assert value("everstep_snapshot_protected_step") == 5
    assert value("everstep_snapshot_age_steps") == 3
    assert value("everstep_snapshot_survives_hosts") == 1
