"""Tells a webhook of each trouble when it begins: JSON as Slack takes it, {"text": …}, and nothing else."""

import json
import queue
import threading
import urllib.request
from typing import Any

TIMEOUT_S = 5.0
TRIES = 2
WAITING = 20
"""Texts that may wait for a webhook that is slow; of more the newest are said on the console alone."""
CLOSE_S = 8.0
"""How long the end of the run waits for what is left."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An answer that sends us elsewhere is an error: the address is a secret, and only its owner's."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class Notifier:
    """Posts texts to the webhook at `address` in a thread of its own, so that one that is slow or away holds up neither
    the run nor its page."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._texts: queue.Queue[str | None] = queue.Queue(WAITING)
        self._open = urllib.request.build_opener(_NoRedirect).open
        self._thread = threading.Thread(target=self._tell, name="notify", daemon=True)
        self._thread.start()

    def tell(self, text: str) -> None:
        try:
            self._texts.put_nowait(text)
        except queue.Full:
            _complain("it is too slow", text)

    def close(self) -> None:
        """Post what is left, for CLOSE_S at most."""
        try:
            self._texts.put(None, timeout=CLOSE_S / 2)
        except queue.Full:
            return
        self._thread.join(CLOSE_S / 2)

    def _tell(self) -> None:
        while (text := self._texts.get()) is not None:
            self._post(text)

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
        _complain(reason, text)


def _complain(reason: str, text: str) -> None:
    print(f"everstep: notify: not told ({reason}): {text}", flush=True)
