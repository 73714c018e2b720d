"""Does a lighthouse still answer? One that hangs keeps its port and its connections, so that only asking tells."""

import threading
import urllib.parse
from datetime import timedelta

from everstep import wire

PROBE_EVERY_S = 2.0
PROBE_TIMEOUT_S = 5.0
SILENT_PROBES = 2


def answers(address: str) -> bool:
    """Whether the lighthouse there (http://host:port) says its name, as one that merely listens may not."""
    place = urllib.parse.urlsplit(address)
    try:
        at = wire.format_address(place.hostname or "", place.port or 0)
    except ValueError:  # no port
        return False
    return wire.answers(at, timedelta(seconds=PROBE_TIMEOUT_S))


class Probe:
    """Asks a lighthouse again and again, in a thread of its own: an answer that does not come holds nobody up."""

    def __init__(self, address: str):
        self.address = address
        self._silent = 0
        self._closed = threading.Event()
        threading.Thread(target=self._ask, name="lighthouse-probe", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """Whether it has left several questions in a row without an answer."""
        return self._silent >= SILENT_PROBES

    def close(self) -> None:
        self._closed.set()

    def _ask(self) -> None:
        while not self._closed.wait(PROBE_EVERY_S):
            self._silent = 0 if answers(self.address) else self._silent + 1
