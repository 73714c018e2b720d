"""Tells a webhook of each trouble when it begins: JSON as Slack takes it, {"text": …}, and nothing else."""

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
"""Texts that may wait for a webhook that is slow; of more the newest are said on the console alone."""
CLOSE_S = 8.0
"""How long the end of the run waits for what is left."""


class Outlet:
    """Gives things to what may be slow or away, one after the other in a thread of its own, so that neither the run nor
    its page waits. `most`: how many may wait; 0: any number."""

    def __init__(self, most: int = 0) -> None:
        self._things: queue.Queue[Any] = queue.Queue(most)
        self._giving: Any = None
        self._thread = threading.Thread(target=self._run, name=type(self).__name__, daemon=True)
        self._thread.start()

    def give(self, thing: Any) -> None:
        """Give one thing, or say why not."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last one."""

    def put(self, thing: object) -> None:
        """Have it given, or say that there was no room for it."""
        try:
            self._things.put_nowait(thing)
        except queue.Full:
            self.lose(thing, "it is too slow")

    def lose(self, thing: Any, reason: str) -> None:
        """Say why a thing is not given."""

    def close(self) -> None:
        """Give what is left, for CLOSE_S at most."""
        until = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._things.put(None, timeout=CLOSE_S / 2)
        self._thread.join(until - time.monotonic())
        for thing in filter(None, (self._giving, *self._things.queue)):
            self.lose(thing, "there was no time left")

    def _run(self) -> None:
        while (thing := self._things.get()) is not None:
            self._giving = thing
            self.give(thing)
            self._giving = None
        self.end()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer that sends us elsewhere is an error: the address is a secret, and only its owner's."""

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
            except Exception as error:  # noqa: BLE001  whatever an address and a network can give
                reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        self.lose(thing, reason)

    def lose(self, thing: str, reason: str) -> None:
        print(f"everstep: notify: not told ({reason}): {thing}", flush=True)
