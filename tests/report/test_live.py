"""What is told of a run while it goes: Prometheus figures, TensorBoard and W&B points."""

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from everstep.report.account import Now
from everstep.report.curves import Curves, TensorBoard, WandB, scalars_of
from everstep.report.live import Teller, Telling
from everstep.report.metrics import Metrics
from timeline import Timeline
from watched import until

DOCS = Path(__file__).parents[2] / "docs"


def losses(folder):
    found = EventAccumulator(str(folder)).Reload()
    if "loss_metrics/global_avg_loss" not in found.Tags()["scalars"]:
        return []
    return [(point.step, point.value) for point in found.Scalars("loss_metrics/global_avg_loss")]


def told(story, *sinks, since=0.0):
    """What follows the run is started, reads all there is, and ends."""
    now, curves = Now(), Curves(sinks, since)
    for event in story.events:
        before = now.commits
        now.take(event)
        if event["kind"] == "validation" or now.commits > before:
            curves.draw([(event, scalars_of(event, now.checking))])
    curves.close()


def test_every_committed_step_is_one_point_whoever_says_it_and_however_often_the_run_starts(tmp_path):
    story = Timeline()
    for first, last in ((1, 4), (5, 7)):
        for step in range(first, last + 1):
            story.commit(float(step), step, groups=(0, 1), loss=1.0 / step)
        told(story, TensorBoard(tmp_path / "tb"), since=first)
    assert losses(tmp_path / "tb") == [(step, pytest.approx(1.0 / step)) for step in range(1, 8)]


def test_a_teller_that_is_killed_leaves_no_gap(tmp_path):
    story = Timeline()
    for step in range(1, 4):
        story.commit(float(step), step, groups=(0, 1), loss=float(step))
    story.write(tmp_path)
    teller = Teller(Telling(tmp_path, tensorboard=True, since=0.0))
    until(lambda: (tmp_path / "tb").exists() and losses(tmp_path / "tb"), "the curves")
    teller._process.kill()
    teller._process.wait()
    torn = max((tmp_path / "tb").iterdir())
    torn.write_bytes(torn.read_bytes() + b"half a record")
    more = Timeline()
    more.commit(4.0, 4, groups=(0, 1), loss=4.0).write(tmp_path)
    until(lambda: teller.keep() or teller._process.poll() is None, "another teller")
    teller.close()
    assert {*losses(tmp_path / "tb")} == {(step, float(step)) for step in range(1, 5)}


def test_what_torchtitan_measures_is_drawn_and_validation_is_a_curve_of_its_own(tmp_path):
    story = Timeline()
    for step in (1, 2):
        story.commit(float(step), step, groups=(0, 1), loss=float(step))
        for event in story.logged[-2:]:
            event["metrics"] = {"throughput(tps)": 10.0 * step, "mfu(%)": 1.5, "loss_metrics/global_avg_loss": -1.0}
            event |= {"inner_steps": 5, "payload_bytes": 100 * step, "kept_bytes": 7} if step == 2 else {}
    story.add(2.5, "validation", 1, 2, rank=3, loss=7.5)
    told(story, TensorBoard(tmp_path / "tb"))
    found = EventAccumulator(str(tmp_path / "tb")).Reload()
    curves = {name: [(point.step, point.value) for point in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert curves["throughput(tps)"] == [(1, 10.0), (2, 20.0)]
    assert curves["mfu(%)"] == [(1, 1.5), (2, 1.5)]
    assert curves["loss_metrics/global_avg_loss"] == [(1, 1.0), (2, 2.0)], "the whole run's, not the rank's"
    assert curves["validation_metrics/loss"] == [(2, 7.5)]
    rounds = {tag: points for tag, points in curves.items() if tag.startswith("semi_sync/")}
    assert rounds == {
        "semi_sync/inner_steps": [(2, 5.0)],
        "semi_sync/bytes_across_groups": [(2, 200.0)],
        "semi_sync/bytes_kept": [(2, 7.0)],
    }


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    story = Timeline()
    for steps in ((1, 2, 3), (4, 5)):
        for step in steps:
            story.commit(float(step), step, groups=(0, 1), loss=float(step))
        sink = WandB(tmp_path)
        log = sink._run.log
        monkeypatch.setattr(sink._run, "log", lambda scalars, step, log=log: (logged.append(step), log(scalars, step)))
        told(story, sink, since=steps[0])
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "one W&B run, of two processes"
    assert all(file.stat().st_size > 1000 for file in files)
    assert logged == [1, 2, 3, 4, 5]


def test_the_endpoint_serves_what_the_events_say_under_this_machines_names(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    story = Timeline().add(0, "run_started", role="supervisor", groups=3)
    story.commit(1.0, 1, groups=(0, 1, 2), loss=2.5).add(
        1.5, "workers_died", 1, role="agent", reason="died", exitcodes={"0": -9}
    )
    story.write(tmp_path)
    address = f"http://127.0.0.1:{port}/metrics"

    def figures():
        try:
            page = urllib.request.urlopen(address, timeout=5).read().decode()
        except OSError:
            return ""
        return page if "everstep_committed_step 1.0" in page else ""

    teller = Teller(Telling(tmp_path, groups=3, min_groups=2, port=port))
    page = until(figures, "the figures")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "rebound.example"}), timeout=5)
    teller.close()
    assert "everstep_loss 2.5" in page
    assert "everstep_tokens_total 100.0" in page, "said by three groups, counted once"
    assert "everstep_groups_taking_part 2.0" in page, "of the newest step, and alive"
    assert 'everstep_events_total{kind="workers_died"} 1.0' in page
    assert "everstep_min_groups 2.0" in page


