"""Tests of what shows a run while it goes: page, Prometheus figures, TensorBoard and W&B points, webhook."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from everstep.config.sections import FaultTolerance
from everstep.launch.machine import free_port
from everstep.report.curves import Curves, WandB, scalars_of
from everstep.report.live import PAUSE_S, Teller
from everstep.run.events import EventLog
from timeline import Timeline, page_of
from watched import environment, until


def losses(folder):
    if not folder.exists():
        return []
    found = EventAccumulator(str(folder)).Reload()
    tag = "loss_metrics/global_avg_loss"
    return [(point.step, point.value) for point in found.Scalars(tag)] if tag in found.Tags()["scalars"] else []


def steps(first, last):
    story = Timeline()
    for step in range(first, last + 1):
        story.commit(float(step), step, groups=(0, 1), loss=float(step))
    return story


def answer(address):
    try:
        return urllib.request.urlopen(address, timeout=30).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code)


@pytest.fixture
def told(tmp_path, hook, request):
    """A run of three steps, in a directory whose name is a free port, and the arguments of its Teller."""
    run_dir = tmp_path / str(port := free_port())
    steps(1, 3).add(0, "run_started", role="supervisor", groups=3, steps=9).write(run_dir)
    (run_dir / "config.toml").write_text(f'[fault_tolerance]\nexact = false\nnotify = "{hook.address}"\n')
    ft = FaultTolerance(enable=True, groups=3, min_groups=2, metrics_port=port, notify=hook.address)

    def tell():
        teller = Teller(run_dir, "127.0.0.1", ft, {"enable_tensorboard": True}, page=True)
        request.addfinalizer(teller.close)
        return teller

    return run_dir, f"http://127.0.0.1:{port}/metrics", tell


def test_page_figures_and_curves_go_on_with_the_run_and_when_their_process_is_killed(told):
    run_dir, figures, tell = told

    def tells(teller, last):
        """Whether page, figures and curves all show this many steps."""
        page = answer(teller.address), (run_dir / "report.html").read_text()
        return (
            all(f'<td class="text">{last} of 9</td>' in text and 'class="broken"' not in text for text in page)
            and f"everstep_committed_step {last}.0" in answer(figures).splitlines()
            and (last, float(last)) in losses(run_dir / "tb")
        )

    first = tell()
    until((run_dir / "report.html").exists, "the page")
    until(lambda: tells(first, 3), "three steps")
    first.close()
    steps(4, 5).add(3.5, "run_started", role="supervisor", groups=3, steps=9).write(run_dir)
    second = tell()
    until(lambda: tells(second, 5), "five steps")
    assert losses(run_dir / "tb") == [(step, float(step)) for step in range(1, 6)], "each once, whoever said it"
    second._process.kill()
    second._process.wait()
    torn = max((run_dir / "tb").iterdir())
    torn.write_bytes(torn.read_bytes() + b"half a record")
    Timeline().add(5.5, "workers_died", 1, role="agent", reason="died", exitcodes={"0": -9}).write(run_dir)
    steps(6, 6).write(run_dir)
    until(lambda: second.keep() or second._process.poll() is None, "another process")
    until(lambda: tells(second, 6), "six steps")
    assert {*losses(run_dir / "tb")} == {(step, float(step)) for step in range(1, 7)}, "no gap"
    lines = answer(figures).splitlines()
    for line in ("loss 6.0", "tokens_total 600.0", "groups_taking_part 2.0", "min_groups 2.0"):
        assert f"everstep_{line}" in lines, "what two groups say is counted once"
    assert 'everstep_events_total{kind="workers_died"} 1.0' in lines
    assert json.loads((run_dir / "report.json").read_text())["steps"] == 6


def test_steps_and_troubles_of_the_time_before_it_are_told_even_if_it_ends_at_once(tmp_path, hook):
    """As when a cluster requeues the lighthouse's job, and the groups go on meanwhile."""
    steps(1, 3).add(3.5, "lighthouse_died", role="supervisor", exitcode=-9, reason="ended").write(tmp_path)
    ft = FaultTolerance(notify=hook.address)
    Teller(tmp_path, "127.0.0.1", ft, {"enable_tensorboard": True}, page=True).close()
    assert losses(tmp_path / "tb") == [(step, float(step)) for step in range(1, 4)]
    assert len(hook.texts) == 1
    assert "lighthouse died" in (tmp_path / "report.html").read_text()


def test_curves_go_on_once_they_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("everstep.report.curves.RETRY_S", 0.0)
    (tmp_path / "tb").touch()
    points = Curves(tmp_path, {"enable_tensorboard": True})
    for step in (1, 2):
        points.put(step, 1.0, {"loss_metrics/global_avg_loss": float(step)})
        points._thread.submit((tmp_path / "tb").unlink)
    points.close()
    assert losses(tmp_path / "tb") == [(2, 2.0)]


