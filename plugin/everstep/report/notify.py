"""Tells a webhook of each trouble when it begins: JSON as Slack takes it, {"text": …}, and nothing else.

A thread of the process that tells of the run posts it, so that a webhook that is slow or away holds up neither the run
nor its page. What cannot be posted in time is dropped, with a word on the console.
"""

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

from everstep.report.troubles import Troubles

MOST_WAITING = 64
"""Sentences; of more the newest are dropped."""
TIMEOUT_S = 5.0
TRIES = 2
CLOSE_S = 8.0
"""How long the end of the run waits for what is left."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer that sends us elsewhere is an error: the address is a secret, and only its owner's."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class Notifier:
    """Follows the events of a run and posts each trouble that begins.

    Args:
        address: of the webhook.
        name: of the run, with which each text begins.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._troubles = Troubles()
        self._waiting: queue.Queue[str | None] = queue.Queue(MOST_WAITING)
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._thread = threading.Thread(target=self._post_all, name="notify", daemon=True)
        self._thread.start()

    def follow(self, events: Iterable[dict[str, Any]]) -> None:
        """Take note of new events. What began and ended among them is not told, nor a change of a sentence."""
        before = set(self._troubles.now)
        for event in events:
            if event["kind"] == "run_started":
                before = set()
            self._troubles.take(event)
        for key, found in self._troubles.now.items():
            if key not in before:
                self._put(f"{self._name}: {found.sentence}")

    def close(self) -> None:
        """Post what is left, for CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _put(self, text: str) -> None:
        try:
            self._waiting.put_nowait(text)
        except queue.Full:
            print("everstep: notify: too many sentences wait; one is dropped", flush=True)

    def _post_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            reason = ""
            for _ in range(TRIES):
                try:
                    self._post(text)
                    break
                except Exception as error:  # noqa: BLE001  whatever an address and a network can give
                    reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
            else:
                print(f"everstep: notify: not told ({reason}): {text}", flush=True)

    def _post(self, text: str) -> None:
        data = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"}, method="POST")
        with self._open(request, timeout=TIMEOUT_S):
            return
