"""Tells a webhook of each trouble when it begins: JSON as Slack takes it, {"text": …}, and nothing else."""

import functools
import json
import queue
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 5.0
TRIES = 2
WAITING = 20
"""Texts that may wait for a webhook that is slow; of more the newest are said on the console alone."""
CLOSE_S = 8.0
"""How long the end of the run waits for what is left."""


class Outlet:
    """Gives things to what may be slow or away, one after the other in a thread of its own, so that neither the run nor
    its page waits. `most`: how many may wait; 0: any number."""

    def __init__(self, name: str, give: Callable[[Any], None], most: int = 0) -> None:
        self._give = give
        self._things: queue.Queue[Any] = queue.Queue(most)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, thing: object) -> None:
        """Have it given, or say that there was no room for it."""
        try:
            self._things.put_nowait(thing)
        except queue.Full:
            _complain("it is too slow", thing)

    def close(self) -> None:
        """Give what is left, for CLOSE_S at most."""
        try:
            self._things.put(None, timeout=CLOSE_S / 2)
        except queue.Full:
            return
        self._thread.join(CLOSE_S / 2)

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            self._give(thing)


def webhook(address: str) -> Outlet:
    """Posts the texts that it is given to `address`."""
    return Outlet("notify", functools.partial(_post, address), WAITING)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer that sends us elsewhere is an error: the address is a secret, and only its owner's."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def _post(address: str, text: str) -> None:
    """Post a text to the webhook at `address`, or say why not."""
    data = json.dumps({"text": text}).encode()
    reason = ""
    for _ in range(TRIES):
        try:
            request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
                return
        except Exception as error:  # noqa: BLE001  whatever an address and a network can give
            reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    _complain(reason, text)


def _complain(reason: str, text: object) -> None:
    print(f"everstep: notify: not told ({reason}): {text}", flush=True)