def test_a_run_tells_each_trouble_once_while_it_lasts_and_nobody_else_sees_the_address(told, hook):
    run_dir, _, tell = told
    lost = ("lighthouse_died", {"exitcode": -9, "reason": "ended"})
    back = ("lighthouse_started", {"address": "h:1", "pid": 7})
    log = EventLog(run_dir, None, None, "supervisor")

    def emit(*events):
        for kind, fields in events:
            log.emit(kind, **fields)

    emit(lost, back)  # which ends before the process reads it
    teller = tell()
    alive = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    words = [word for child in alive for word in child.cmdline()]
    assert not [word for word in words if "secret" in word]
    page = run_dir / "report.html"
    for count in (1, 2):
        emit(lost, lost)
        until(lambda count=count: len(hook.texts) == count, "the sentence")
        until(lambda: page.exists() and "lighthouse died" in page.read_text(), "the page")  # its loop runs by then
        emit(back)
        until(lambda: "lighthouse died" not in page.read_text(), "the end of it")
    emit(lost, back, lost)
    until(lambda: len(hook.texts) == 4, "the sentence")
    teller._process.kill()
    teller._process.wait()
    emit(("run_ended", {"status": "failed", "reason": "every group was given up"}))
    until(lambda: teller.keep() or len(hook.texts) == 6, "what holds still, and what began meanwhile")
    teller.close()
    assert [text.split(":")[0] for text in hook.texts] == [run_dir.name] * 6
    assert all("The lighthouse died (exit code -9): no group can join" in text for text in hook.texts[:5])
    assert hook.texts[5].endswith(": The run failed: every group was given up.")
    assert "secret" not in page_of(run_dir).read_text()


def test_a_page_that_cannot_be_written_is_served_and_told_of_once(told, hook, capfd):
    """For instance on a full disk, where no event can be written either."""
    run_dir, figures, tell = told
    (run_dir / "report.html").mkdir()
    teller = tell()
    until(lambda: "This is retried in" in answer(teller.address), "what is wrong, on the page that is served")
    assert 'everstep_degraded{guarantee="machine"} 1.0' in answer(figures).splitlines()
    time.sleep(2 * PAUSE_S)
    said = [line for line in capfd.readouterr().out.splitlines() if str(run_dir) in line]
    assert [line.replace("everstep", run_dir.name, 1) for line in said] == hook.texts
    assert len(hook.texts) == 1


def test_no_page_is_written_into_a_run_directory_that_was_removed(told, capfd):
    run_dir, _, tell = told
    teller = tell()
    until((run_dir / "report.html").exists, "a page")
    run_dir.rename(run_dir.with_name("gone"))  # by one rename, as a page may be written just now
    teller.close()
    said = capfd.readouterr()
    assert said.err == ""
    assert not (run_dir / "report.html").exists()


def test_a_port_that_is_taken_costs_the_figures_alone_and_until_it_is_free(tmp_path, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        teller = Teller(tmp_path, "127.0.0.1", FaultTolerance(metrics_port=port), {})
        assert f"no metrics on 127.0.0.1:{port} (fault_tolerance.metrics" in capfd.readouterr().out
    until(lambda: teller.keep() or "metrics" in teller._sockets, "the port")
    teller._process.wait()
    until(lambda: teller.keep() or teller._process.poll() is None, "another process")
    until(lambda: "everstep_loss" in answer(f"http://127.0.0.1:{port}/metrics"), "the figures")
    teller.close()


def test_the_last_progress_is_when_it_was_seen_whatever_clock_dates_the_commit(told):
    run_dir, figures, tell = told
    tell()
    until(lambda: "everstep_committed_step 3.0" in answer(figures), "the steps of before")
    begin = time.time()
    steps(4, 4).write(run_dir)
    until(lambda: "everstep_committed_step 4.0" in answer(figures), "a step")
    (seen,) = re.findall(r"\neverstep_last_progress_timestamp_seconds (\S+)", answer(figures))
    assert begin <= float(seen) <= time.time()


WITH_A_LONG_LOG = """
import pathlib, sys, time
from everstep.report import live
from everstep.run.events import EventTail
EventTail.past, live.CLOSE_S = lambda tail: time.sleep(60), 1
live.tell(pathlib.Path(sys.argv[1]), live.FaultTolerance(), {}, {"metrics": int(sys.argv[2])})
"""


def test_while_a_long_log_is_read_there_are_no_figures_and_they_end_with_their_launcher(tmp_path):
    listening = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-c", WITH_A_LONG_LOG, tmp_path, str(listening.fileno())]
    fds = {"pass_fds": [listening.fileno()], "stdin": subprocess.PIPE}
    with subprocess.Popen(command, **fds, env=environment()) as process:
        assert answer("http://127.0.0.1:{}/metrics".format(*listening.getsockname()[1:])) == "503"
        process.stdin.close()
        assert process.wait(30) == -signal.SIGALRM


def test_what_torchtitan_measures_is_drawn_and_validation_is_a_curve_of_its_own():
    event = Timeline().commit(1.0, 1, groups=(0,), loss=7.5).logged[0]
    event["metrics"] = {"throughput(tps)": 10.0, "mfu(%)": 1.5, "loss_metrics/global_avg_loss": -1.0}
    drawn = scalars_of(event)
    assert (drawn["throughput(tps)"], drawn["mfu(%)"]) == (10.0, 1.5)
    assert drawn["loss_metrics/global_avg_loss"] == 7.5, "the whole run's, not the rank's"
    assert scalars_of({"kind": "validation", "loss": 3.0}) == {"validation_metrics/loss": 3.0}


def test_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged = []
    for committed in ((1, 2, 3, 2, 3), (4, 5)):
        sink = WandB(tmp_path)
        log = sink._run.log
        monkeypatch.setattr(sink._run, "log", lambda scalars, step, log=log: (logged.append(step), log(scalars, step)))
        for step in committed:
            sink.write(step, float(step), {"loss": 1.0})
        sink.close()
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1, "one W&B run, of two processes"
    assert logged == [1, 2, 3, 3, 4, 5], "W&B's steps only grow"
