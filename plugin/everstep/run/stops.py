"""What asks a process to stop."""

import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def collect_stops() -> list[int]:
    """The list in which STOPS that reach this process are from now on, rather than end it."""
    stops: list[int] = []
    for signum in STOPS:
        signal.signal(signum, lambda number, _: stops.append(number))
    return stops
