"""Tests of the webhook: it gets each trouble when it begins, and cannot hold the run up."""

import threading
import time

import pytest

from everstep.report import notify
from everstep.report.notify import Webhook


@pytest.mark.parametrize(("most", "last"), [(99, "the run ended first"), (2, "2 earlier attempts have no end")])
def test_a_webhook_that_never_answers_holds_nobody_up_and_what_it_was_not_told_is_said(
    hook, monkeypatch, capfd, most, last
):
    monkeypatch.setattr(notify, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(notify, "CLOSE_S", 3.0)
    monkeypatch.setattr(notify, "MOST_TRYING", most)
    monkeypatch.setattr(notify, "MOST_WAITING", 29)
    gone = threading.Event()
    hook.answer = lambda handler: [handler.wfile.write(b"H") for _ in iter(lambda: gone.wait(0.1), True)]
    outlet, begin = Webhook(hook.address), time.monotonic()
    for number in range(30):
        outlet.put(f"trouble {number}")
    outlet.close()
    assert sum("_try" in thread.name for thread in threading.enumerate()) <= most
    gone.set()
    assert time.monotonic() - begin < 20.0
    said = capfd.readouterr().out
    assert "fault_tolerance.notify: not sent (URLError: timed out): trouble 0" in said or "TimeoutError" in said
    assert f"everstep: fault_tolerance.notify: not sent ({last}): trouble 28" in said
    assert "everstep: fault_tolerance.notify: not sent (29 wait before it): trouble 29" in said
    assert all(f": trouble {number}\n" in said for number in range(30))
    assert "secret" not in said


@pytest.mark.parametrize("status", [301, 302, 307, 404, 500])
def test_an_answer_that_is_no_success_is_said_and_followed_nowhere(hook, status, capfd):
    def elsewhere(handler):
        handler.send_response(status)
        handler.send_header("Location", hook.address.replace("T0", "elsewhere"))

    hook.answer = elsewhere
    outlet = Webhook(hook.address)
    outlet.put("run: a trouble")
    outlet.close()
    assert hook.posted == [("/T0/secret", "application/json", {"text": "run: a trouble"})] * notify.TRIES
    said = capfd.readouterr().out
    assert "everstep: fault_tolerance.notify: not sent (HTTPError: " in said
    assert "run: a trouble" in said
    assert "secret" not in said
