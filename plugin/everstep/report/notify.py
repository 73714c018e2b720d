"""Tells a webhook of each trouble when it begins: JSON as Slack takes it, {"text": …}, and nothing else.

A thread of the process that tells of the run posts it, so that a webhook that is slow or away holds up neither the run
nor its page. It looks at what is wrong at the time: what began and ended while the webhook was slow is not told.
"""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

from everstep.report.troubles import Trouble

TIMEOUT_S = 5.0
TRIES = 2
CLOSE_S = 8.0
"""How long the end of the run waits for what is left."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer that sends us elsewhere is an error: the address is a secret, and only its owner's."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class Notifier:
    """Posts each trouble once while it lasts.

    Args:
        address: of the webhook.
        name: of the run, with which each text begins.
    """

    def __init__(self, address: str, name: str) -> None:
        self._address, self._name = address, name
        self._found: tuple[Trouble, ...] = ()
        self._closing = False
        self._news = threading.Event()
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._thread = threading.Thread(target=self._tell, name="notify", daemon=True)
        self._thread.start()

    def look(self, troubles: Iterable[Trouble]) -> None:
        """These do not hold now."""
        self._found = tuple(troubles)
        self._news.set()

    def close(self) -> None:
        """Post what is left, for CLOSE_S at most."""
        self._closing = True
        self._news.set()
        self._thread.join(CLOSE_S)

    def _tell(self) -> None:
        told: set[tuple[str, str]] = set()
        while True:
            closing = self._closing
            told &= {(one.guarantee, one.who) for one in self._found}
            new = next((one for one in self._found if (one.guarantee, one.who) not in told), None)
            if new is not None:
                told.add((new.guarantee, new.who))
                self._post(f"{self._name}: {new.sentence}")
            elif closing:
                return
            else:
                self._news.wait()
                self._news.clear()

    def _post(self, text: str) -> None:
        data = json.dumps({"text": text}).encode()
        reason = ""
        for _ in range(TRIES):
            try:
                request = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
                with self._open(request, timeout=TIMEOUT_S):
                    return
            except Exception as error:  # noqa: BLE001  whatever an address and a network can give
                reason = f"{type(error).__name__}: {getattr(error, 'reason', error)}"
        print(f"everstep: notify: not told ({reason}): {text}", flush=True)
