"""Posts each trouble to a webhook when it begins, but not its end, as the JSON that Slack takes: {"text": …}."""

import contextlib
import json
import queue
import threading
import time
import urllib.request
from typing import Any

TIMEOUT_S = 5.0
TRIES = 2
WAITING = 20
"""Texts that may wait for a slow webhook. If the queue is full, newer ones are only printed on the console."""
CLOSE_S = 8.0
"""Seconds for which `Outlet.close` waits for the rest of a queue."""


class Outlet:
    """Hands things one by one to a receiver that may be slow or away. It does so in its own thread, so that neither the
    run nor its page waits. `most`: longest queue; 0: unbounded."""

    def __init__(self, most: int = 0) -> None:
        self._things: queue.Queue[Any] = queue.Queue(most)
        self._giving: Any = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def give(self, thing: Any) -> None:
        """Hand over one thing. Must not raise, as that ends the thread."""
        raise NotImplementedError

    def end(self) -> None:
        """Called in the thread after the last thing."""

    def put(self, thing: object) -> None:
        """Queue a thing. If the queue is full, the thing is lost."""
        try:
            self._things.put_nowait(thing)
        except queue.Full:
            self.lose(thing, "the webhook is too slow")

    def lose(self, thing: Any, reason: str) -> None:
        """Called for a thing that is not handed over, with the reason."""

    def close(self) -> None:
        """Hand over what is left in the queue, for CLOSE_S at most."""
        until = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._things.put(None, timeout=CLOSE_S / 2)
        self._thread.join(until - time.monotonic())
        for thing in filter(None, (self._giving, *self._things.queue)):
            self.lose(thing, "the run ended first")

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            self._giving = thing
            self.give(thing)
            self._giving = None
        self.end()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: the address is a secret, meant for that server alone."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class Webhook(Outlet):
    """Posts texts to `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        super().__init__(WAITING)

    def give(self, thing: str) -> None:
        data = json.dumps({"text": thing}).encode()
        reason = ""
        for _ in range(TRIES):
            try:
                request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
                with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
                    return
            except Exception as error:  # noqa: BLE001  a bad address, a network: anything
                reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        self.lose(thing, reason)

    def lose(self, thing: str, reason: str) -> None:
        print(f"everstep: fault_tolerance.notify: not sent ({reason}): {thing}", flush=True)
