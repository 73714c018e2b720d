"""What is told of a run while it goes: Prometheus figures, TensorBoard points."""

import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from everstep.report.live import Teller, Telling, telling
from everstep.report.metrics import Metrics
from everstep.report.scalars import Scalars, TensorBoard
from timeline import Timeline

DOCS = Path(__file__).parents[2] / "docs"


def losses(folder):
    found = EventAccumulator(str(folder)).Reload().Scalars("loss_metrics/global_avg_loss")
    return [(point.step, point.value) for point in found]


def test_every_committed_step_is_one_point_whoever_says_it_and_however_often_the_teller_starts(tmp_path):
    for first in (1, 4):
        story = Timeline()
        for step in range(first, first + 4):
            story.commit(float(step), step, groups=(0, 1), loss=1.0 / step)
        scalars = Scalars(tmp_path, [TensorBoard(tmp_path / "tb")])
        scalars.follow(story.events)
        scalars.close()
        time.sleep(1.1)  # TensorBoard names its files by the second
    assert losses(tmp_path / "tb") == [(step, pytest.approx(1.0 / step)) for step in range(1, 8)]


def test_a_run_that_went_back_writes_its_steps_again(tmp_path):
    story = Timeline()
    for step in (1, 2, 3):
        story.commit(float(step), step, groups=(0,), loss=float(step))
    story.start(4.0, 0, step=2, source="disk")
    for step in (2, 3, 4):
        story.commit(3.0 + step, step, groups=(0,), loss=10.0 + step)
    scalars = Scalars(tmp_path, [TensorBoard(tmp_path / "tb")])
    scalars.follow(story.events)
    scalars.close()
    assert losses(tmp_path / "tb") == [(1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]


def test_the_endpoint_serves_what_the_events_say(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    story = Timeline().add(0, "run_started", role="supervisor", groups=3)
    story.commit(1.0, 1, groups=(0, 1, 2), loss=2.5).add(1.5, "workers_died", 1, role="agent", reason="x", exitcodes={})
    for event in story.events:
        event.setdefault("tokens", 100)
    story.write(tmp_path)
    teller = Teller(Telling(tmp_path, port=port))
    deadline = time.monotonic() + 30
    while True:
        try:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except OSError:
            page = ""
        if "everstep_committed_step 1.0" in page or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    teller.close()
    assert "everstep_loss 2.5" in page
    assert "everstep_tokens_total 100.0" in page, "said by three groups, counted once"
    assert "everstep_groups_taking_part 3.0" in page
    assert 'everstep_deaths_total{group="1"} 1.0' in page


def test_nothing_is_told_that_is_not_asked_for(tmp_path):
    assert not telling(tmp_path, "127.0.0.1", {}, 0).anything
    asked = telling(tmp_path, "127.0.0.1", {"metrics": {"enable_tensorboard": True, "save_tb_folder": "curves"}}, 0)
    assert (asked.tensorboard, asked.tensorboard_folder, asked.wandb) == (True, "curves", False)


def known_names():
    names = set()
    for family in Metrics().registry.collect():
        names.add(family.name + ("_total" if family.type == "counter" else ""))
    return names


def mentioned(text):
    words = "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
    return {word for word in words if word.startswith("everstep_")}


def test_dashboard_and_alerts_name_figures_that_exist():
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DOCS / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len(rules) == 3
    for expression in (*expressions, *(rule["expr"] for rule in rules)):
        assert mentioned(expression) <= known_names(), expression
    assert mentioned(" ".join(expressions)) == known_names(), "the dashboard shows all of them"
