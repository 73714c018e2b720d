"""The signals that ask a process to stop."""

import signal
import time

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.3
"""Seconds within which further signals belong to the same request. A terminal sends Ctrl-C to all its processes, and
`timeout`, `uv run` and the like then pass it on once more."""


def collect_stops() -> list[float]:
    """Catch STOPS from now on, and return the list to which each request to stop is added: its time, by
    `time.monotonic()`. These signals no longer end the process. Under nohup SIGHUP stays ignored."""
    stops: list[float] = []

    def note(*_: object) -> None:
        now = time.monotonic()
        if not stops or now - stops[-1] > SAME_S:
            stops.append(now)

    for signum in STOPS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, note)
    return stops
