"""Posts each trouble to a webhook when it begins, but not its end, as the JSON that Slack takes: {"text": …}."""

import json
import queue
import threading
import urllib.request
from typing import Any

TIMEOUT_S = 5.0
TRIES = 2
CLOSE_S = 8.0
"""Seconds for which `Outlet.close` waits for the rest of a queue."""


class Outlet:
    """Hands things one by one to a receiver that may be slow or away. It does so in its own thread, so that neither the
    run nor its page waits."""

    def __init__(self) -> None:
        self._things: queue.Queue[Any] = queue.Queue()
        self._giving: Any = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def give(self, thing: Any) -> None:
        """Hand over one thing. Must not raise, as that ends the thread."""
        raise NotImplementedError

    def end(self) -> None:
        """Called in the thread after the last thing."""

    def put(self, thing: object) -> None:
        """Queue a thing."""
        self._things.put(thing)

    def lose(self, thing: Any, reason: str) -> None:
        """Called for a thing that is not handed over, with the reason."""

    def close(self) -> None:
        """Hand over what is left in the queue, for CLOSE_S at most."""
        self._things.put(None)
        self._thread.join(CLOSE_S)
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
        super().__init__()

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