def test_a_port_that_is_taken_costs_the_figures_and_not_the_curves(tmp_path, capfd):
    Timeline().commit(1.0, 1, groups=(0,), loss=2.5).write(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        teller = Teller(Telling(tmp_path, port=port, tensorboard=True, since=0.0))
    until(lambda: (tmp_path / "tb").exists() and losses(tmp_path / "tb"), "the curves")
    teller.close()
    assert f"no figures on 127.0.0.1:{port} (fault_tolerance.metrics_port)" in capfd.readouterr().out
    assert losses(tmp_path / "tb") == [(1, 2.5)]


def figures_after(story):
    now = Now()
    metrics = Metrics(now, groups=2, min_groups=1)
    for event in story.events:
        now.take(event)
    return lambda name, **labels: metrics.registry.get_sample_value(f"everstep_{name}", labels)


def test_what_several_groups_tell_of_counts_once():
    story = Timeline()
    for group in (0, 1):
        story.attempt(1.0, 1, group, computed=[0], recomputed=[0], committed=False)
        story.add(2.0, "audit", group, 50, agreed=False, differing=[1])
        story.add(3.0, "finding", group, 51, rank=1, action="refused")
    of = figures_after(story)
    assert of("attempts_thrown_away_total") == 1
    assert of("replicas_diverged_total") == 1
    assert of("findings_total", action="refused") == 2, "those of ranks that do not speak for their group, too"
    assert of("findings_total", action="corrected") == 0


def test_who_lives_is_known_between_commits():
    story = Timeline().add(0.5, "run_started", role="supervisor", groups=2).start(1.0, 0, 1)
    story.add(2.0, "workers_stalled", 1, role="agent")
    story.add(3.0, "workers_died", 1, role="agent", reason="died", exitcodes={"0": -9})
    of = figures_after(story)
    assert of("groups_alive") == 1
    assert of("groups_given_up") == 0
    assert of("events_total", kind="workers_stalled") == 1
    assert of("events_total", kind="unfit") == 0, "so that the first one is an increase"
    assert of("last_progress_timestamp_seconds") == 0.5, "before the first commit, when the session began"
    assert of("group_seconds_total", group="1", state="start-up") == 0.5
    assert of("group_seconds_total", group="1", state="stalled") == 2.0
    story.add(4.0, "agent_ended", 1, role="agent", status="failed")
    assert figures_after(story)("groups_given_up") == 1
    story.start(5.0, 1)
    of = figures_after(story)
    assert of("groups_given_up") == 0
    assert of("groups_alive") == 2
    assert of("group_seconds_total", group="1", state="restarting") == 2.0


def test_nothing_is_started_that_is_not_asked_for(tmp_path):
    teller = Teller(Telling(tmp_path))
    assert (teller.address, teller._process) == ("", None)
    teller.close()


def test_dashboard_and_alerts_name_figures_that_exist():
    families = Metrics(Now(), 1, 1).registry.collect()
    known = {family.name + ("_total" if family.type == "counter" else "") for family in families}

    def mentioned(text):
        words = "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
        return {word for word in words if word.startswith("everstep_")}

    dashboard = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DOCS / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len(rules) == 3
    for expression in (*expressions, *(rule["expr"] for rule in rules)):
        assert mentioned(expression) <= known, expression
    assert mentioned(" ".join(expressions)) == known, "the dashboard shows all of them"
