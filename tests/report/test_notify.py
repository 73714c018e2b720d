"""A webhook is told of what begins to be wrong, and can do nothing to the run."""

import os
import threading
import time

import psutil
import pytest

from everstep.report import notify
from everstep.report.live import Teller
from everstep.report.notify import Notifier
from everstep.run.events import EventLog
from timeline import page_of
from watched import until


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(notify, "CLOSE_S", 3.0)


def test_a_webhook_that_never_answers_holds_nobody_up(hook, small, capfd):
    gone = threading.Event()
    hook.answer = lambda handler: (gone.wait(30), handler.send_response(200))
    notifier, begin = Notifier(hook.address), time.monotonic()
    for number in range(30):
        notifier.tell(f"trouble {number}")
    notifier.close()
    gone.set()
    assert time.monotonic() - begin < 20.0
    said = capfd.readouterr().out
    assert "everstep: notify: not told (URLError: timed out): trouble 0" in said or "TimeoutError" in said
    assert "everstep: notify: not told (it is too slow): trouble 29" in said
    assert "secret" not in said


@pytest.mark.parametrize("status", [301, 302, 307, 404, 500])
def test_an_answer_that_is_no_success_is_said_and_followed_nowhere(hook, status, capfd):
    def elsewhere(handler):
        handler.send_response(status)
        handler.send_header("Location", hook.address.replace("T0", "elsewhere"))

    hook.answer = elsewhere
    notifier = Notifier(hook.address)
    notifier.tell("run: a trouble")
    notifier.close()
    assert hook.posted == [("/T0/secret", "application/json", {"text": "run: a trouble"})] * notify.TRIES
    said = capfd.readouterr().out
    assert "everstep: notify: not told (HTTPError: " in said
    assert "run: a trouble" in said
    assert "secret" not in said


def test_a_run_tells_each_trouble_once_while_it_lasts_and_nobody_else_sees_the_address(hook, tmp_path):
    (tmp_path / "config.toml").write_text(f'[fault_tolerance]\ngroups = 2\nnotify = "{hook.address}"\nexact = false\n')
    log = EventLog(tmp_path, None, None, "supervisor")
    log.emit("run_started", groups=2, ranks_per_group=1, seed=0, steps=9)
    log.emit("resource_shortage", reason="lighthouse: no memory", again_s=-100.0)
    log.emit("page", address="")  # with which that is over before anybody reads it
    teller = Teller(tmp_path, page=True)

    def words():
        return [word for child in psutil.Process(os.getpid()).children() for word in child.cmdline()]

    until(lambda: "everstep.report.live" in words(), "the process")
    assert not [word for word in words() if "secret" in word]
    page = tmp_path / "report.html"
    for count in (1, 2):
        log.emit("lighthouse_died", exitcode=-9, reason="ended")
        log.emit("lighthouse_died", exitcode=-9, reason="ended")
        until(lambda count=count: len(hook.texts) == count, "the sentence")
        until(lambda: page.exists() and "lighthouse died" in page.read_text(), "the page")  # it looks often by then
        log.emit("lighthouse_started", address="h:1", pid=7)
        until(lambda: page.exists() and "lighthouse died" not in page.read_text(), "the end of it")
    log.emit("lighthouse_died", exitcode=-9, reason="ended")
    log.emit("lighthouse_started", address="h:1", pid=7)  # which is over within a moment
    log.emit("run_ended", status="failed", reason="every group was given up")
    teller.close()
    assert [text.split(":")[0] for text in hook.texts] == [tmp_path.name] * 4
    assert all("The lighthouse died (-9): no group can join" in text for text in hook.texts[:3])
    assert hook.texts[3].endswith(": The run failed: every group was given up.")
    text = page_of(tmp_path).read_text()
    assert "secret" not in text
    assert "exact = false" in text
