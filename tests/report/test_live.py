"""What is told of a run while it goes: Prometheus figures, TensorBoard and W&B points."""

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from everstep.report import metrics
from everstep.report.account import Account
from everstep.report.curves import WandB
from everstep.report.live import Teller
from timeline import Timeline
from watched import until

DOCS = Path(__file__).parents[2] / "docs"


def points(folder):
    if not folder.exists():
        return {}
    found = EventAccumulator(str(folder)).Reload()
    return {tag: [(point.step, point.value) for point in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def losses(folder):
    return points(folder).get("loss_metrics/global_avg_loss", [])


@pytest.fixture
def telling(tmp_path):
    """Tells of the run in tmp_path, with a config."""
    tellers = []

    def tell(config="", **what):
        (tmp_path / "config.toml").write_text(config)
        tellers.append(Teller(tmp_path, **what))
        return tellers[-1]

    yield tell
    for one in tellers:
        one.close()


TENSORBOARD = "[metrics]\nenable_tensorboard = true\n"


def test_each_step_is_one_point_whoever_says_it_however_often_the_run_and_the_teller_start(
    tmp_path, telling, monkeypatch
):
    for first, last in ((1, 3), (4, 5)):
        story = Timeline()
        for step in range(first, last + 1):
            story.commit(float(step), step, groups=(0, 1), loss=float(step))
        story.write(tmp_path)
        monkeypatch.setattr("everstep.report.live.time.time", lambda since=float(first): since)
        teller = telling(TENSORBOARD)
        until(lambda last=last: (last, float(last)) in losses(tmp_path / "tb"), "the curves")
        assert losses(tmp_path / "tb") == [(step, float(step)) for step in range(1, last + 1)]
        if first == 1:
            teller.close()
    teller._process.kill()
    teller._process.wait()
    torn = max((tmp_path / "tb").iterdir())
    torn.write_bytes(torn.read_bytes() + b"half a record")
    Timeline().commit(6.0, 6, groups=(0, 1), loss=6.0).write(tmp_path)
    until(lambda: teller.keep() or teller._process.poll() is None, "another teller")
    until(lambda: (6, 6.0) in losses(tmp_path / "tb"), "the curves")
    assert {*losses(tmp_path / "tb")} == {(step, float(step)) for step in range(1, 7)}, "no gap"


def test_what_torchtitan_measures_is_drawn_and_validation_is_a_curve_of_its_own(tmp_path, telling, monkeypatch):
    story = Timeline()
    for step in (1, 2):
        story.commit(float(step), step, groups=(0, 1), loss=float(step))
        for event in story.logged[-2:]:
            event["metrics"] = {"throughput(tps)": 10.0 * step, "mfu(%)": 1.5, "loss_metrics/global_avg_loss": -1.0}
            event |= {"inner_steps": 5, "payload_bytes": 100 * step, "kept_bytes": 7} if step == 2 else {}
    story.add(2.5, "validation", 1, 2, rank=3, loss=7.5).write(tmp_path)
    monkeypatch.setattr("everstep.report.live.time.time", lambda: 0.0)
    telling(TENSORBOARD).close()
    curves = points(tmp_path / "tb")
    assert curves["throughput(tps)"] == [(1, 10.0), (2, 20.0)]
    assert curves["mfu(%)"] == [(1, 1.5), (2, 1.5)]
    assert curves["loss_metrics/global_avg_loss"] == [(1, 1.0), (2, 2.0)], "the whole run's, not the rank's"
    assert curves["validation_metrics/loss"] == [(2, 7.5)]
    assert {tag: found for tag, found in curves.items() if tag.startswith("semi_sync/")} == {
        "semi_sync/inner_steps": [(2, 5.0)],
        "semi_sync/bytes_across_groups": [(2, 200.0)],
        "semi_sync/bytes_kept": [(2, 7.0)],
    }


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    for steps in ((1, 2, 3, 2, 3), (4, 5)):
        sink = WandB(tmp_path)
        log = sink._run.log
        monkeypatch.setattr(sink._run, "log", lambda scalars, step, log=log: (logged.append(step), log(scalars, step)))
        for step in steps:
            sink.write(step, float(step), {"loss": 1.0})
        sink.close()
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "one W&B run, of two processes"
    assert logged == [1, 2, 3, 3, 4, 5], "W&B's steps only grow"


def test_the_endpoint_serves_what_the_events_say_under_this_machines_names(tmp_path, telling, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        telling(metrics=("127.0.0.1", port)).close()
    assert f"no figures on 127.0.0.1:{port} (fault_tolerance.metrics_port)" in capfd.readouterr().out
    story = Timeline().add(0, "run_started", role="supervisor", groups=3)
    story.commit(1.0, 1, groups=(0, 1, 2), loss=2.5)
    story.add(1.5, "workers_died", 1, role="agent", reason="died", exitcodes={"0": -9}).write(tmp_path)
    address = f"http://127.0.0.1:{port}/metrics"

    def figures():
        page = urllib.request.urlopen(address, timeout=5).read().decode()
        return page if "everstep_committed_step 1.0" in page else ""

    telling("[fault_tolerance]\ngroups = 3\nmin_groups = 2\n", metrics=("127.0.0.1", port))
    page = until(figures, "the figures")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(address, headers={"Host": "rebound.example"}), timeout=5)
    for line in (
        "everstep_loss 2.5",
        "everstep_tokens_total 100.0",  # said by three groups, counted once
        "everstep_groups_taking_part 2.0",  # of the newest step, and alive
        'everstep_events_total{kind="workers_died"} 1.0',
        "everstep_min_groups 2.0",
    ):
        assert line in page.splitlines()


def test_dashboard_and_alerts_name_figures_that_exist():
    families = metrics.Figures(Account(), 1, 1).collect()
    known = {family.name + ("_total" if family.type == "counter" else "") for family in families}

    def mentioned(text):
        words = "".join(c if c.isalnum() or c == "_" else " " for c in text).split()
        return {word for word in words if word.startswith("everstep_")}

    dashboard = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = yaml.safe_load((DOCS / "alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    for expression in (*expressions, *(rule["expr"] for rule in rules)):
        assert mentioned(expression) <= known, expression
    assert mentioned(" ".join(expressions)) == known, "the dashboard shows all of them"
