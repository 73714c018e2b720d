"""What asks a process to stop."""

import signal
import time

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.3
"""Signals that come so soon after one are the same request: `timeout`, `uv run` and the like pass on what a terminal
has sent to all."""


def collect_stops() -> list[float]:
    """The list in which requests to stop, by STOPS that reach this process, are from now on, rather than end it: when
    each came, by time.monotonic(). With nohup a SIGHUP does neither."""
    stops: list[float] = []

    def note(*_: object) -> None:
        now = time.monotonic()
        if not stops or now - stops[-1] > SAME_S:
            stops.append(now)

    for signum in STOPS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, note)
    return stops
