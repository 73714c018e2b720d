"""Tests that report, page, status and view all show what attention checks and snapshots report."""

import pytest

from everstep.commands.status import status_of
from everstep.launch.view import RunState
from everstep.report.account import read
from everstep.report.score import figures_of, score, summary
from everstep.run.events import read_events
from timeline import Timeline, page_of

UNFIT = "rank 1 on host a refused slot 3 of step 2 2 times: layer 4 wq.y (moderate): take it out of service."
NARROW = "Another group got the same: bounds are widened."
COVERED = "12 of 12 parts checked, overhead 1.5%, rate 3.0%"
FOUND = "0 corrected, 1 recomputed, 1 refused"
JUDGED = "slots accepted 1, not finite 1; ranks unfit 1"
PROTECTED = "protected: step 1, 1 steps old, survives any 1 of hosts a b"


@pytest.fixture
def run_dir(tmp_path):
    story = Timeline().add(0.0, "run_started", role="supervisor", groups=2, steps=4, ranks_per_group=2, seed=0)
    for group in (0, 1):
        story.add(0.2, "keeper_found", group, None, host="ab"[group], pid=7, address="h:1")
    story.start(0.5, 0, 1).commit(1, 1, [0, 1])
    for rank, (overhead, rate) in enumerate(((0.01, 0.03), (0.015, 0.05))):
        story.add(1.1, "attention_schedule", 0, 1, rank=rank, coverage="12 of 12", overhead=0.5, rate=1.0)
        story.add(1.2, "attention_schedule", 0, 1, rank=rank, coverage="12 of 12", overhead=overhead, rate=rate)
    for action in ("recomputed", "refused"):
        story.add(1.3, "finding", 0, 2, rank=1, slot=3, layer=4, section="wq.y", anomaly="nan", action=action)
    story.add(1.3, "slot_refused", 0, 2, slot=3, reason="attention findings")
    story.add(1.4, "unfit", 0, 2, rank=1, slot=3, reason=UNFIT)
    for group, rank in ((0, 0), (1, 0), (1, 1)):
        story.add(1.4, "snapshot_protected", group, 1, rank=rank, members=[0, 1], survives=1, exposed=[])
        story.add(1.5, "slot_accepted", group, 2, rank=rank, slot=1, reason=NARROW)
        story.add(1.6, "not_finite", group, 2, slot=2, reason="it is not finite")
    for damage in ({"slot": "x"}, {"slot": None}, {"reason": None}):  # events that another program wrote
        story.add(1.7, "slot_accepted", 0, 2, **({"slot": 7, "reason": NARROW} | damage))
    story.add(1.8, "fault_undo_failed", None, role="chaos", fault="stop-worker", target_group=1, reason="gone")
    story.commit(2, 2, [0, 1])
    for group in (0, 1):
        story.add(3, "agent_ended", group, role="agent", status="done", reason="")
    return story.write(tmp_path)


def test_report_and_page(run_dir):
    figures = score(run_dir)
    assert [figures[f"findings_{name}"] for name in ("corrected", "recomputed", "refused")] == [0, 1, 1]
    assert [figures[name] for name in ("ranks_unfit", "slots_accepted", "slots_not_finite")] == [1, 1, 1]
    assert (figures["attention_overhead"], figures["attention_rate"]) == (0.015, 0.03)
    lines = {f"attention {COVERED}", f"findings  {FOUND}", f"refused   {JUDGED}", f"memory    {PROTECTED}"}
    assert lines <= {*summary(figures).splitlines()}
    page = page_of(run_dir).read_text()
    for sentence in (UNFIT.rstrip("."), PROTECTED, COVERED, JUDGED, FOUND):
        assert sentence in page


