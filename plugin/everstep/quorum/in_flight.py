"""Sums under way, and the thread that waits for them.

Some works say when they are complete, some only return from `wait`, and one that a dead peer was part of may do
neither. So a thread of its own waits for the works of a process group, one after the other in the order in which they
began, and whoever wants a sum waits for that thread: no longer than the sum's timeout, and not at all once the process
group is broken. The thread of a broken process group is left behind until its works end.

A sum on a device runs on a stream of the process group's own, and an event behind it tells when its kernel has ended,
complete or aborted. Nobody but this thread waits for the event, so the one that begins sums never waits for the device.
"""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from everstep.step.interfaces import SumsBroken
from everstep.step.streams import Event, Streams

LATE_S = 0.5
"""A backend gives up a sum at its timeout itself; one that has not by then, and so long after, is given up."""


class Sum:
    """One sum under way. `ended`: nothing reads or writes its tensor on its behalf any more."""

    def __init__(self, among: "InFlight", work: Any, event: Event | None, timeout: timedelta) -> None:
        self.among, self.work, self.event = among, work, event
        self.began, self.timeout_s = time.monotonic(), timeout.total_seconds()
        self.ended_at = 0.0
        self.error = ""

    @property
    def ended(self) -> bool:
        return self.ended_at > 0


class InFlight:
    """The sums of one process group.

    Args:
        streams: of the device that the sums run on.
        error: says why sums of this process group that ended are not to be believed; empty where they are.
    """

    def __init__(self, streams: Streams, error: Callable[[], str]) -> None:
        self._streams, self._error = streams, error
        self._news = threading.Condition()
        self._queue: queue.SimpleQueue[Sum | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_ended = 0.0
        self._broken = False
        self.pending = 0
        """Sums that have not ended."""

    def add(self, work: Any, event: Event | None, timeout: timedelta) -> Sum:
        """Wait for a sum that has begun."""
        one = Sum(self, work, event, timeout)
        with self._news:
            self.pending += 1
        self._queue.put(one)
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, name="sums", daemon=True)
            self._thread.start()
        return one

    def finish(self, one: Sum) -> None:
        """Return when the sum is complete.

        Raises:
            SumsBroken: it failed, took too long, or the process group was broken meanwhile.
        """
        with self._news:
            while not one.ended and not self._broken:
                # One begins when the one before it has ended, however early it was asked for.
                left_s = max(one.began, self._last_ended) + one.timeout_s + LATE_S - time.monotonic()
                if left_s <= 0:
                    raise SumsBroken(f"a sum did not complete within {one.timeout_s:g} s")
                self._news.wait(left_s)
            if self._broken:
                raise SumsBroken("a member of the quorum was lost")
        if one.error:
            raise SumsBroken(one.error)

    def end(self) -> None:
        """The process group is broken: nobody waits for its sums any more."""
        with self._news:
            self._broken = True
            self._news.notify_all()
        self._queue.put(None)

    @property
    def idle(self) -> bool:
        """Whether all sums have ended, after `end`."""
        return self._thread is None or not self._thread.is_alive()

    def _wait_for_all(self) -> None:
        while (one := self._queue.get()) is not None:
            error = self._wait_for(one)
            with self._news:
                one.error, one.work = error, None
                one.ended_at = self._last_ended = time.monotonic()
                self.pending -= 1
                self._news.notify_all()

    def _wait_for(self, one: Sum) -> str:
        """Until the sum has ended; why it failed, or nothing."""
        error = ""
        try:
            with self._streams.of_sums():
                if one.work is not None:
                    one.work.wait()
                if one.event is None:
                    one.event = self._streams.record()
        except Exception as raised:  # noqa: BLE001 - backends raise what they like
            error = first_line(raised)
        try:
            if one.event is not None:
                one.event.synchronize()  # a work that raised may still run on the device
        except Exception as raised:  # noqa: BLE001 - a device that is lost says so here
            error = error or first_line(raised)
        return error or self._error()


def first_line(error: Exception) -> str:
    """What an exception says, short enough for an event."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
