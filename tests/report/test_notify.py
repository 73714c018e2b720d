"""A webhook is told of what begins to be wrong, and can do nothing to the run."""

import os
import threading
import time

import psutil
import pytest

from everstep.report import notify
from everstep.report.live import Teller, Telling
from everstep.report.notify import Notifier
from everstep.report.page import write_page
from everstep.report.troubles import Troubles
from everstep.run.events import EventLog
from watched import until


def broken(*steps):
    """Troubles: so many slots are poison."""
    troubles = Troubles()
    for step in steps:
        event = {"t": step, "kind": "poison_slot", "step": step, "slot": 0, "groups": [0], "error": "x"}
        troubles.take(event | {"action": "skip"})
    return troubles.now.values()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(notify, "CLOSE_S", 2.0)


def test_each_trouble_is_told_once_while_it_lasts(hook):
    notifier = Notifier(hook.address, "run")
    for count, steps in enumerate(((1,), (1, 2), (2, 3), (1, 2, 3)), start=1):
        notifier.look(broken(*steps))
        until(lambda count=count: len(hook.texts) == count, "the sentence")
    notifier.close()
    assert [text.split(" ended")[0] for text in hook.texts] == [f"run: Slot 0 of step {step}" for step in (1, 2, 3, 1)]


def test_a_webhook_that_never_answers_holds_nobody_up(hook, small, capfd):
    gone = threading.Event()
    hook.answer = lambda handler: (gone.wait(30), handler.send_response(200))
    notifier, begin = Notifier(hook.address, "run"), time.monotonic()
    for first in range(30):
        notifier.look(broken(first))
    notifier.close()
    gone.set()
    assert time.monotonic() - begin < 5.0
    said = capfd.readouterr().out
    assert "everstep: notify: not told (" in said, "nothing is waited for longer than TIMEOUT_S"
    assert "secret" not in said


@pytest.mark.parametrize("status", [301, 302, 307, 404, 500])
def test_an_answer_that_is_no_success_is_said_and_followed_nowhere(hook, status, capfd):
    def elsewhere(handler):
        handler.send_response(status)
        handler.send_header("Location", hook.address.replace("T0", "elsewhere"))

    hook.answer = elsewhere
    notifier = Notifier(hook.address, "run")
    notifier.look(broken(0))
    notifier.close()
    assert {path for path, _, _ in hook.posted} == {"/T0/secret"}
    assert len(hook.posted) == notify.TRIES
    said = capfd.readouterr().out
    assert "everstep: notify: not told (HTTPError: " in said
    assert "Slot 0 of step 0" in said
    assert "secret" not in said


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/secret", "http://nowhere.invalid/secret", "no address", ""])
def test_an_address_that_is_nobodys_is_said(address, capfd, small):
    notifier = Notifier(address, "run")
    notifier.look(broken(0))
    notifier.close()
    said = capfd.readouterr().out
    assert said.startswith("everstep: notify: not told (")
    assert "secret" not in said


def test_a_run_tells_it_within_seconds_and_nobody_else_sees_the_address(hook, tmp_path):
    (tmp_path / "config.toml").write_text(f'[fault_tolerance]\ngroups = 2\nnotify = "{hook.address}"\nexact = false\n')
    log = EventLog(tmp_path, None, None, "supervisor")
    log.emit("run_started", groups=2, ranks_per_group=1, seed=0, steps=9)
    teller = Teller(Telling(tmp_path, groups=2, page=True, notify=True))
    words = [word for child in psutil.Process(os.getpid()).children() for word in child.cmdline()]
    assert "everstep.report.page" in words
    assert not [word for word in words if "secret" in word]
    begin = time.monotonic()
    log.emit("lighthouse_died", exitcode=-9, reason="ended")
    until(lambda: hook.texts, "the sentence", 10)
    assert time.monotonic() - begin < 10
    log.emit("run_ended", status="failed", reason="every group was given up")
    teller.close()
    assert hook.texts[0].startswith(f"{tmp_path.name}: The lighthouse died (-9): no group can join")
    assert hook.texts[1:] == [f"{tmp_path.name}: The run failed: every group was given up."]
    text = write_page(tmp_path).read_text()
    assert "secret" not in text
    assert "exact = false" in text