def test_status_and_view(run_dir):
    said = status_of(run_dir).splitlines()
    assert {f"attention {COVERED}", f"findings {FOUND}", f"refused {JUDGED}", f"memory  {PROTECTED}"} <= {*said}
    state = RunState()
    lines = [line.split(" ", 2)[2] for line in map(state.apply, read_events(run_dir)) if "-" in line[:5]]
    assert [line for line in lines if line.startswith("attention: 12 of 12")], "once it is known"
    assert "group 0 rank 1: layer 4 wq.y, slot 3 of step 2: nan, refused" in lines
    assert "group 0: slot 3 of step 2 was refused: attention findings" in lines
    assert "fault could not be undone: stop-worker on group 1: gone" in lines
    assert lines.count(UNFIT) == 1 == lines.count(f"group 1: slot 1 of step 2 is accepted: {NARROW}")


@pytest.mark.parametrize(("event", "line"), [
    (("snapshot_protected", 7, {"members": [0, 1, 2], "survives": 1, "exposed": [0]}),
     "protected: step 7, 1 steps old, survives any 1 of hosts b c, NOT the loss of a"),
    (("snapshot_protected", 8, {"members": [0], "survives": 0, "exposed": [0]}),
     "protected: step 8, 0 steps old, survives the death of all trainers, NOT the loss of a"),
    (("snapshot_protected", 8, {"members": [0, 3], "survives": 1, "exposed": []}),
     "protected: step 8, 0 steps old, survives any 1 of hosts (group 3) a"),
    (("snapshot", 8, {}), "protected: step 5, 3 steps old, survives any 1 of hosts a b c"),
    (("run_started", None, {"groups": 3}), ""),
    (("snapshot_failed", 0, {"reason": "no room"}), "protected: step 5, 3 steps old, survives any 1 of hosts a b c"),
])  # fmt: skip
def test_the_line_on_snapshots_says_what_is_coded_and_nothing_newer(event, line):
    told = Timeline().add(0, "run_started", role="supervisor", groups=3)
    for group in range(3):
        told.add(0.5, "keeper_found", group, None, host="abc"[group], pid=7, address="h:1")
    for step in range(1, 9):
        told.commit(float(step), step, groups=(0, 1, 2))
    told.add(6.2, "snapshot_protected", 0, 5, members=[0, 1, 2], survives=1, exposed=[])
    kind, step, fields = event
    told.add(9.0, kind, 0, step, **fields)
    assert read(told.events).protection.line() == line


def test_a_snapshot_that_is_lost_protects_no_more():
    """For instance if all hosts are lost, and the run goes back to a checkpoint in the same start or the next one."""
    run = Timeline().start(0, 0)
    for step in (1, 2, 3, 4):
        run.commit(float(step), step, groups=(0,))
    run.add(4.5, "snapshot_protected", 0, 4, members=[0], survives=0, exposed=[0])
    assert read(run.events).protection.line().startswith("protected: step 4, 0 steps old")
    again = [*run.events]
    saved = {"role": "worker", "group": 0, "rank": 0, "step": 4, "mono": 0.0, "t": 4.7, "kind": "checkpoint_saved"}
    for status, before, is_gone in (("done", [], True), ("stopped", [saved], True), ("stopped", [], False)):
        end = saved | {"t": 5.0, "kind": "run_ended", "group": None, "status": status, "reason": ""}
        assert (read([*again, *before, end]).protection.line() == "") is is_gone, "keepers remove what nobody needs"
    assert read(run.start(6, 0, step=3).commit(7.0, 3, groups=(0,)).events).protection.line() == ""
    ended = {"role": "agent", "group": 0, "rank": None, "step": None, "mono": 0.0}
    again += [ended | {"t": 5.0, "kind": "agent_ended", "status": "stopped", "reason": ""}]
    assert read([*again, ended | {"t": 6.0, "kind": "agent_up", "pid": 7}]).protection.line() == ""


def test_a_run_whose_snapshots_all_failed_is_unprotected():
    run = Timeline().commit(1.0, 1, groups=(0,)).add(1.5, "snapshot_failed", 0, 1, reason="no room")
    assert figures_of(read(run.events))["snapshots"] == "UNPROTECTED: no snapshot is coded"
