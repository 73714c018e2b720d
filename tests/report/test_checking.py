"""What attention checks cover, cost and found reaches everybody who looks: report, page, status, view and metrics."""

import pytest

from everstep.launch.status import status as status_of
from everstep.launch.view import RunState
from everstep.report.account import Now
from everstep.report.curves import scalars_of
from everstep.report.metrics import Metrics
from everstep.report.page import write_page
from everstep.report.score import score, summary
from everstep.run.events import read_events
from timeline import Timeline

UNFIT = "rank 1 on host a refused slot 3 of step 2 2 times: layer 4 wq.y (moderate): take it out of service."
NARROW = "Another group got the same: bounds are widened."
COVERED = "12 of 12 parts checked, 1.5% of the time, each layer in 3.0% of the slots"
JUDGED = "1 rank sent away as unfit, 1 slot accepted with findings, 1 slot not finite on any group"


def found(action, rank=1):
    return {"slot": 3, "layer": 4, "section": "wq.y", "anomaly": "nan", "action": action, "rank": rank}


@pytest.fixture
def run_dir(tmp_path):
    story = Timeline().add(0.0, "run_started", role="supervisor", groups=2, steps=4, ranks_per_group=2, seed=0)
    story.start(0.5, 0, 1).commit(1, 1, [0, 1])
    for rank, (overhead, rate) in enumerate(((0.01, 0.03), (0.015, 0.05))):
        story.add(1.1, "attention_schedule", 0, 1, rank=rank, coverage="12 of 12", overhead=0.5, rate=1.0)
        story.add(1.2, "attention_schedule", 0, 1, rank=rank, coverage="12 of 12", overhead=overhead, rate=rate)
    for action in ("recomputed", "refused"):
        story.add(1.3, "finding", 0, 2, **found(action))
    story.add(1.3, "slot_refused", 0, 2, slot=3, reason="attention findings")
    story.add(1.4, "unfit", 0, 2, rank=1, slot=3, reason=UNFIT)
    for group in (0, 1):
        story.add(1.5, "slot_accepted", group, 2, slot=1, reason=NARROW)
        story.add(1.6, "not_finite", group, 2, slot=2, reason="it is not finite")
    story.commit(2, 2, [0, 1])
    for group in (0, 1):
        story.add(3, "agent_ended", group, role="agent", status="done", reason="")
    return story.write(tmp_path)


def test_the_report_counts_what_was_found_and_says_what_is_checked(run_dir):
    figures = score(run_dir)
    assert [figures[f"findings_{name}"] for name in ("corrected", "recomputed", "refused")] == [0, 1, 1]
    assert [figures[name] for name in ("ranks_unfit", "slots_accepted", "slots_not_finite")] == [1, 1, 1]
    assert figures["attention_coverage"] == "12 of 12"
    assert (figures["attention_overhead"], figures["attention_rate"]) == (0.015, 0.03)
    lines = summary(figures).splitlines()
    assert f"attention {COVERED}" in lines
    assert f"findings  0 corrected, 1 recomputed, 1 refused; {JUDGED}" in lines


def test_the_page_names_who_was_sent_away_first_and_the_counts_below(run_dir):
    text = write_page(run_dir).read_text()
    top, rest = text.split('class="cards"', 2)[0], text.split("<h2>Attention check</h2>")[1]
    assert UNFIT.rstrip(".") in top
    for sentence in (COVERED, JUDGED, "1 refused"):
        assert sentence in rest


def test_status_and_view_tell_of_it(run_dir):
    assert f"checks  attention: {COVERED}; {JUDGED}" in status_of(run_dir).splitlines()
    state = RunState()
    lines = [line.split(" ", 1)[1] for line in map(state.apply, read_events(run_dir)) if ":" in line[:3]]
    assert [line for line in lines if line.startswith("attention: 12 of 12")], "once it is known"
    assert "group 0 rank 1: layer 4 wq.y, slot 3 of step 2: nan, refused" in lines
    assert "group 0: slot 3 of step 2 was refused: attention findings" in lines
    assert [UNFIT, f"group 1: {NARROW}"] == [line for line in lines if line.endswith((UNFIT, f"1: {NARROW}"))]


def test_metrics_and_curves_have_it(run_dir):
    now, points = Now(), []
    metrics = Metrics(now, 2, 1)
    for event in read_events(run_dir):
        before = now.commits
        now.take(event)
        if now.commits > before:
            points.append(scalars_of(event, now.checking))

    def of(name, **labels):
        return metrics.registry.get_sample_value(f"everstep_{name}", labels)

    assert of("findings_total", action="refused") == 1
    assert [of("events_total", kind=kind) for kind in ("unfit", "slot_accepted", "not_finite")] == [1, 2, 2]
    assert (of("attention_parts_checked"), of("attention_overhead")) == (12, 0.015)
    assert of("attention_rate") == 0.03
    first, last = points
    assert not [name for name in first if name.startswith("attention/")]
    assert {name: value for name, value in last.items() if name.startswith("attention/")} == {
        "attention/findings": 2.0,
        "attention/ranks_unfit": 1.0,
        "attention/overhead": 0.015,
        "attention/rate": 0.03,
    }


@pytest.mark.parametrize("damage", [{"slot": "x"}, {"slot": None}, {"reason": None}])
def test_an_event_that_somebody_else_wrote_is_passed_over(tmp_path, damage):
    event = {"slot": 1, "reason": NARROW} | damage
    story = Timeline().start(0, 0).commit(1, 1, [0]).add(2, "slot_accepted", 0, 2, **event)
    assert score(story.write(tmp_path))["slots_accepted"] == 0
